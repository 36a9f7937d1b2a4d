"""What the proxy rewrites, for whom, and that it rewrites nothing else."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.fake_server import FakeServer
from tenuto.proxy.normalise import PARTS, normalised, parts_of, sort_tools, strip_attribution

from .conftest import RawServer, RunningProxy, eventually, read_request, recorded

Make = Callable[..., RunningProxy]
Raw = Callable[[Callable[[socket.socket, int], None]], RawServer]
LINE = "x-anthropic-billing-header: cc_version=2.1.332.570; cc_entrypoint=sdk-cli; cch=4ab1f;"
USER = {"role": "user", "content": "x"}


def dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ({"system": [{"type": "text", "text": LINE}, {"type": "text", "text": "S"}]}, [{"type": "text", "text": "S"}]),
        ({"system": [{"type": "text", "text": LINE}]}, []),
        ({"system": [{"type": "text", "text": f"{LINE}\n\nS"}]}, [{"type": "text", "text": "S"}]),
        ({"system": f"{LINE}\nS"}, "S"),
        ({"system": LINE}, ""),
        ({"system": f"S\n{LINE}"}, f"S\n{LINE}"),  # not where the client puts it: somebody's text
    ],
)
def test_the_attribution_line_of_messages(body: dict[str, Any], left: Any) -> None:
    assert json.loads(strip_attribution(dumps({**body, "messages": [USER]}))) == {"system": left, "messages": [USER]}


@pytest.mark.parametrize("role", ["system", "developer"])
def test_the_attribution_line_of_translated_requests(role: str) -> None:
    for content, left in (
        (f"{LINE}\n\nS", "S"),
        ([{"type": "text", "text": LINE}, {"type": "text", "text": "S"}], [{"type": "text", "text": "S"}]),
    ):
        data = strip_attribution(dumps({"messages": [{"role": role, "content": content}, USER]}))
        assert json.loads(data)["messages"] == [{"role": role, "content": left}, USER]


def test_requests_that_differ_in_that_line_only_become_one() -> None:
    """Every request of a session has another ``cch=`` with some versions, a subagent one more mark."""
    lines = (LINE, LINE.replace("4ab1f", "00000"), f"{LINE} cc_is_subagent=true;")
    bodies = {
        strip_attribution(dumps({"system": [{"type": "text", "text": line}], "messages": [USER]})) for line in lines
    }
    assert len(bodies) == 1


def test_a_long_conversation_is_searched_where_the_line_can_be() -> None:
    talk = [{"role": "user", "content": "x" * 1000}] * 200
    for form, messages, system in (
        ("messages", talk, LINE),
        ("chat", [{"role": "system", "content": LINE}, *talk], ""),
    ):
        body = dumps({"messages": messages, "system": system})
        assert LINE.encode() not in normalised(form, body, PARTS)


@given(st.text())
def test_a_text_that_quotes_the_line_stays(text: str) -> None:
    quoted = json.dumps({"system": [{"type": "text", "text": LINE}]}) + text
    body = dumps({"messages": [{"role": "user", "content": quoted}], "system": text})
    if not text.startswith("x-anthropic"):
        assert strip_attribution(body) is body or strip_attribution(body) == body


def test_recorded_forks_begin_alike_once_the_line_is_out() -> None:
    system = []
    for record in recorded("claude-code-2.1.332/fork_subagent"):
        body = json.loads(strip_attribution(dumps(record["body"])))
        system.append(body["system"])
        assert LINE[:20] not in json.dumps(body["system"])
        assert {k: v for k, v in body.items() if k != "system"} == {
            k: v for k, v in record["body"].items() if k != "system"
        }
    assert all(text == system[0] for text in system)


def chat_tools(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, "parameters": {"b": 1.5, "a": "é"}}} for name in names]


def test_tools_are_put_in_order() -> None:
    body = {"tools": chat_tools("read", "bash", "edit"), "messages": [USER], "model": "m"}
    changed = json.loads(sort_tools(dumps(body)))
    assert [t["function"]["name"] for t in changed["tools"]] == ["bash", "edit", "read"]
    assert list(changed) == list(body)  # the order of the fields stays
    assert list(changed["tools"][0]["function"]["parameters"]) == ["b", "a"]
    assert sort_tools(dumps(changed)) == dumps(changed)
    responses = {"tools": [{"type": "web_search"}, {"type": "function", "name": "b"}, {"type": "custom", "name": "a"}]}
    assert [t.get("name") for t in json.loads(sort_tools(dumps(responses)))["tools"]] == [None, "a", "b"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no JSON",
        b"[]",
        b'{"tools": 5}',
        b'{"tools": [1, "b"]}',
        b'{"tools": [{"name": "b", "cache_control": {"type": "ephemeral"}}, {"name": "a"}]}',
        b'{"tools": [{"name": "b"}, {"name": "a"}], "x": NaN}',
    ],
)
def test_what_cannot_be_put_in_order_stays(data: bytes) -> None:
    assert sort_tools(data) == data
    assert normalised("chat", data, PARTS) == data


def test_parts() -> None:
    assert parts_of("all") == PARTS
    assert parts_of("none") == frozenset()
    assert parts_of("tools, attribution") == PARTS
    for wrong in ("", "everything", "all,none"):
        with pytest.raises(ValueError, match="not attribution, tools, all or none"):
            parts_of(wrong)


BODY = dumps({"tools": chat_tools("b", "a"), "system": f"{LINE}\nS", "messages": [USER]})


@pytest.mark.parametrize(
    ("kind", "parts", "system", "tools"),
    [
        ("hosted", None, f"{LINE}\nS", ["b", "a"]),
        ("hosted", PARTS, "S", ["a", "b"]),
        ("local", None, "S", ["b", "a"]),
        ("local", PARTS, "S", ["a", "b"]),
        ("local", frozenset(), f"{LINE}\nS", ["b", "a"]),
        ("tenuto", None, "S", ["b", "a"]),
    ],
)
def test_for_whom_what_is_rewritten(
    proxies: Make, fake: FakeServer, kind: str, parts: frozenset[str] | None, system: str, tools: list[str]
) -> None:
    proxy = proxies(fake.url, kind, normalise=parts)
    assert proxy.post("/v1/messages", BODY)[0] == 200
    body = fake.requests[0].body
    assert body["system"] == system
    assert [t["function"]["name"] for t in body["tools"]] == tools


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
@pytest.mark.parametrize("kind", ["local", "tenuto", "hosted"])
def test_packed_bodies_are_unpacked_for_servers_that_may_not_know_how(
    proxies: Make, raw: Raw, kind: str, coding: str
) -> None:
    zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
    packed = gzip.compress(BODY) if coding == "gzip" else zstandard.compress(BODY)
    seen: list[tuple[bytes, bytes]] = []

    def script(connection: socket.socket, number: int) -> None:
        seen.append(read_request(connection))
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    proxy = proxies(raw(script).url, kind)
    assert proxy.post("/v1/messages", packed, {"content-encoding": coding}) == (200, b"{}")
    (head, body), *hints = [s for s in seen if b"kv_hints" not in s[0]]
    assert hints == []
    if kind == "local":
        assert b"content-encoding" not in head.lower()
        assert json.loads(body)["system"] == "S"
    else:
        assert f"content-encoding: {coding}".encode() in head.lower()
        assert body == packed
    (node,) = proxy.tracker.nodes.values()  # read all the same
    eventually(lambda: node.prompt is not None and len(node.prompt.messages) == 1, "the request read")
