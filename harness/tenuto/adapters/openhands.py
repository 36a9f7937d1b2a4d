"""The OpenHands SDK: a callback that turns its events into pauses. State: ``Gaps``.

    session = tn.session(str(conversation_id))
    Conversation(agent=agent, callbacks=[callback(session)], conversation_id=conversation_id)

OpenHands names its requests after the conversation, so the session must have that name. Events are told apart by the names
of their classes: nothing of the package is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tenuto.adapters.gaps import Gaps
from tenuto.session_core import SessionCore
from tenuto.wire import AgentCompaction

FINISH = "finish"


def callback(session: SessionCore | None = None) -> Callable[[Any], None]:
    """A function for ``Conversation(callbacks=[...])``."""
    gaps = Gaps(session, "openhands")

    def on_event(event: Any) -> None:
        kind = type(event).__name__
        call = str(getattr(event, "tool_call_id", None) or "call")
        tool = str(getattr(event, "tool_name", None) or "tool")
        if tool == FINISH:  # the answer: nothing runs, a person reads
            if kind == "ObservationEvent":
                gaps.turn_over()
        elif kind == "ActionEvent":
            gaps.tool_begins(call, tool, _arguments(event))
        elif kind in ("ObservationEvent", "AgentErrorEvent", "UserRejectObservation"):
            gaps.tool_ends(call)
        elif kind == "MessageEvent":
            if getattr(event, "source", "") == "agent":
                gaps.turn_over()
            else:
                gaps.turn_begins()
        elif kind == "CondensationRequest":
            gaps.session.emit(AgentCompaction, phase="begin")
        elif kind == "Condensation":
            gaps.session.emit(AgentCompaction, phase="commit")

    return on_event


def _arguments(event: Any) -> dict[str, Any] | None:
    action = getattr(event, "action", None)
    command = getattr(action, "command", None)
    return {"command": command} if isinstance(command, str) else None
