"""Conversations in the roles and fields that one model's chat template renders.

Owns facts about the template, found once by rendering small conversations. The rules:

- ``developer`` becomes ``system`` where the template does not know it;
- tools, tool calls and tool results go through the template where it renders them, else they become plain text: tools at
  the end of the system message, calls as ``<tool_call>`` JSON after the assistant's text, results as a user message in
  ``<tool_response>``;
- a system message that comes late is the user's where the template takes none there; several leading ones become one;
- where a template wants roles to alternate, neighbours of one role become one message, and what a user says right behind a
  tool's result becomes part of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tenuto_server.api.conversation import Conversation, Json, dump
from tenuto_server.model.chat import ChatTemplate, ChatTemplateError

TOOLS_TEXT = (
    "You can call tools. To call one, write a JSON object between these tags, and wait for its result:\n"
    '<tool_call>\n{"name": "tool name", "arguments": {"argument": "value"}}\n</tool_call>\n'
    "The tools, one per line:\n"
)

Placed = tuple[Json, int | None]
"""A message and its index in the client's own list."""


class Fitting:
    """See the module. Safe to share between threads."""

    def __init__(self, chat: ChatTemplate) -> None:
        self._chat = chat
        self._knows_developer = "developer" in (chat.source or "")
        user, probe = _say("user", "a"), _say("user", "PROBE")
        tool = {"type": "function", "function": {"name": "PROBE", "description": "d", "parameters": {}}}
        call = {"id": "000000001", "type": "function", "function": {"name": "PROBE", "arguments": {}}}
        asked: list[Json] = [user, {"role": "assistant", "content": "", "tool_calls": [call]}]
        result = {"role": "tool", "tool_call_id": "000000001", "name": "PROBE", "content": "RESULT"}
        self.renders_tools = self._shows("PROBE", [user], [tool])
        self._renders_calls = self._shows("PROBE", asked)
        named = re.search(r"""['"](?:tool|ipython)['"]""", chat.source or "") is not None
        self._renders_results = named and self._shows("RESULT", [*asked, result])
        # Some templates want the model's answer right behind results: what a user says there becomes part of the last one.
        self._user_behind_results = self._shows("PROBE", [*asked, result, probe])
        self._system = self._shows("PROBE", [_say("system", "PROBE"), user])
        late = [_say("system", "a"), user, _say("assistant", "b"), _say("system", "PROBE"), user]
        self._late_system = self._shows("PROBE", late)
        self._two_systems = self._shows("PROBE", [_say("system", "a"), _say("system", "PROBE"), user])
        self._repeats = self._shows("PROBE", [user, probe])

    def _shows(self, probe: str, messages: list[Json], tools: list[Json] | None = None) -> bool:
        try:
            return probe in self._chat.render(messages, tools, False)
        except ChatTemplateError:
            return False

    def fit(self, talk: Conversation, plain: bool = False) -> tuple[list[Placed], list[Json], str]:
        """Messages, tools for the template, and the text of the tools where they stand in the system message instead.
        ``plain``: only roles and text, as a last resort for a template that refuses more."""
        pairs = [(self._one(m, plain), p) for m, p in zip(talk.messages, talk.places, strict=True)]
        tools, text = [tool.schema() for tool in talk.tools], ""
        if tools and (plain or not self.renders_tools):
            text = TOOLS_TEXT + "\n".join(dump(tool["function"], "tools") for tool in tools)
            pairs, tools = _with_tools(pairs, text), []
        pairs = self._systems(pairs, plain)
        if plain or not self._repeats:
            pairs = _merged(pairs)
        if not plain and self._renders_results and not self._user_behind_results:
            pairs = _with_results(pairs)
        return pairs, tools, text

    def _one(self, message: Json, plain: bool) -> Json:
        role = message["role"]
        if role == "developer" and (plain or not self._knows_developer):
            return {**message, "role": "system"}
        if role == "tool" and (plain or not self._renders_results):
            return _say("user", f"<tool_response>\n{message['content']}\n</tool_response>")
        if "tool_calls" in message and (plain or not self._renders_calls):
            calls = [_call_text(call["function"]) for call in message["tool_calls"]]
            content = "\n".join(([message["content"]] if message["content"] else []) + calls)
            return {**{k: v for k, v in message.items() if k != "tool_calls"}, "content": content}
        return message

    def _systems(self, pairs: list[Placed], plain: bool) -> list[Placed]:
        leading = next((i for i, (m, _) in enumerate(pairs) if m["role"] != "system"), len(pairs))
        if leading > 1 and (plain or not self._two_systems):
            text = "\n\n".join(m["content"] for m, _ in pairs[:leading])
            pairs, leading = [(_say("system", text), pairs[0][1]), *pairs[leading:]], 1
        keep = leading if self._system else 0
        late = self._late_system and not plain
        return [
            (_say("user", f"<system>\n{m['content']}\n</system>"), p)
            if m["role"] == "system" and i >= keep and not late
            else (m, p)
            for i, (m, p) in enumerate(pairs)
        ]


def _say(role: str, text: str) -> Json:
    return {"role": role, "content": text}


def _call_text(function: Json) -> str:
    call = dump({"name": function["name"], "arguments": function["arguments"]}, "messages")
    return f"<tool_call>\n{call}\n</tool_call>"


def _with_tools(pairs: list[Placed], text: str) -> list[Placed]:
    if pairs and pairs[0][0]["role"] == "system":
        (first, place), *rest = pairs
        head = first["content"]
        return [({**first, "content": f"{head}\n\n{text}" if head else text}, place), *rest]
    return [(_say("system", text), None), *pairs]


def _merged(pairs: Sequence[Placed]) -> list[Placed]:
    """Neighbours that say something in the same role become one message; calls and results stand alone."""
    out: list[Placed] = []
    for message, place in pairs:
        if out and _mergeable(out[-1][0], message):
            last, at = out[-1]
            out[-1] = ({**last, "content": f"{last['content']}\n\n{message['content']}"}, at)
        else:
            out.append((message, place))
    return out


def _with_results(pairs: Sequence[Placed]) -> list[Placed]:
    """What a user says right behind a tool's result stands in that result."""
    out: list[Placed] = []
    for message, place in pairs:
        if out and out[-1][0]["role"] == "tool" and message["role"] == "user":
            last, at = out[-1]
            out[-1] = ({**last, "content": f"{last['content']}\n\n{message['content']}"}, at)
        else:
            out.append((message, place))
    return out


def _mergeable(last: Json, message: Json) -> bool:
    same = last["role"] == message["role"] and message["role"] in ("user", "assistant")
    return same and not any(key in m for m in (last, message) for key in ("tool_calls", "reasoning_content"))
