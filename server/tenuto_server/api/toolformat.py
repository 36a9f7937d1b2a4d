"""How a model writes tool calls and reasoning, read off its chat template. Holds no state.

=============  ==================================================================================================
hermes         ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, one pair of tags a call (an array of calls in
               one pair is read too); also what the default tools section asks of models whose template takes no tools
qwen3-coder    ``<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>``
llama3         an answer that is ``{"name": ..., "parameters": {...}}``, after ``<|python_tag|>`` or bare
mistral        ``[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]``
mistral-v11    ``[TOOL_CALLS]NAME[ARGS]{...}``, once for each call
=============  ==================================================================================================

Reasoning stands between ``<think>`` and ``</think>`` (``[THINK]`` and ``[/THINK]`` for Mistral) at the start of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from tenuto_server.errors import ConfigError

FormatName = Literal["hermes", "qwen3-coder", "llama3", "mistral", "mistral-v11"]
FORMAT_NAMES: tuple[FormatName, ...] = get_args(FormatName)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """``begin``: the markers that open a call. ``end``: what closes one; empty where its JSON does. ``bare``: an answer may
    be a call without any marker. ``arguments``: the key of the arguments. ``think``: the pair around reasoning.

    ``control``: markers that the model's vocabulary may hold as control tokens. A decoder must show these, and they are no
    part of visible text.
    """

    name: FormatName
    begin: tuple[str, ...]
    end: str = ""
    bare: bool = False
    arguments: Literal["arguments", "parameters"] = "arguments"
    control: tuple[str, ...] = ()
    think: tuple[str, str] | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Every marker that a decoder must not hide, should it be a control token."""
        return (*self.begin, *((self.end,) if self.end else ()), *self.control, *(self.think or ()))

    def opens_reasoning(self, prompt_tail: str) -> bool:
        """Whether a prompt that ends so has begun the reasoning already, so that the answer starts inside it."""
        return self.think is not None and prompt_tail.rstrip().endswith(self.think[0])


_FORMATS: dict[FormatName, ToolFormat] = {
    "hermes": ToolFormat("hermes", ("<tool_call>",), "</tool_call>"),
    "qwen3-coder": ToolFormat("qwen3-coder", ("<tool_call>", "<function="), "</tool_call>"),
    "llama3": ToolFormat("llama3", ("<|python_tag|>",), bare=True, arguments="parameters", control=("<|python_tag|>",)),
    "mistral": ToolFormat("mistral", ("[TOOL_CALLS]",), control=("[TOOL_CALLS]",)),
    "mistral-v11": ToolFormat("mistral-v11", ("[TOOL_CALLS]",), control=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
}


def tool_format(templates: Sequence[str | None], override: str | None = None) -> ToolFormat:
    """The format of a model with these chat template texts. ``override`` names one instead; the reasoning markers still
    come from the templates. Raises ``ConfigError`` for an unknown name."""
    text = "\n".join(template for template in templates if template)
    if override is None:
        found = _FORMATS[_detect(text)]
    else:
        known = {name: _FORMATS[name] for name in FORMAT_NAMES}
        if override not in known:
            raise ConfigError(f"unknown tool format {override!r}; one of: {', '.join(FORMAT_NAMES)}")
        found = known[override]
    for pair in (("<think>", "</think>"), ("[THINK]", "[/THINK]")):
        if pair[1] in text:  # some templates never print the opening one: the model does
            return replace(found, think=pair)
    return found


def _detect(template: str) -> FormatName:
    if "[TOOL_CALLS]" in template:
        return "mistral-v11" if "[ARGS]" in template else "mistral"
    if "<function=" in template and "<parameter=" in template:
        return "qwen3-coder"
    if "<tool_call>" in template:
        return "hermes"
    # Llama 3 asks for {"name": ..., "parameters": ...} in its tools section; 3.1 and later also know the tag.
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return "llama3"
    return "hermes"
