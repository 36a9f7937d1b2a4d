"""/health and /metrics, and that odd input of any shape never hurts the server."""

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tenuto_server.runtime.null import NullExecutor


def families(site) -> dict:
    status, headers, data = site.request("GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    return {family.name: family for family in text_string_to_metric_families(data.decode())}


def samples(family) -> dict:
    return {tuple(sorted(sample.labels.items())): sample.value for sample in family.samples}


def test_health_when_all_is_well(site):
    status, _, body = site.request("GET", "/health")
    assert (status, body["status"], body["model"], body["problems"]) == (200, "ok", "toy", [])
    assert body["detail"]["engine"]["healthy"] is True


class SickDisk(NullExecutor):
    """An executor whose disk tier stopped taking writes."""

    def health(self):
        return {**super().health(), "disk": {"writable": False, "reason": "no space left on device", "errors": 4}}


def test_a_disk_that_takes_no_writes_is_degraded_and_said(make_site):
    site = make_site(executor=SickDisk())
    status, _, body = site.request("GET", "/health")
    assert (status, body["status"]) == (200, "degraded")
    assert body["problems"] == ["disk: no space left on device"]
    assert site.chat()[0] == 200
    assert samples(families(site)["tenuto_executor_disk"])[(("kind", "errors"),)] == 4


def test_metrics_of_both_sides(make_site, wait):
    site = make_site()
    site.chat()
    site.stream()
    site.chat(n=2)
    wait(lambda: "tenuto_turns_running" in families(site))
    found = families(site)
    assert samples(found["tenuto_tokens_cached"])[(("tier", "device"),)] == 3
    assert samples(found["tenuto_engine_healthy"])[()] == 1
    count = {s.name: s.value for s in found["tenuto_ttft_seconds"].samples if not s.labels}
    assert count["tenuto_ttft_seconds_count"] == 2
    assert count["tenuto_ttft_seconds_sum"] > 0
    assert samples(found["tenuto_http_responses"])[(("route", "/v1/chat/completions"), ("status", "200"))] == 2
    assert samples(found["tenuto_http_responses"])[(("route", "/v1/chat/completions"), ("status", "400"))] == 1
    outcomes = {
        s.labels["outcome"]: s.value for s in found["tenuto_request_seconds"].samples if s.name.endswith("_count")
    }
    assert outcomes == {"stop": 2}
    assert all(re.fullmatch(r"tenuto_[a-z0-9_]+", name) for name in found)


def test_paths_of_strangers_do_not_become_labels(make_site):
    site = make_site()
    for n in range(20):
        site.request("GET", f"/secret/{n}")
        site.request("GET", f"/v1/sessions/{n}")
    routes = {s.labels["route"] for s in families(site)["tenuto_http_responses"].samples if "route" in s.labels}
    assert routes == {"other", "/v1/sessions"} | ({"/metrics"} & routes)


leaves = st.none() | st.booleans() | st.integers(-3, 1 << 70) | st.floats() | st.text(max_size=8)
values = st.recursive(
    leaves, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=6), v, max_size=3), max_leaves=8
)
parts = st.fixed_dictionaries({}, optional={"type": st.sampled_from(["text", "image_url"]) | values, "text": values})
messages = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]) | values,
        "content": st.text(max_size=10) | st.lists(parts, max_size=2) | values,
        "tool_calls": st.lists(st.fixed_dictionaries({}, optional={"function": values, "id": values}), max_size=2)
        | values,
        "name": values,
    },
)
bodies = st.fixed_dictionaries(
    {"model": st.just("toy") | values},
    optional={
        "messages": st.lists(messages, max_size=3) | values,
        "prompt": st.text(max_size=9) | st.lists(st.integers(-1, 600), max_size=4) | values,
        "tools": st.lists(st.fixed_dictionaries({"function": values}), max_size=2) | values,
        "stream": st.booleans() | values,
        "stream_options": st.fixed_dictionaries({}, optional={"include_usage": values}) | values,
        "max_tokens": st.integers(-1, 20) | values,
        "temperature": st.floats(-1, 3) | values,
        "top_p": values,
        "top_k": values,
        "stop": st.text(max_size=4) | st.lists(st.text(max_size=4), max_size=5) | values,
        "stop_token_ids": values,
        "seed": values,
        "n": values,
        "session_id": values,
        "metadata": values,
        "cache_salt": values,
        "kv_hints": st.fixed_dictionaries({"actions": values}) | values,
        "chat_template_kwargs": values,
        "ignore_eos": values,
    },
)


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/kv_hints", "/tokenize", "/detokenize"]
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(body=bodies | values)
def test_no_json_body_hurts_the_server(shared_site, path, body):
    status, _, answer = shared_site.request("POST", path, body)
    assert status in (200, 400, 404)
    if status != 200:
        assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert shared_site.service.loop.healthy
