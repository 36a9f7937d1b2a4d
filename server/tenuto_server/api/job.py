"""A turn ready to be submitted. Holds no state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import HTTPConnection

from tenuto.wire import Receipt
from tenuto_server.api.carriers import Riders
from tenuto_server.api.constrain import Constraint, constraint
from tenuto_server.api.conversation import Conversation
from tenuto_server.api.errors import bad_request, too_long
from tenuto_server.api.output import OutputParser, output_parser
from tenuto_server.api.prompt import Prompt
from tenuto_server.api.schema import GenerationRequest
from tenuto_server.api.service import Service
from tenuto_server.api.traffic import Arrival
from tenuto_server.engine.events import SubmitTurn


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A turn and what its answer needs. ``arrived``: when its request did (monotonic seconds). ``notes``: what the
    ``tenuto`` object says beside the cache report. ``parser`` reads the answer's text; None: it is plain text.
    ``constraint``: the grammar that the answer must follow. ``retain_s``, ``release``: what the client wants for its prefix in
    the pause after the answer."""

    turn: SubmitTurn
    prompt: Prompt
    stops: tuple[str, ...] = ()
    talk: Conversation | None = None
    parser: OutputParser | None = None
    receipts: tuple[Receipt, ...] = ()
    arrived: float = 0.0
    notes: Mapping[str, Any] = field(default_factory=dict)
    arrival: Arrival | None = None
    retain_s: float | None = None
    release: bool = False
    constraint: Constraint | None = None


def make_job(
    service: Service,
    http: HTTPConnection,
    kind: str,
    tenant: str,
    request: GenerationRequest,
    prompt: Prompt,
    riders: Riders,
    talk: Conversation | None = None,
) -> Job:
    """A job whose id begins with ``kind`` and ends as the request's own. ``talk``: the conversation
    behind the prompt, if there is one. Raises 400 for a prompt that is empty or leaves no room to answer."""
    have, room = len(prompt.tokens), service.model.max_context_tokens
    field = talk.source if talk is not None else "prompt"
    if have == 0:
        raise bad_request(f"{field}: has no tokens; give at least one", field)
    if have >= room:
        raise too_long(field, have, room)
    # More than fits is not an error: agents send one constant for all models.
    asked = request.limit()
    limit = service.model.default_max_tokens if asked is None else asked
    sampling = request.sampling(min(limit, room - have), service.model.eos_ids)
    turn = SubmitTurn(
        request_id=http.scope["request_id"].replace("req_", kind),
        tenant=tenant,
        tokens=prompt.tokens,
        sampling=sampling,
        session=riders.identity.session,
        parent=riders.identity.parent,
        salt=riders.salt,
        last_role=prompt.last_role,
        hints=riders.hints,
        final=riders.identity.final,
        priority=riders.priority,
        warm=asked == 0,
    )
    notes: dict[str, Any] = {}
    if prompt.removed:
        notes["removed"] = list(prompt.removed)
    if request.model != service.model.name:
        notes["requested_model"] = request.model[:200]
    reasoning = service.format.opens_reasoning(prompt.rendered.rest[-64:])
    return Job(
        turn,
        prompt,
        request.stops(),
        talk,
        None if talk is None else _parser(service, talk, reasoning),
        riders.receipts,
        http.scope["arrived"],
        notes,
        constraint=None if talk is None or talk.prefill or turn.warm else _constraint(service, talk, reasoning),
    )


def _parser(service: Service, talk: Conversation, reasoning: bool) -> OutputParser:
    tools = talk.tools if talk.tool_choice != "none" else ()
    return output_parser(service.format, tools, reasoning=reasoning, parallel=talk.parallel_tool_calls)


def _constraint(service: Service, talk: Conversation, reasoning: bool) -> Constraint | None:
    return constraint(
        service.format,
        talk.tools,
        talk.tool_choice,
        parallel=talk.parallel_tool_calls,
        response_schema=talk.response_schema,
        reasoning=reasoning,
        fields=[talk.tool_field.format(index) for index in range(len(talk.tools))],
        response_field=talk.response_field,
    )
