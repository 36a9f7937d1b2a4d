"""What rides on a generation request beside the prompt: who speaks, and hints. Holds no state.

Identity that cannot be read is refused by name. Hints never fail a generation: what cannot be read is dropped with a
``rejected`` receipt.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from tenuto.headers import (
    HINTS_HEADER,
    ID_CHARS_MAX,
    SALT_HEADER,
    HeaderError,
    Identity,
    decode_hints,
    read_identity,
)
from tenuto.wire import Envelope, EnvelopeAction, Receipt, describe_error
from tenuto_server.api.errors import ApiError, bad_request
from tenuto_server.api.retain import closes, inner
from tenuto_server.api.schema import GenerationRequest

_PRIORITY_MAX = 10**9
_SGLANG_FIELDS = ("session_params", "rid", "extra_key")
"""Fields by which a body is known to be meant for SGLang, whose priorities count upwards."""


@dataclass(frozen=True, slots=True)
class Riders:
    """What came along. ``receipts``: for hints that were dropped here, before the engine saw them. ``priority``: higher is
    more important, whatever the client's own scale."""

    identity: Identity
    salt: str = ""
    hints: Envelope | None = None
    receipts: tuple[Receipt, ...] = ()
    priority: float = 0.0


def read_riders(headers: Mapping[str, str], request: GenerationRequest, raw: Mapping[str, Any] | None = None) -> Riders:
    """Identity (headers before body), cache salt and hints (body before header). ``raw``: the whole body. Raises 400 for an
    overlong id."""
    try:
        identity = read_identity(headers)
        if identity.session is None and isinstance(told := (raw or {}).get("client_metadata"), dict):
            # On a WebSocket the client's headers come once, for the connection; each request repeats them here.
            identity = read_identity(_as_headers(told))
    except HeaderError as error:
        raise ApiError(400, str(error), param=str(error).partition(":")[0], code="invalid_header") from None
    body = raw or {}
    if identity.session is None:
        identity = Identity(_session_of_body(request, body), None, identity.final)
    if closes(body):
        identity = Identity(identity.session, identity.parent, True)
    # A salt in the body adds to one in the header: each can only narrow the sharing.
    salt = "\n".join(part for part in (headers.get(SALT_HEADER, ""), request.cache_salt or "") if part)
    transfer = inner(body, "kv_transfer_params")
    hints, receipts = _read_hints(headers, request.kv_hints, transfer.get("kv_hints"))
    return Riders(identity, salt, hints, receipts, read_priority(headers, body))


def _as_headers(told: Mapping[str, Any]) -> dict[str, str]:
    return {key.replace("_", "-"): value for key, value in told.items() if isinstance(value, str)}


def read_priority(headers: Mapping[str, str], raw: Mapping[str, Any]) -> float:
    """A request's priority on our scale, where higher is more important. ``X-Vllm-Priority`` goes before the body, and in
    both vLLM's scale is the other way round; SGLang's ``priority`` (known by its own fields beside it) and Dynamo's
    ``nvext.agent_hints.priority`` are like ours. What is no number counts as none."""
    header = headers.get("x-vllm-priority", "").strip()
    if re.fullmatch(r"-?\d{1,9}", header):
        return -float(header)
    hinted = _number(inner(raw, "nvext", "agent_hints").get("priority"))
    if hinted is not None:
        return hinted
    value = _number(raw.get("priority")) or 0.0
    return value if any(field in raw for field in _SGLANG_FIELDS) else -value


def _number(value: Any) -> float | None:
    if type(value) not in (int, float) or value != value:
        return None
    return float(
        max(-_PRIORITY_MAX, min(_PRIORITY_MAX, value))
    )  # in this order: an integer may be too large for a float


def _session_of_body(request: GenerationRequest, raw: Mapping[str, Any]) -> str | None:
    user = (request.metadata or {}).get("user_id")
    elsewhere = (
        inner(raw, "session_params").get("id"),
        inner(raw, "nvext", "session_control").get("session_id"),
        inner(raw, "vllm_xargs").get("session_id"),
    )
    for value in (request.session_id, *elsewhere, request.prompt_cache_key, _session_of_user(user)):
        if isinstance(value, str) and value.strip():
            name = value.strip()
            if len(name) <= ID_CHARS_MAX:
                return name
            # These fields were not made for us, so their length is no mistake: a digest names the session as well.
            return "body/" + hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    return None


def _session_of_user(value: Any) -> str | None:
    """``metadata.user_id`` holds, in clients that put a session there, JSON or ``..._session_<id>``; else it is taken whole."""
    if not isinstance(value, str):
        return None
    if value.startswith("{"):
        try:
            inner = json.loads(value)
        except (ValueError, RecursionError):
            return value
        session = inner.get("session_id") if isinstance(inner, dict) else None
        return session if isinstance(session, str) else value
    _, found, session = value.rpartition("_session_")
    return session if found and session else value


def _read_hints(headers: Mapping[str, str], *bodies: Any) -> tuple[Envelope | None, tuple[Receipt, ...]]:
    actions: list[EnvelopeAction] = []
    receipts: list[Receipt] = []
    for body in bodies:
        if body is None:
            continue
        found, refused = read_envelope(body)
        actions += found.actions if found else ()
        receipts += refused
    if HINTS_HEADER in headers:
        try:
            actions += decode_hints(headers[HINTS_HEADER]).actions
        except HeaderError as error:
            receipts.append(Receipt(action_id="", outcome="rejected", reason=str(error)))
    return (Envelope(actions=tuple(actions)) if actions else None), tuple(receipts)


def read_envelope(value: Any) -> tuple[Envelope | None, list[Receipt]]:
    """An envelope from JSON, with a ``rejected`` receipt for each part that is not one. None: not an envelope at all."""
    if not isinstance(value, dict) or not isinstance(value.get("actions", []), list):
        reason = "kv_hints: expected an object with an array of actions"
        return None, [Receipt(action_id="", outcome="rejected", reason=reason)]
    actions, receipts = [], []
    for index, item in enumerate(value.get("actions", [])):
        try:
            actions.append(EnvelopeAction.model_validate(item))
        except ValidationError as error:
            named = item.get("action_id") if isinstance(item, dict) else None
            action_id = named[:256] if isinstance(named, str) else ""
            reason = f"actions[{index}].{describe_error(error)}"
            receipts.append(Receipt(action_id=action_id, outcome="rejected", reason=reason))
    try:
        head = {key: value[key] for key in ("protocol_version", "message_id") if key in value}
        return Envelope.model_validate({**head, "actions": tuple(actions)}), receipts
    except ValidationError as error:
        return None, [Receipt(action_id="", outcome="rejected", reason=f"kv_hints.{describe_error(error)}")]


def envelope_or_400(value: Any) -> tuple[Envelope, list[Receipt]]:
    """``read_envelope`` for a request that is nothing but an envelope: 400 if it is none."""
    envelope, receipts = read_envelope(value)
    if envelope is None:
        reason = receipts[0].reason.removeprefix("kv_hints.")
        if reason.startswith("kv_hints:"):
            reason = "actions: expected an array"  # the whole body is the envelope here
        raise bad_request(reason, reason.partition(":")[0], "invalid_envelope")
    return envelope, receipts
