"""``/v1/responses`` over a WebSocket, with a real client on a real socket."""

import json

import pytest

sync = pytest.importorskip("websockets.sync.client")
exceptions = pytest.importorskip("websockets.exceptions")

CREATE = {"type": "response.create", "model": "toy", "input": "hi", "store": False}


def connect(site, **headers):
    return sync.connect(
        f"ws://127.0.0.1:{site.port}/v1/responses", additional_headers=headers, open_timeout=10, close_timeout=1
    )


def ask(socket, **fields):
    """The events of one answer."""
    socket.send(json.dumps({**CREATE, **fields}))
    events = []
    while not events or events[-1]["type"] not in (
        "response.completed",
        "response.incomplete",
        "response.failed",
        "error",
    ):
        events.append(json.loads(socket.recv(timeout=10)))
    return events


def test_events_come_in_frames_and_turns_go_on_from_what_is_not_stored(site):
    with connect(site, **{"session-id": "s"}) as socket:
        warm = ask(socket, generate=False)[-1]["response"]
        assert (warm["output"], site.engine.turns[0].warm) == ([], True)
        first = ask(socket, previous_response_id=warm["id"], input="one")
        assert [e["sequence_number"] for e in first] == list(range(len(first)))
        assert [e["type"] for e in first][:2] == ["response.created", "response.in_progress"]
        response = first[-1]["response"]
        assert response["output"][0]["content"][0]["text"] == "hello world"
        ask(socket, previous_response_id=response["id"], input="two")
    texts = [site.service.model.tokenizer.decode(turn.tokens.tolist()) for turn in site.engine.turns]
    for text, message in zip(texts[1:], ("one", "two"), strict=True):
        assert text.endswith(f"<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n")
    assert texts[1].startswith(texts[0].removesuffix("<|im_start|>assistant\n"))  # what a user said can be answered
    assert texts[2].startswith(texts[1] + "hello world<|im_end|>")
    assert {turn.session for turn in site.engine.turns} == {"s"}
    # What was not to be stored is known to this connection only.
    assert site.request("GET", f"/v1/responses/{response['id']}")[0] == 404
    with connect(site) as other:
        refused = ask(other, previous_response_id=response["id"])[-1]
        assert (refused["type"], refused["status"], refused["error"]["code"]) == (
            "error",
            400,
            "previous_response_not_found",
        )


def test_identity_of_each_request_where_the_connection_has_none(site):
    with connect(site) as socket:
        ask(socket, client_metadata={"session_id": "root", "thread_id": "t1", "x-codex-parent-thread-id": "root"})
        ask(socket, client_metadata={"session_id": "root", "thread_id": "root"})
    assert [(turn.session, turn.parent) for turn in site.engine.turns] == [("root/t1", "root"), ("root", None)]


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        ("{", "malformed JSON"),
        ("[1]", "expected a JSON object"),
        (json.dumps({**CREATE, "type": "response.cancel"}), "response.create"),
        (json.dumps({**CREATE, "input": [7]}), "input[0]"),
        (json.dumps({**CREATE, "model": "llama-99"}), "llama-99"),
    ],
)
def test_a_bad_frame_gets_an_error_and_the_connection_lives(site, frame, words):
    with connect(site) as socket:
        socket.send(frame)
        answer = json.loads(socket.recv(timeout=10))
        assert answer["type"] == "error"
        assert words in answer["error"]["message"]
        assert ask(socket)[-1]["type"] == "response.completed"


def test_a_client_that_leaves_frees_its_turn(make_site, wait):
    site = make_site()
    site.engine.step_s, site.engine.script = 0.02, lambda turn: [65] * 2000
    with connect(site) as socket:
        socket.send(json.dumps({**CREATE, "max_output_tokens": 2000}))
        wait(lambda: len(site.engine.open) == 1)
    wait(lambda: len(site.engine.cancelled) == 1 and not site.engine.open)


def test_keys_are_asked_for_at_the_door(make_site):
    site = make_site(api_keys={"one": "k1"})
    with pytest.raises(exceptions.InvalidStatus) as refused:
        connect(site)
    assert refused.value.response.status_code == 401
    with connect(site, authorization="Bearer k1") as socket:
        assert ask(socket)[-1]["type"] == "response.completed"
    assert site.engine.turns[0].tenant == "one"


def test_a_failing_engine_ends_the_answer_not_in_silence(make_site, wait):
    site = make_site()
    site.engine.step_s, site.engine.script = 0.02, lambda turn: [65] * 2000
    with connect(site) as socket:
        socket.send(json.dumps({**CREATE, "max_output_tokens": 2000}))
        wait(lambda: len(site.engine.open) == 1)
        site.engine.crash = True
        site.request("GET", "/v1/sessions")
        events = [json.loads(socket.recv(timeout=10))]
        while events[-1]["type"] != "response.failed":
            events.append(json.loads(socket.recv(timeout=10)))
        assert events[-1]["response"]["error"]["code"] == "engine_unavailable"
