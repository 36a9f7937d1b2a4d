"""What rides on a generation request beside the prompt: who speaks, and hints. Holds no state.

Identity that cannot be read is refused by name. Hints never fail a generation: what cannot be read is dropped with a
``rejected`` receipt.
"""

from __future__ import annotations

import hashlib
import json
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
from tenuto_server.api.schema import GenerationRequest


@dataclass(frozen=True, slots=True)
class Riders:
    """What came along. ``receipts``: for hints that were dropped here, before the engine saw them."""

    identity: Identity
    salt: str = ""
    hints: Envelope | None = None
    receipts: tuple[Receipt, ...] = ()


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
    if identity.session is None:
        identity = Identity(_session_of_body(request), None, identity.final)
    # A salt in the body adds to one in the header: each can only narrow the sharing.
    salt = "\n".join(part for part in (headers.get(SALT_HEADER, ""), request.cache_salt or "") if part)
    hints, receipts = _read_hints(headers, request.kv_hints)
    return Riders(identity, salt, hints, receipts)


def _as_headers(told: Mapping[str, Any]) -> dict[str, str]:
    return {key.replace("_", "-"): value for key, value in told.items() if isinstance(value, str)}


def _session_of_body(request: GenerationRequest) -> str | None:
    user = (request.metadata or {}).get("user_id")
    for value in (request.session_id, request.prompt_cache_key, _session_of_user(user)):
        if value and value.strip():
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


def _read_hints(headers: Mapping[str, str], body: Any) -> tuple[Envelope | None, tuple[Receipt, ...]]:
    actions: list[EnvelopeAction] = []
    receipts: list[Receipt] = []
    if body is not None:
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
        raise bad_request(receipts[0].reason, "actions", "invalid_envelope")
    return envelope, receipts
