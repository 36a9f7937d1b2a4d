"""Bodies read piece by piece against the same bodies read as a whole: nothing may differ but the work."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tenuto.proxy import bodies as module
from tenuto.proxy.bodies import Bodies, Reading, decoded
from tenuto.proxy.commands import connector
from tenuto.proxy.tracker import Tracker
from tenuto.proxy.upstream import Upstream

from .conftest import recorded

# Everything that means something in JSON, inside strings: none of it may be taken for structure.
TEXT = st.text(alphabet='[]{}",\\:ab\u00e9\n ', max_size=12)
VALUE = st.recursive(TEXT | st.integers() | st.none(), lambda v: st.lists(v, max_size=3), max_leaves=4)
BLOCK = st.fixed_dictionaries({"type": st.just("text"), "text": TEXT})
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": TEXT | st.lists(BLOCK, max_size=3)},
    optional={"extra": VALUE, "name": TEXT},
)
FIELDS = st.dictionaries(st.sampled_from(["model", "tools", "stop", "metadata", 'odd"]', "x"]), VALUE, max_size=4)
STYLE = st.sampled_from([(",", ":", None), (", ", ": ", None), (",", ": ", 2)])


def encode(before: Any, messages: Any, after: Any, style: Any, form: str = "messages") -> bytes:
    body = {**before, form: messages, **{k: v for k, v in after.items() if k not in before}}
    return json.dumps(body, separators=style[:2], indent=style[2], ensure_ascii=False).encode()


def told(reading: Reading | None, name: str = "messages") -> Any:
    """What a reading says, without how it came about."""
    assert reading is not None
    frame = {key: None if key == name else value for key, value in reading.frame.items()}
    return frame, replace(reading.items, last=None), reading.items.last


@settings(max_examples=200, deadline=None)
@given(FIELDS, st.lists(st.lists(MESSAGE, max_size=3), min_size=1, max_size=5), FIELDS, STYLE)
def test_a_growing_conversation_reads_as_a_whole_does(before: Any, turns: Any, after: Any, style: Any) -> None:
    known = Bodies()
    messages: list[Any] = []
    for turn in turns:
        messages = messages + turn
        data = encode(before, messages, after, style)
        reading = known.read("s", "messages", data)
        assert told(reading) == told(Bodies().read("s", "messages", data))
        assert reading is not None
        known.keep("s", "c", reading)


@settings(max_examples=200, deadline=None)
@given(FIELDS, st.lists(MESSAGE, min_size=1, max_size=4), FIELDS, STYLE, st.data())
def test_any_other_change_reads_as_a_whole_does(before: Any, messages: Any, after: Any, style: Any, data: Any) -> None:
    """History rewritten, cut or changed, fields changed: never anything of the old body where the new one differs."""
    known = Bodies()
    longer = messages + data.draw(st.lists(MESSAGE, max_size=2))
    for sent in (messages, longer):
        reading = known.read("s", "messages", encode(before, sent, after, style))
        assert reading is not None
        known.keep("s", "c", reading)
    changed: Any = data.draw(
        st.one_of(
            st.just((before, longer[:-1], after)),
            st.just((after, longer, before)),
            st.tuples(st.just(before), st.lists(MESSAGE, max_size=4), st.just(after)),
            st.tuples(FIELDS, st.just(longer), st.just(after)),
            st.tuples(st.just(before), st.just([*longer[:-1], *data.draw(st.lists(MESSAGE, max_size=2))]), FIELDS),
        )
    )
    first, talk, last = changed
    sent = encode(first, talk, last, style)
    assert told(known.read("s", "messages", sent)) == told(Bodies().read("s", "messages", sent))


@pytest.mark.parametrize(
    ("folder", "form", "name"),
    [
        ("claude-code-2.1.332/tool_roundtrip", "messages", "messages"),
        ("qwen-code-0.24.4/tool_roundtrip", "chat", "messages"),
        ("codex-0.171.0/tool_roundtrip", "responses", "input"),
        ("opencode-1.18.33/tool_roundtrip_chat", "chat", "messages"),
        ("mini-swe-agent-2.4.6/tool_roundtrip", "chat", "messages"),
    ],
)
def test_recorded_conversations(folder: str, form: str, name: str) -> None:
    known = Bodies()
    for record in recorded(folder):
        if record["method"] != "POST":
            continue
        data = json.dumps(record["body"], ensure_ascii=False, separators=(",", ":")).encode()
        reading = known.read("s", form, data)
        assert told(reading, name) == told(Bodies().read("s", form, data), name)
        assert reading is not None
        known.keep("s", "c", reading)


def turn(number: int, size: int = 1000) -> bytes:
    messages = [{"role": "user", "content": f"{n} " + "x" * size} for n in range(number)]
    return json.dumps({"model": "m", "messages": messages, "tools": [{"name": "t"}]}).encode()


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all that is parsed from now on."""
    parsed: list[int] = []

    def count(data: bytes) -> Any:
        parsed.append(len(data))
        return json.loads(data)

    monkeypatch.setattr(module, "parse", count)
    return parsed


def test_only_what_is_new_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = counted(monkeypatch)
    known = Bodies()
    for number in range(100, 110):
        reading = known.read("s", "chat", turn(number))
        assert reading is not None
        assert reading.items.count == number
        known.keep("s", "c", reading)
    whole, *rest = parsed
    assert whole == len(turn(100))
    assert sum(rest) < 9 * 1100 + 100  # nine messages, and once what follows the last one


def test_a_marker_that_moves_on_costs_two_turns_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claude Code marks the last message of each request: what was the last one then reads differently now."""
    parsed = counted(monkeypatch)
    known = Bodies()
    for number in range(50, 60):
        messages: list[Any] = [
            {"role": "user", "content": [{"type": "text", "text": "x" * 1000}]} for _ in range(number)
        ]
        messages[-1]["content"][0]["cache_control"] = {"type": "ephemeral"}
        data = json.dumps({"messages": messages, "model": "m"}).encode()
        reading = known.read("s", "messages", data)
        assert told(reading) == told(Bodies().read("s", "messages", data))
        assert reading is not None
        known.keep("s", "c", reading)
    mine = [size for size in parsed if size < 40_000]
    assert len(mine) >= 7  # the first two are read whole, and each comparison above


def test_conversations_of_others_are_not_looked_at() -> None:
    known = Bodies()
    reading = known.read("mine", "chat", turn(3))
    assert reading is not None
    known.keep("mine", "c", reading)
    other = known.read("theirs", "chat", turn(4))
    assert other is not None
    assert other.ends == ()


def test_a_body_that_has_grown_is_known_without_being_read() -> None:
    known = Bodies()
    after = {"tools": [1], "stream": True}
    style = (",", ":", None)
    talk = [{"role": "user", "content": f"{n} " + "words " * 30} for n in range(6)]
    for name, count in (("short", 2), ("long", 4)):
        reading = known.read("s", "messages", encode({"model": "m"}, talk[:count], after, style))
        assert reading is not None
        known.keep("s", name, reading)
    whole = encode({"model": "m"}, talk, after, style)
    assert known.grown("s", "messages", whole) == known.grown("s", "messages", bytearray(whole)) == "long"
    assert known.grown("s", "messages", encode({"model": "m"}, talk[:3], after, style)) is None  # which of the two?
    assert known.grown("s", "messages", encode({"model": "m"}, talk[:4], after, style)) == "long"  # once more
    assert known.grown("s", "messages", whole.replace(b"3 words", b"3 sword")) is None
    assert known.grown("s", "messages", whole.replace(b"0 words", b"0 sword")) is None
    assert known.grown("s", "messages", encode({"model": "m"}, talk, {**after, "stream": False}, style)) is None
    assert known.grown("s", "messages", encode({"model": "n"}, talk, after, style)) is None
    assert known.grown("s", "chat", whole) is known.grown("t", "messages", whole) is known.grown("s", "messages", b"")


@settings(max_examples=60, deadline=None)
@example([(2, "grow"), (3, "again"), (3, "grow"), (2, "fork"), (3, "again"), (2, "grow")])
@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["grow", "grow", "again", "rewrite", "fork"])), max_size=12)
)
def test_names_are_those_that_reading_everything_gives(steps: Any) -> None:
    """Conversations that grow, are sent again, rewritten or branch, in any order: the short way changes no name."""

    def names(short: bool) -> list[int]:
        tracker = Tracker(connector(Upstream("http://127.0.0.1:9", "hosted")))
        if not short:
            tracker._bodies.grown = lambda scope, form, data: None  # type: ignore[method-assign]
        talks = [[{"role": "user", "content": f"task {n // 2}"}] for n in range(4)]
        order: list[str] = []
        for which, step in steps:
            talk = talks[which]
            if step == "grow":
                talk += [
                    {"role": "assistant", "content": f"{len(talk)}"},
                    {"role": "user", "content": f"and {len(talk)}"},
                ]
            elif step == "rewrite":
                talk[0] = {"role": "user", "content": f"summary {len(talk)}"}
            elif step == "fork":
                talks[(which + 1) % 4] = [*talk, {"role": "user", "content": f"branch {which}"}]
            body = {"model": "m", "messages": talk, "tools": [{"type": "function", "function": {"name": "bash"}}]}
            ticket = tracker.open("/v1/chat/completions", {}, json.dumps(body).encode())
            assert ticket is not None
            assert ticket.node is not None
            tracker.study(ticket)
            tracker.answered(ticket, b"{}", streamed=False)
            order.append(ticket.node.name)
        assert tracker.errors == 0
        tracker.close()
        return [order.index(name) for name in order]

    assert names(True) == names(False)


def test_what_is_kept_is_bounded() -> None:
    known = Bodies(limit=3, bytes_max=10_000)
    for number in range(10):
        reading = known.read("s", "chat", turn(1 + number % 4, 1000 + number))
        assert reading is not None
        known.keep("s", f"c{number}", reading)
        assert len(known._latest) <= 3
        assert known._bytes == sum(len(r.data) for r in known._latest.values()) <= 10_000


@pytest.mark.parametrize("data", [b"", b"[]", b"7", b'{"messages": [', b"\xff\xfe", b'{"messages": 5}', b"{}"])
def test_what_is_no_conversation_is_read_or_left(data: bytes) -> None:
    known = Bodies()
    reading = known.read("s", "chat", data)
    if reading is not None:
        assert reading.items.count == 0
        known.keep("s", "c", reading)
        assert known.read("s", "chat", data) is not None


def test_content_codings() -> None:
    zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
    plain = turn(3)
    assert decoded(plain, "") == decoded(plain, "identity") == plain
    assert decoded(gzip.compress(plain), "gzip") == plain
    assert decoded(zstandard.compress(plain), "zstd") == plain
    streamed = zstandard.ZstdCompressor().compressobj()  # without its size in the head, as a stream is
    assert decoded(streamed.compress(plain) + streamed.flush(), "zstd") == plain
    for coding in ("gzip", "zstd", "deflate", "br"):
        assert decoded(b"no such thing", coding) is None


def test_a_bomb_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed")
    monkeypatch.setattr(module, "DECODED_BYTES_MAX", 1000)
    for squeezed, coding in ((gzip.compress(bytes(5000)), "gzip"), (zstandard.compress(bytes(5000)), "zstd")):
        assert decoded(squeezed, coding) is None
