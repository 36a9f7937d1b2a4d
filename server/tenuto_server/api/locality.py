"""Whether a chat template renders a message by its neighbourhood alone, found by rendering small conversations both ways.
Holds no state.

Every conversation here is rendered whole, and from every place at which one may be taken up; a template is local where both
give the same text, and where what was rendered before an addition stands unchanged behind it. Templates that look at the
whole list fail this in one of two ways, so both are told apart: reasoning that is shown only behind the last question, or
tools in front of it, change with the next question and not with a tool's result.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tenuto_server.api.conversation import Json
from tenuto_server.api.tools import ToolSpec
from tenuto_server.model.chat import ChatTemplateError

if TYPE_CHECKING:
    from tenuto_server.api.rendering import Renderer

_CONVERSATIONS = 12
_STEPS = 4
_WORDS = ("alpha", " beta", "gamma\n", "", "delta epsilon", "{}", "\n\nzeta ")
_TOOL = ToolSpec("probe", "Probes.", {"type": "object", "properties": {"a": {"type": "string"}}})


def find(renderer: Renderer, reasoning: bool) -> dict[bool, bool]:
    """Whether the template is local where somebody says something behind the place at which a conversation is taken up
    (True) and where only tools do (False). ``reasoning``: for conversations with reasoning in them."""
    holds = {False: True, True: True}
    dice = random.Random(0)
    for number in range(_CONVERSATIONS):
        tools = (_TOOL,) if number % 3 else ()
        for asking, equal in _both_ways(renderer, _conversation(dice, reasoning), tools):
            holds[asking] = holds[asking] and equal
        if not any(holds.values()):
            break
    return {asking: holds[False] and holds[asking] for asking in holds}


def _both_ways(renderer: Renderer, talk: list[Json], tools: tuple[ToolSpec, ...]) -> Iterator[tuple[bool, bool]]:
    from tenuto_server.api.rendering import asks, boundary

    places = [index for index in range(1, len(talk)) if boundary(talk, index)]
    ends = [index for index in range(places[1], len(talk)) if talk[index]["role"] == "assistant"] + [len(talk)]
    head = talk[: places[0]]
    for place in places[1:]:
        before: str | None = None
        for end in (end for end in ends if end > place):
            asking = asks(talk[place:end])
            try:
                whole = renderer.text(talk[:end], tools, {})
                opening = renderer.text(head, tools, {}, ask=False)
                short = renderer.text([*head, *talk[place:end]], tools, {})
            except ChatTemplateError:
                yield asking, False
                return
            tail = short[len(opening) :]
            known = whole[: len(whole) - len(tail)]
            yield asking, short.startswith(opening) and whole == known + tail and before in (None, known)
            before = known


def _conversation(dice: random.Random, reasoning: bool) -> list[Json]:
    talk: list[Json] = [{"role": "system", "content": "rules"}] if dice.random() < 0.5 else []
    talk.append({"role": "user", "content": "question"})
    for step in range(_STEPS):
        calls = dice.choice((0, 1, 1, 2))
        answer: Json = {"role": "assistant", "content": dice.choice(_WORDS)}
        if reasoning and dice.random() < 0.6:
            answer["reasoning_content"] = f"thought {step}"
        numbers = [f"{10 * step + n:09d}" for n in range(calls)]
        if calls:
            function = {"name": "probe", "arguments": {"a": dice.choice(_WORDS)}}
            answer["tool_calls"] = [{"id": number, "type": "function", "function": function} for number in numbers]
        talk.append(answer)
        talk += [
            {"role": "tool", "content": dice.choice(_WORDS), "tool_call_id": number, "name": "probe"}
            for number in numbers
        ]
        if not calls or dice.random() < 0.3:
            late = {"role": "system", "content": "a reminder"}
            talk += [late] if dice.random() < 0.2 else []
            talk.append({"role": "user", "content": dice.choice(_WORDS)})
    return talk
