"""From a parsed conversation to a turn: who speaks, what kind of request it is, how long its prefix shall stay. Holds no
state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from starlette.requests import HTTPConnection

from tenuto_server.api.carriers import read_riders
from tenuto_server.api.clues import Clues, read_clues
from tenuto_server.api.conversation import Conversation
from tenuto_server.api.job import Job, make_job
from tenuto_server.api.outline import Outline
from tenuto_server.api.prompt import Prompt
from tenuto_server.api.retain import releases, retain_s
from tenuto_server.api.schema import GenerationRequest
from tenuto_server.api.service import Service
from tenuto_server.engine.events import PauseInferred


def prepare(
    service: Service,
    http: HTTPConnection,
    kind: str,
    tenant: str,
    body: GenerationRequest,
    raw: Mapping[str, Any],
    talk: Conversation,
    prompt: Prompt,
    known: Clues | None = None,
) -> Job:
    """The job of a conversation. ``known``: what the request is, where its route says so. Raises 400 for
    identity that cannot be read and for a prompt that does not fit."""
    riders = read_riders(http.headers, body, raw)
    clues = known or read_clues(http.headers, raw, talk, body.limit() == 0)
    outline = Outline.of(body.model, talk, prompt.digests, prompt.tool_digests, len(prompt.tokens))
    arrival = service.traffic.arrive(tenant, riders.identity, clues, outline, talk)
    job = make_job(service, http, kind, tenant, body, prompt, riders, talk)
    identity, side = arrival.identity, arrival.kind == "side"
    turn = replace(
        job.turn,
        session=None if side else identity.session,
        parent=None if side else identity.parent,
        agent=clues.agent,
        model=body.model[:256],
        final=identity.final or side,
        side=side,
        warm=arrival.kind == "prewarm",
        inferred=arrival.kind in ("turn", "compaction"),
    )
    if arrival.behind_side and turn.session is not None:
        # Nobody was waited for after that call: its pause teaches nothing about people.
        service.loop.post(PauseInferred(tenant, turn.session, "background", "side_call"))
    if turn.warm:
        turn = replace(turn, sampling=replace(turn.sampling, max_tokens=0))
    return replace(job, turn=turn, arrival=arrival, retain_s=retain_s(raw, talk), release=releases(raw))
