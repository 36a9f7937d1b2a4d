"""The API over the real engine: first with the executor that does no arithmetic, then with the toy model."""

import json
import threading

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tenuto_server.cache.identity import RootIdentity
from tenuto_server.commands import build_service
from tenuto_server.config import CacheConfig, EngineConfig, ServerConfig
from tenuto_server.engine.engine import Engine
from tenuto_server.policy import make_policy
from tenuto_server.runtime.null import NullExecutor

IDENTITY = RootIdentity("weights", "", "bf16", 1, 16, b"a secret of sixteen bytes")


@pytest.fixture
def live(make_site):
    """The real engine over 200 device blocks. Sampled ids are plain text of the toy vocabulary."""
    executor = NullExecutor(vocab=512, tokens_low=40, step_s=0.002)
    config = EngineConfig(CacheConfig(200, 400), policy="tenuto", max_context_tokens=3000, block_bytes=4096)
    site = make_site(Engine(config, make_policy("tenuto"), IDENTITY), executor, context=3000)
    yield site
    assert executor.wrong == []


def metrics(site) -> dict:
    found: dict = {}
    for family in text_string_to_metric_families(site.request("GET", "/metrics")[2].decode()):
        assert family.name not in found, f"{family.name} is exposed twice"
        found[family.name] = {tuple(s.labels.values()): s.value for s in family.samples}
    return found


def test_a_conversation_is_cached_from_turn_to_turn(live):
    talk = [{"role": "system", "content": "be brief " * 20}, {"role": "user", "content": "hello"}]
    _, _, first = live.chat(messages=talk, session_id="s", max_tokens=20, temperature=0, ignore_eos=True)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert first["tenuto"]["recomputed"] == {"cold": first["usage"]["prompt_tokens"]}
    assert first["usage"]["completion_tokens"] == 20
    talk += [first["choices"][0]["message"], {"role": "user", "content": "and now"}]
    _, headers, second = live.chat(messages=talk, session_id="s", max_tokens=5)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 16
    assert headers["x-tenuto-cached-device"] == str(second["tenuto"]["cached"]["device"])
    assert (headers["x-tenuto-session"], second["tenuto"]["session"]) == ("s", "s")
    _, _, view = live.request("GET", "/v1/sessions/s")
    assert (view["turns"], view["state"]) == (2, "paused")


def test_a_changed_prompt_is_told_where_it_changed(live):
    talk = [{"role": "system", "content": "rules " * 30}, {"role": "user", "content": "first question " * 10}]
    live.chat(messages=talk, session_id="s", max_tokens=4)
    talk[1] = {"role": "user", "content": "other question " * 10}
    _, _, answer = live.chat(messages=talk, session_id="s", max_tokens=4)
    found = answer["tenuto"]["divergence"]
    assert (found["message"], found["role"], found["part"]) == (1, "user", "message")


def test_hints_get_receipts_with_a_lease(live):
    live.chat(session_id="s", max_tokens=4)
    action = {
        "action_id": "1",
        "action_type": "agent.pause",
        "payload": {"session": "s", "kind": "tool", "tool": "bash"},
    }
    _, _, body = live.request("POST", "/v1/kv_hints", {"actions": [action]})
    assert body["receipts"][0]["outcome"] == "accepted"
    assert body["receipts"][0]["lease"]["tokens"] > 0
    _, _, body = live.request(
        "POST", "/v1/kv_hints", {"actions": [{**action, "payload": {"session": "x", "kind": "tool"}}]}
    )
    assert body["receipts"][0]["outcome"] == "missing"
    many = [{**action, "action_id": str(n)} for n in range(65)]
    status, _, body = live.request("POST", "/v1/kv_hints", {"actions": many})
    assert (status, body["error"]["code"]) == (429, "hint_limit")
    assert "hint_actions_max is 64" in body["error"]["message"]
    status, _, answer = live.chat(session_id="s", max_tokens=2, kv_hints={"actions": many})  # the same, riding along
    assert (status, answer["tenuto"]["receipts"][0]["outcome"]) == (200, "rejected")
    _, _, body = live.request("DELETE", "/v1/sessions/s")
    assert body["receipt"]["outcome"] == "accepted"


def test_a_hint_changes_no_token(live):
    ask = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    hint = {"actions": [{"action_id": "1", "action_type": "agent.end", "payload": {"session": "s"}}]}
    plain = live.chat(session_id="s", **ask)[2]["choices"][0]["message"]["content"]
    assert live.chat(session_id="s", kv_hints=hint, **ask)[2]["choices"][0]["message"]["content"] == plain


def test_disconnect_frees_the_blocks(live, wait):
    raw = live.open_stream(max_tokens=1500, ignore_eos=True)
    raw.recv(200)
    wait(lambda: metrics(live)["tenuto_turns_running"][()] == 1)
    wait(lambda: metrics(live)["tenuto_device_blocks_private"][()] > 0)
    raw.close()
    wait(lambda: metrics(live)["tenuto_turns_running"][()] == 0)
    wait(lambda: metrics(live)["tenuto_device_blocks_private"][()] == 0)
    assert metrics(live)["tenuto_turns"][("cancelled",)] == 1
    # Room for the longest turn there can be, and none of it is lost.
    assert live.chat("again " * 400, max_tokens=1000, ignore_eos=True)[0] == 200


def test_many_streams_more_than_fit_all_finish(live):
    results = []

    def one(number):
        status, _, events = live.stream(
            messages=[{"role": "user", "content": f"{number} " * 60}],
            max_tokens=30,
            ignore_eos=True,
            session_id=f"s{number}",
            stream_options={"include_usage": True},
        )
        results.append((status, events[-1]["usage"]["completion_tokens"]))

    threads = [threading.Thread(target=one, args=(n,)) for n in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [(200, 30)] * 40


def test_tenants_do_not_share_what_they_cached(make_site):
    config = EngineConfig(CacheConfig(200), max_context_tokens=3000)
    engine = Engine(config, make_policy("lru"), IDENTITY)
    site = make_site(engine, NullExecutor(vocab=512), context=3000, api_keys={"a": "key-a", "b": "key-b"})
    text = "a long enough text " * 10
    for key, cached in (("key-a", False), ("key-b", False), ("key-a", True), ("key-b", True)):
        _, _, answer = site.chat(text, headers={"x-api-key": key}, max_tokens=2, session_id=f"{key}{cached}")
        assert (answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == cached
    assert len(site.request("GET", "/v1/sessions", headers={"x-api-key": "key-a"})[2]["data"]) == 2
    assert site.request("GET", "/v1/sessions/key-aTrue", headers={"x-api-key": "key-b"})[0] == 404


@pytest.fixture(scope="module")
def toy(tmp_path_factory, site_class):
    """The toy model behind the wiring that ``serve`` uses."""
    config = ServerConfig(
        model="toy",
        dtype="fp32",
        device_bytes=8 * 2**20,
        host_bytes=8 * 2**20,
        disk_bytes=8 * 2**20,
        disk_dir=tmp_path_factory.mktemp("kv"),
        journal_path=tmp_path_factory.mktemp("journal") / "journal.jsonl",
    )
    site = site_class(build_service(config), None)
    site.start()
    yield site
    site.stop()
    lines = config.journal_path.read_text().splitlines()
    assert {json.loads(line)["kind"] for line in lines} >= {"admit", "turn_end"}


def test_the_toy_model_end_to_end(toy):
    with openai.OpenAI(base_url=f"{toy.url}/v1", api_key="x", max_retries=0) as client:
        ask = {
            "model": "toy",
            "messages": [{"role": "user", "content": "hello there " * 8}],
            "max_tokens": 24,
            "extra_body": {"ignore_eos": True},
        }
        cold = client.chat.completions.create(temperature=0, **ask)
        warm = client.chat.completions.create(temperature=0, **ask)
        assert warm.usage.prompt_tokens_details.cached_tokens > 0
        text = cold.choices[0].message.content
        assert warm.choices[0].message.content == text
        streamed = client.chat.completions.create(temperature=0, stream=True, **ask)
        assert "".join(c.choices[0].delta.content or "" for c in streamed) == text
        seeded = [
            client.chat.completions.create(temperature=1.0, seed=s, **ask).choices[0].message.content for s in (5, 5, 6)
        ]
        assert seeded[0] == seeded[1] != seeded[2]
        stop = text[7:10]
        cut = client.chat.completions.create(temperature=0, stop=stop, **ask)
        assert cut.choices[0].message.content == text[: text.index(stop)]
        assert cut.choices[0].finish_reason == "stop"


def test_the_toy_server_says_what_it_is(toy):
    status, _, body = toy.request("GET", "/health")
    assert (status, body["status"]) == (200, "ok")
    about = body["detail"]["about"]
    assert (about["kernels"], about["dtype"], about["policy"]) == ("cpu", "fp32", "tenuto")
    assert body["detail"]["tiers"]["disk"]["writable"] is True
    # 8 MiB hold fewer tokens than the model's context: the smaller number is what a prompt may have.
    block = body["detail"]["tiers"]["block_bytes"]
    room = (8 * 2**20 // block - 2) * 16
    assert toy.request("GET", "/v1/models")[2]["data"][0]["max_model_len"] == room
    status, _, body = toy.request("POST", "/v1/completions", {"model": "toy", "prompt": [5] * room})
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert str(room) in body["error"]["message"]
