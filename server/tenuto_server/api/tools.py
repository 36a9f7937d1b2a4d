"""What a model may call, in one shape for all dialects. Holds no state.

Dialects convert their own tool lists to ``ToolSpec``; output parsers and constrained decoding read nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

ToolChoice: TypeAlias = str
"""``"auto"``, ``"none"``, ``"required"`` (any tool), or the name of the one tool that must be called."""

_GENERAL = ("auto", "none", "required")


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """One function. ``parameters``: a JSON schema of its arguments. ``strict``: the arguments must satisfy it.

    ``custom``: the tool takes free text instead of JSON; to the model it is a function with the one string argument
    ``input``. ``namespace``: the group that the client listed it in.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    strict: bool = False
    custom: bool = False
    namespace: str | None = None

    def schema(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        function: dict[str, Any] = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


def named_tool(choice: ToolChoice) -> str | None:
    """The tool that must be called; None if the choice names none."""
    return None if choice in _GENERAL else choice


def must_call(choice: ToolChoice) -> bool:
    """Whether the answer has to be a tool call."""
    return choice not in ("auto", "none")
