"""Warming a prompt that nobody waits for yet: the new context of a compaction. Holds no state.

The turn runs with no answer to generate, behind everything that somebody waits for, and ends no pause.
"""

from __future__ import annotations

import secrets

from pydantic import ValidationError

from tenuto.wire import AgentCompaction, Envelope, Receipt
from tenuto_server.api.chat_request import from_chat
from tenuto_server.api.errors import ApiError
from tenuto_server.api.prompt import Prompt
from tenuto_server.api.schema import ChatRequest, parse
from tenuto_server.api.service import Service
from tenuto_server.engine.events import Sampling, SubmitTurn
from tenuto_server.engine.plan import Output


async def warm_compacted(
    service: Service, tenant: str, envelope: Envelope, receipts: tuple[Receipt, ...]
) -> tuple[Receipt, ...]:
    """Starts warming the new prompt of every accepted ``agent.compaction`` commit that brings one; its receipt says so,
    or why not."""
    answered = {receipt.action_id: receipt for receipt in receipts}
    for item in envelope.actions:
        receipt = answered.get(item.action_id)
        if item.action_type != AgentCompaction.TYPE or receipt is None or receipt.outcome != "accepted":
            continue
        try:
            action = item.parse()
        except ValidationError:
            continue
        if isinstance(action, AgentCompaction) and action.phase == "commit" and action.request is not None:
            told = await _warm(service, tenant, action.session, action.request)
            answered[item.action_id] = receipt.model_copy(
                update={"reason": "; ".join(filter(None, (receipt.reason, told)))}
            )
    return tuple(answered[receipt.action_id] for receipt in receipts)


async def _warm(service: Service, tenant: str, session: str, request: dict[str, object]) -> str:
    try:
        body = parse(ChatRequest, {"model": service.model.name, **request})
        service.check_model(body.model)
        # The prompt as the next turn will begin: its first generated token belongs to that turn.
        prompt = await service.off_loop(_prompt, service, tenant, body)
        turn = SubmitTurn(
            f"warm-{secrets.token_hex(8)}", tenant, prompt.tokens, Sampling(max_tokens=0), session=session, warm=True
        )
        service.submit(turn, _ignore)
    except ApiError as error:
        return f"not warmed: {error}"[:200]
    return f"warming {len(prompt.tokens)} tokens"


def _prompt(service: Service, tenant: str, body: ChatRequest) -> Prompt:
    """As the turn itself will have it, the tenant's own answers among its messages included."""
    talk = from_chat(
        body.messages,
        body.tools or (),
        variables=body.chat_template_kwargs,
        strip=service.config.strip_attribution,
        readings=service.prompts.readings,
        scope=tenant,
    )
    return service.prompts.conversation(talk, tenant)


def _ignore(output: Output) -> None:
    """Nobody waits for a warmed prompt."""
