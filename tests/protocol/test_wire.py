"""The wire: every action and receipt survives a round trip, golden JSON pins the shapes, bad input names its field."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tenuto.headers import (
    HINTS_HEADER_BYTES_MAX,
    HeaderError,
    decode_hints,
    encode_hints,
    read_identity,
    write_identity,
)
from tenuto.wire import (
    ACTIONS,
    AnyAction,
    CacheReport,
    Envelope,
    EnvelopeAction,
    Receipts,
    SessionView,
    Wire,
    describe_error,
)

GOLDEN = Path(__file__).parent / "golden"


def bounds(metadata: Iterable[Any]) -> dict[str, Any]:
    """Limits that a field states, whatever object states them."""
    found: dict[str, Any] = {}
    for item in metadata:
        for inner in getattr(item, "metadata", None) or [item]:
            for name in ("ge", "le", "min_length", "max_length"):
                if getattr(inner, name, None) is not None:
                    found[name] = getattr(inner, name)
    return found


def values(annotation: Any, metadata: Iterable[Any] = ()) -> st.SearchStrategy[Any]:
    """Values of a wire type within its stated limits."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return values(inner, more)
    limits = bounds(metadata)
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return st.sampled_from(args)
    if origin in (Union, UnionType):
        return st.one_of([values(arg) for arg in args])
    if origin is tuple:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if origin is dict:
        inner = st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=4), max_size=2)
        return inner if args[1] is Any else st.dictionaries(values(args[0]), values(args[1]), max_size=2)
    if isinstance(annotation, type) and issubclass(annotation, Wire):
        return built(annotation)
    if annotation is bool:
        return st.booleans()
    if annotation is int:
        return st.integers(limits.get("ge", -(10**6)), limits.get("le", 10**6))
    if annotation is float:
        return st.floats(limits.get("ge", -1e9), limits.get("le", 1e9), allow_nan=False)
    if annotation is str:
        return st.text(min_size=limits.get("min_length", 0), max_size=40)
    return st.none()


def built(model: type[Wire]) -> st.SearchStrategy[Any]:
    """Instances of a model."""
    fields = {name: values(field.annotation, field.metadata) for name, field in model.model_fields.items()}
    return st.builds(model, **fields)


def any_action() -> st.SearchStrategy[AnyAction]:
    """Any action of the protocol, built from its model's own fields."""
    return st.sampled_from(sorted(ACTIONS)).flatmap(lambda name: built(ACTIONS[name]))


@settings(max_examples=150, deadline=None)
@given(st.lists(any_action(), max_size=5))
def test_envelopes_survive_a_round_trip(actions: list[AnyAction]) -> None:
    envelope = Envelope.of(actions)
    again = Envelope.model_validate_json(envelope.model_dump_json())
    assert again == envelope
    assert [item.parse() for item in again.actions] == actions


@settings(max_examples=200, deadline=None)
@given(st.one_of(built(Receipts), built(CacheReport), built(SessionView)))
def test_answers_survive_a_round_trip(answer: Receipts | CacheReport | SessionView) -> None:
    assert type(answer).model_validate_json(answer.model_dump_json()) == answer


@settings(max_examples=100, deadline=None)
@given(st.lists(any_action(), max_size=3))
def test_headers_carry_what_fits(actions: list[AnyAction]) -> None:
    envelope = Envelope.of(actions)
    if len(envelope.model_dump_json(exclude_none=True).encode()) > HINTS_HEADER_BYTES_MAX * 3 // 4:
        with pytest.raises(HeaderError, match=str(HINTS_HEADER_BYTES_MAX)):
            encode_hints(envelope)
        return
    value = encode_hints(envelope)
    assert value.isascii()
    assert decode_hints(value) == envelope


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_golden_envelopes(path: Path) -> None:
    """What other implementations send: read as written down in the protocol, and written back without loss."""
    written = json.loads(path.read_text())
    envelope = Envelope.model_validate(written["envelope"])
    parsed = [item.parse() for item in envelope.actions]
    for action, expected in zip(parsed, written["parsed"], strict=True):
        if expected is None:
            assert action is None
            continue
        assert action is not None
        dumped = json.loads(action.model_dump_json(exclude_none=True))
        for key, value in expected.items():
            assert dumped[key] == value
    assert Envelope.model_validate_json(envelope.model_dump_json()) == envelope


def test_unknown_things_are_ignored() -> None:
    item = EnvelopeAction.model_validate({"action_id": "a", "action_type": "kv.fetch", "payload": {"x": 1}, "extra": 2})
    assert item.parse() is None
    newer = EnvelopeAction(action_id="a", action_type="agent.end", action_version="2.0", payload={"session": "s"})
    assert newer.parse() is None
    later_minor = EnvelopeAction(
        action_id="a", action_type="agent.end", action_version="1.7", payload={"session": "s", "new": True}
    )
    assert later_minor.parse() is not None


@pytest.mark.parametrize(
    ("action_type", "payload", "field"),
    [
        ("agent.pause", {"session": "s", "kind": "lunch"}, "kind"),
        ("agent.pause", {"kind": "tool"}, "session"),
        ("agent.pause", {"session": "s", "kind": "tool", "forecast": {"p50_s": -1}}, "forecast.p50_s"),
        ("agent.pause", {"session": "s", "kind": "tool", "forecast": {"p50_s": "soon"}}, "forecast.p50_s"),
        ("agent.keepalive", {"session": "s", "for_s": 1e12}, "for_s"),
        ("agent.keepalive", {"session": "s", "for_s": float("nan")}, "for_s"),
        ("agent.compaction", {"session": "s", "phase": "later"}, "phase"),
        ("kv.retain", {"session": "s", "target": 3}, "target"),
        ("agent.session", {"session": ""}, "session"),
    ],
)
def test_bad_payloads_name_their_field(action_type: str, payload: dict[str, object], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        EnvelopeAction(action_id="a", action_type=action_type, payload=payload).parse()
    assert describe_error(caught.value).startswith(field + ":")


@pytest.mark.parametrize("value", ["%%%", "a" * (HINTS_HEADER_BYTES_MAX + 1), "e30", "W10", "bm90IGpzb24", "é"])
def test_bad_headers_are_told_apart(value: str) -> None:
    if value == "e30":  # "{}": an empty envelope is fine
        assert decode_hints(value).actions == ()
        return
    with pytest.raises(HeaderError, match="x-tenuto-hints"):
        decode_hints(value)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=400))
def test_no_header_crashes(value: str) -> None:
    with contextlib.suppress(HeaderError):
        decode_hints(value)


@pytest.mark.parametrize(
    ("headers", "session", "parent"),
    [
        ({"x-session-id": "s", "x-parent-session-id": "p"}, "s", "p"),
        ({"x-session-id": "s", "x-parent-session-id": "s"}, "s", None),
        ({"x-claude-code-session-id": "c"}, "c", None),
        ({"x-claude-code-session-id": "c", "x-claude-code-agent-id": "a"}, "c/a", "c"),
        (
            {
                "x-claude-code-session-id": "c",
                "x-claude-code-agent-id": "b",
                "x-claude-code-parent-agent-id": "a",
            },
            "c/b",
            "c/a",
        ),
        ({"session-id": "r", "thread-id": "r"}, "r", None),
        ({"session-id": "r", "thread-id": "t", "x-codex-parent-thread-id": "r"}, "r/t", "r"),
        ({"x-dynamo-session-id": "d", "x-dynamo-parent-session-id": "e"}, "d", "e"),
        ({"x-litellm-session-id": "l"}, "l", None),
        ({"x-session-id": "ours", "x-claude-code-session-id": "theirs"}, "ours", None),
        ({}, None, None),
        ({"x-session-id": "  "}, None, None),
    ],
)
def test_identity(headers: dict[str, str], session: str | None, parent: str | None) -> None:
    identity = read_identity(headers)
    assert (identity.session, identity.parent) == (session, parent)


def test_identity_round_trip_and_limit() -> None:
    identity = read_identity(write_identity("child", "parent"))
    assert (identity.session, identity.parent, identity.final) == ("child", "parent", False)
    assert read_identity({"x-dynamo-session-id": "d", "x-dynamo-session-final": "true"}).final
    with pytest.raises(HeaderError, match=r"x-session-id.*256"):
        read_identity({"x-session-id": "x" * 257})
