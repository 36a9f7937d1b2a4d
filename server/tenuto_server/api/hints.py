"""``POST /v1/kv_hints`` and the session views. Holds no state; everything is scoped to the tenant of the API key."""

from __future__ import annotations

import secrets

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tenuto.headers import ID_CHARS_MAX
from tenuto.wire import AgentEnd, AgentSession, Envelope, Receipt, Receipts, SessionView
from tenuto_server.api.carriers import envelope_or_400
from tenuto_server.api.errors import ApiError, bad_request, busy, encode_json
from tenuto_server.api.limits import HINT_BODY_BYTES_MAX, read_json
from tenuto_server.api.service import Service, service_of
from tenuto_server.api.warm import warm_compacted
from tenuto_server.engine.events import HintBatch, QuerySessions
from tenuto_server.engine.plan import HintsDone, SessionsOut

router = APIRouter()

LIMIT_REASON = "limit:"
"""How the reason of a receipt begins when a limit, not the action itself, was the cause."""


@router.post("/v1/kv_hints")
async def kv_hints(request: Request) -> Response:
    """Takes an envelope, answers a receipt for each action, in order. 429 when a limit refused all of it."""
    service = service_of(request)
    tenant = service.keys.tenant(request.headers)
    envelope, refused = envelope_or_400(await read_json(request, HINT_BODY_BYTES_MAX))
    receipts = await send_hints(service, tenant, envelope) if envelope.actions else ()
    receipts = await warm_compacted(service, tenant, envelope, receipts)
    answer = Receipts(message_id=envelope.message_id, receipts=(*receipts, *refused))
    return Response(encode_json(answer.model_dump(mode="json", exclude_none=True)), media_type="application/json")


async def send_hints(service: Service, tenant: str, envelope: Envelope) -> tuple[Receipt, ...]:
    """The engine's receipts. Raises 429 naming the limit when it refused every action for a limit."""
    output = await service.ask(HintBatch(secrets.token_hex(8), tenant, envelope))
    assert isinstance(output, HintsDone)
    over = [r for r in output.receipts if r.outcome == "rejected" and r.reason.startswith(LIMIT_REASON)]
    if over and len(over) == len(output.receipts):
        raise busy(f"kv_hints: {over[0].reason.removeprefix(LIMIT_REASON).strip()}", "hint_limit")
    return output.receipts


@router.post("/open_session")
async def open_session(request: Request) -> Response:
    """A session by SGLang's name for it; answers its id, a new one where none is given."""
    service = service_of(request)
    tenant = service.keys.tenant(request.headers)
    name = await _named(request, required=False) or f"session-{secrets.token_hex(12)}"
    await send_hints(service, tenant, Envelope.of([AgentSession(session=name)]))
    return Response(encode_json(name), media_type="application/json")


@router.post("/close_session")
async def close_session(request: Request) -> Response:
    """The end of a session by SGLang's name for it; one that is not known is closed already."""
    service = service_of(request)
    tenant = service.keys.tenant(request.headers)
    name = await _named(request, required=True)
    await send_hints(service, tenant, Envelope.of([AgentEnd(session=name)]))
    return Response(encode_json(None), media_type="application/json")


async def _named(request: Request, required: bool) -> str:
    name = (await read_json(request, HINT_BODY_BYTES_MAX)).get("session_id")
    if name is None and not required:
        return ""
    if not isinstance(name, str) or not 1 <= len(name) <= ID_CHARS_MAX:
        message = f"session_id: expected a string of 1 to {ID_CHARS_MAX} characters"
        raise bad_request(message, "session_id")
    return name


@router.get("/v1/sessions")
async def sessions(request: Request) -> Response:
    """All sessions of the tenant."""
    service = service_of(request)
    views = await query(service, service.keys.tenant(request.headers), None)
    data = [view.model_dump(mode="json", exclude_none=True) for view in views]
    return Response(encode_json({"object": "list", "data": data}), media_type="application/json")


@router.get("/v1/sessions/{session:path}")
async def session(request: Request, session: str) -> Response:
    """One session. Raises 404."""
    service = service_of(request)
    view = await find(service, service.keys.tenant(request.headers), session)
    return Response(encode_json(view.model_dump(mode="json", exclude_none=True)), media_type="application/json")


@router.delete("/v1/sessions/{session:path}")
async def end_session(request: Request, session: str) -> Response:
    """Ends a session, as ``agent.end`` does; answers the receipt, and ``deleted`` false where it says not now or not at
    all. Raises 404."""
    service = service_of(request)
    tenant = service.keys.tenant(request.headers)
    await find(service, tenant, session)
    receipts = await send_hints(service, tenant, Envelope.of([AgentEnd(session=session)]))
    if not receipts or receipts[0].outcome == "missing":  # it went between the two questions
        raise unknown_session(session)
    body = receipts[0].model_dump(mode="json", exclude_none=True)
    done = receipts[0].outcome in ("accepted", "clipped")
    return Response(encode_json({"id": session, "deleted": done, "receipt": body}), media_type="application/json")


async def query(service: Service, tenant: str, name: str | None) -> tuple[SessionView, ...]:
    """The engine's views of a tenant's sessions, or of one."""
    output = await service.ask(QuerySessions(secrets.token_hex(8), tenant, name))
    assert isinstance(output, SessionsOut)
    return tuple(_shown(service, tenant, view) for view in output.views)


def _shown(service: Service, tenant: str, view: SessionView) -> SessionView:
    """A subagent that has answered is in no pause that anybody waits out. Its KV is still what the view says."""
    if view.state != "paused" or not service.traffic.finished(tenant, view.id):
        return view
    ended = {"state": "ended", "pause_kind": None, "pause_age_s": None, "forecast": None}
    return view.model_copy(update=ended)


async def find(service: Service, tenant: str, name: str) -> SessionView:
    """The view of one session. Raises 404."""
    views = await query(service, tenant, name) if 0 < len(name) <= ID_CHARS_MAX else ()
    if not views:
        raise unknown_session(name)
    return views[0]


def unknown_session(name: str) -> ApiError:
    """404 naming the session."""
    return ApiError(404, f"session: {name[:ID_CHARS_MAX]!r} is not known", param="session", code="session_not_found")
