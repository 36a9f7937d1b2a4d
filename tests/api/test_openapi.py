"""The description of the API, and what its routes do with everything that fits it or does not.

Requests are made from the description by schemathesis, with a fixed seed. Behind the routes stand the real engine and cache
over an executor that does no arithmetic: whatever came, no request may crash, and every block must be accounted for.
"""

import json
from urllib.parse import quote, urlencode

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.core import NotSet

from tenuto_server.api.openapi import BODIES
from tenuto_server.cache.identity import RootIdentity
from tenuto_server.cache.integrity import check
from tenuto_server.config import CacheConfig, EngineConfig
from tenuto_server.engine.engine import Engine
from tenuto_server.policy import make_policy
from tenuto_server.runtime.null import NullExecutor

IDENTITY = RootIdentity("weights", "", "bf16", 1, 16, b"a secret of sixteen bytes")
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
MODES = {"fits": GenerationMode.POSITIVE, "does not fit": GenerationMode.NEGATIVE}
EXAMPLES = 5


@pytest.fixture(scope="module")
def live(make_shared_site):
    engine = Engine(EngineConfig(CacheConfig(400, 200), max_context_tokens=600), make_policy("tenuto"), IDENTITY)
    return make_shared_site(engine, NullExecutor(vocab=512, tokens_low=40), context=600, body_bytes_max=200_000)


@pytest.fixture(scope="module")
def described(live):
    status, _, description = live.request("GET", "/openapi.json")
    assert status == 200
    return description


def test_every_route_is_described_with_its_body(described):
    posts = {path for path, operations in described["paths"].items() if "post" in operations}
    assert posts == set(BODIES)
    for path in posts:
        body = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        name = body["$ref"].rpartition("/")[2]
        assert described["components"]["schemas"][name]["properties"]
    chat = described["components"]["schemas"]["ChatRequest"]["properties"]
    assert "role" in chat["messages"]["items"]["properties"]


def operations(described, mode):
    """The described operations, for the one model that is served."""
    described = json.loads(json.dumps(described))
    for schema in described["components"]["schemas"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"const": "toy"}
        schema.get("properties", {}).pop("previous_response_id", None)  # no text that is made up names a stored one
    for result in schemathesis.openapi.from_dict(described).get_all_operations():
        operation = result.ok()
        if operation.method == "post" or mode == "fits":
            yield operation


def sent(case):
    """(method, path, headers, body) of a case, its answer kept short."""
    path = case.path
    for name, value in (case.path_parameters or {}).items():
        path = path.replace("{" + name + "}", quote(str(value), safe=""))
    query = f"?{urlencode(case.query)}" if case.query else ""
    headers = {name: str(value) for name, value in (case.headers or {}).items()}
    headers = {k: v for k, v in headers.items() if v.isprintable() and v.isascii() and k.lower() != "host"}
    if isinstance(case.body, NotSet):
        return case.method, path + query, headers, None
    body = case.body
    if isinstance(body, bytes):
        return case.method, path + query, headers, body
    if isinstance(body, dict):
        body = {**body, **{name: min(body[name], 6) for name in LIMITS if isinstance(body.get(name), int)}}
        if not any(isinstance(body.get(name), int) for name in LIMITS):
            body = {**body, **{name: 6 for name in LIMITS if name not in body}}
    return case.method, path + query, headers, json.dumps(body).encode("utf-8", "replace")


@pytest.mark.parametrize("mode", MODES)
def test_what_the_description_allows_and_forbids_is_answered_or_refused(live, described, mode):
    seen: dict[str, set[int]] = {}
    for operation in operations(described, mode):

        @settings(
            max_examples=EXAMPLES if operation.method == "post" else 2,  # the others take no body
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=MODES[mode]))
        def one(case):
            method, path, headers, body = sent(case)
            status, plain, answer = live.request(method.upper(), path, body, headers)
            seen.setdefault(case.path, set()).add(status)
            assert status < 500, answer
            assert plain["x-request-id"].startswith("req_")
            if status >= 400 and method != "head":
                refused(case.path, status, answer)

        one()
        live.request("GET", "/v1/sessions")
    if mode == "fits":
        # The description is near enough to what is accepted that most routes answer some of the little that is drawn here.
        answered = [path for path in BODIES if 200 in seen[path]]
        assert len(answered) > len(BODIES) // 2, seen


def refused(path, status, answer):
    """A refusal in the dialect's shape that names what is wrong."""
    assert (answer.get("type") == "error") == path.startswith("/v1/messages"), answer
    error = answer["error"]
    assert error["message"]
    assert error["type"]
    if status == 400 and not path.startswith("/v1/messages"):
        assert error["param"] is None or error["message"].startswith(error["param"].split("[")[0]), error
        assert error["param"] or error["code"], error


def test_after_all_that_nothing_is_lost(live, wait):
    """All blocks are accounted for, none is held, and the longest prompt there can be still fits."""
    cache = live.engine.core.cache
    wait(lambda: not cache.tables)
    live.request("GET", "/v1/sessions")  # whatever was posted before this has been seen
    check(cache)
    body = {"model": "toy", "prompt": [40] * 590, "max_tokens": 5}
    assert live.request("POST", "/v1/completions", body)[0] == 200
    wait(lambda: not cache.tables)
    live.request("GET", "/v1/sessions")
    check(cache)
    assert live.service.loop.healthy
