"""Messages and tools to token ids, the same text for the same conversation every time.

Owns nothing but facts about the model's template, read once. The rules:

- string content equals one text part; several text parts are joined by a newline; null content is empty;
- ``developer`` becomes ``system`` where the template does not know it;
- tools, tool calls and tool results go through the template where it renders them, else they become plain text: tools
  at the end of the system message, calls as ``<tool_call>`` JSON after the assistant's text, results as a user message in
  ``<tool_response>``;
- the text of a control token inside a message stays text. A file that mentions ``<|im_end|>`` ends no message.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tenuto.wire import Divergence
from tenuto_server.api.errors import bad_request, unsupported
from tenuto_server.engine.events import TokenArray
from tenuto_server.model.chat import ChatTemplate, ChatTemplateError
from tenuto_server.model.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_TOOLS_TEXT = (
    "You can call tools. To call one, write a JSON object between these tags, and wait for its result:\n"
    '<tool_call>\n{"name": "tool name", "arguments": {"argument": "value"}}\n</tool_call>\n'
    "The tools, one per line:\n"
)

Json = dict[str, Any]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A rendered prompt. ``tokens``: int32 [n]. ``added``: messages put in front of the client's own (0 or 1)."""

    tokens: TokenArray
    text: str = ""
    messages: tuple[Json, ...] = ()
    tools: tuple[Json, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    last_role: str | None = None
    added: int = 0


class PromptBuilder:
    """Renders and encodes. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatTemplate) -> None:
        self._tokenizer, self._chat = tokenizer, chat
        self._shield = Shield(tokenizer)
        if tokenizer.special_ids and not self._shield.on:
            logger.warning(
                "this tokenizer cannot be encoded in pieces: control-token text in messages is not neutralised"
            )
        self._knows_developer = "developer" in (chat.source or "")
        user: Json = {"role": "user", "content": "a"}
        tool = {"type": "function", "function": {"name": "PROBE", "description": "d", "parameters": {}}}
        call = {"id": "000000001", "type": "function", "function": {"name": "PROBE", "arguments": {}}}
        asked: list[Json] = [user, {"role": "assistant", "content": "", "tool_calls": [call]}]
        answered: list[Json] = [
            *asked,
            {"role": "tool", "tool_call_id": "000000001", "name": "PROBE", "content": "RESULT"},
        ]
        self._renders_tools = self._shows("PROBE", [user], [tool])
        self._renders_calls = self._shows("PROBE", asked)
        named = re.search(r"""['"](?:tool|ipython)['"]""", chat.source or "") is not None
        self._renders_results = named and self._shows("RESULT", answered)

    def _shows(self, probe: str, messages: list[Json], tools: list[Json] | None = None) -> bool:
        try:
            return probe in self._chat.render(messages, tools, False)
        except ChatTemplateError:
            return False

    def chat(
        self, messages: Sequence[Any], tools: Sequence[Any] = (), variables: Mapping[str, Any] | None = None
    ) -> Prompt:
        """The prompt of a chat request. ``variables``: template arguments by name. Raises 400 naming the message."""
        plain = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
        schemas = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
        last_role = plain[-1]["role"]
        ready = [self._fit(message) for message in plain]
        added = 0
        if schemas and not self._renders_tools:
            added = int(ready[0]["role"] != "system")
            ready = _with_tools_text(ready, schemas)
            schemas = []
        arguments = dict(variables or {})
        text, shielded = self._render(ready, schemas, arguments)
        tokens = self._shield.encode(text) if shielded else self._tokenizer.encode(text)
        shown = self._shield.reveal(text) if shielded else text
        return Prompt(_ids(tokens), shown, tuple(ready), tuple(schemas), arguments, last_role, added)

    def text(self, text: str) -> Prompt:
        """The prompt of a plain completion: control tokens are recognised, as that interface is for."""
        tokens = self._tokenizer.encode(text)
        if self._tokenizer.add_bos and self._tokenizer.bos_id is not None and tokens[:1] != [self._tokenizer.bos_id]:
            tokens = [self._tokenizer.bos_id, *tokens]
        return Prompt(_ids(tokens), text)

    def ids(self, ids: Sequence[int], field: str = "prompt") -> Prompt:
        """A prompt given as token ids. Raises 400 for an id outside the vocabulary, naming ``field``."""
        size = self._tokenizer.vocab_size
        for index, token in enumerate(ids):
            if not 0 <= token < size:
                raise bad_request(f"{field}[{index}]: token id outside 0..{size - 1}", f"{field}[{index}]")
        return Prompt(_ids(ids))

    def locate(self, prompt: Prompt, divergence: Divergence) -> Divergence:
        """Adds to a divergence which message (the client's index), role and part its token lies in, where that can be
        told. Renders O(log messages) prefixes."""
        if not prompt.messages:
            return divergence
        at = len(self._tokenizer.decode(prompt.tokens[: divergence.token].tolist()))
        if prompt.tools and self._in_tools(prompt, at):
            return divergence.model_copy(update={"part": "tools"})
        low, high = 0, len(prompt.messages) - 1
        while low < high:  # the last message whose start is at or before the character
            middle = (low + high + 1) // 2
            start = self._start_of(prompt, middle)
            if start is not None and start <= at:
                low = middle
            else:
                high = middle - 1
        if low < prompt.added:
            return divergence.model_copy(update={"part": "tools"})
        role = str(prompt.messages[low]["role"])
        part = "system" if role in ("system", "developer") else "message"
        return divergence.model_copy(update={"message": low - prompt.added, "role": role, "part": part})

    def _start_of(self, prompt: Prompt, index: int) -> int | None:
        try:
            head = self._chat.render(prompt.messages[:index], prompt.tools or None, False, **prompt.variables)
        except ChatTemplateError:
            return None
        return _common_prefix(prompt.text, head)

    def _in_tools(self, prompt: Prompt, at: int) -> bool:
        try:
            bare = self._chat.render(prompt.messages, None, True, **prompt.variables)
        except ChatTemplateError:
            return False
        start = _common_prefix(prompt.text, bare)
        end = len(prompt.text) - _common_prefix(prompt.text[::-1], bare[::-1])
        return start <= at < end

    def _fit(self, message: Json) -> Json:
        """The message in the roles and fields that this template renders."""
        role = message["role"]
        if role == "developer" and not self._knows_developer:
            return {**message, "role": "system"}
        if role in ("tool", "function") and not self._renders_results:
            return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        if "tool_calls" in message and not self._renders_calls:
            calls = [_call_text(call["function"]) for call in message["tool_calls"]]
            content = "\n".join(([message["content"]] if message["content"] else []) + calls)
            return {**{k: v for k, v in message.items() if k != "tool_calls"}, "content": content}
        return message

    def _render(self, messages: list[Json], tools: list[Json], variables: Json) -> tuple[str, bool]:
        hidden = self._shield.hide([messages, tools])
        safe_messages, safe_tools = hidden if hidden is not None else (messages, tools)
        try:
            text = self._chat.render(safe_messages, safe_tools or None, True, **variables)
        except (ChatTemplateError, TypeError) as error:  # TypeError: a variable that takes a name of render itself
            raise bad_request(f"messages: {error}", "messages", "chat_template_error") from None
        except RecursionError:
            raise bad_request("messages: nested too deeply", "messages") from None
        return text, hidden is not None


class Shield:
    """Keeps the text of control tokens inside messages from becoming control tokens.

    Before rendering, each such text is swapped for a noncharacter and its number; after rendering, the control tokens in
    the text are the template's own, and the pieces between them are encoded as ordinary text with the swap undone. The
    ids equal those of ``Tokenizer.encode`` wherever no such text occurs (checked once, else the shield is off).
    """

    _MARK, _FIRST = "\ufdd0", 0xF0000

    def __init__(self, tokenizer: Tokenizer) -> None:
        texts = {tokenizer.token_bytes(i).decode("utf-8", "replace"): i for i in sorted(tokenizer.special_ids)}
        texts.pop("", None)
        self._ids, self._tokenizer = texts, tokenizer
        self._hidden = [*texts, self._MARK]
        by_length = sorted(texts, key=len, reverse=True)
        self._find = re.compile("|".join(map(re.escape, [*by_length, self._MARK]))) if texts else None
        self._split = re.compile("(" + "|".join(map(re.escape, by_length)) + ")") if texts else None
        self._number = {text: chr(self._FIRST + n) for n, text in enumerate(self._hidden)}
        sample = f"{by_length[0]}user\nHello  wor\u00e9ld 12{by_length[-1]}\n" if by_length else ""
        self.on = bool(texts) and self.encode(sample) == tokenizer.encode(sample)

    def hide(self, value: Any) -> Any | None:
        """A copy of a JSON value with control-token text swapped out; None if there is nothing to swap."""
        if not self.on:
            return None
        changed = False

        def swap(match: re.Match[str]) -> str:
            return self._MARK + self._number[match[0]]

        def walk(node: Any) -> Any:
            nonlocal changed
            if isinstance(node, str):
                assert self._find is not None
                if self._find.search(node) is None:
                    return node
                changed = True
                return self._find.sub(swap, node)
            if isinstance(node, Mapping):
                return {walk(key): walk(item) for key, item in node.items()}
            if isinstance(node, (list, tuple)):
                return [walk(item) for item in node]
            return node

        try:
            hidden = walk(value)
        except RecursionError:
            raise bad_request("messages: nested too deeply", "messages") from None
        return hidden if changed else None

    def reveal(self, text: str) -> str:
        """Undoes the swap."""
        return re.sub(f"{self._MARK}(.)", self._original, text)

    def _original(self, match: re.Match[str]) -> str:
        number = ord(match[1]) - self._FIRST
        return self._hidden[number] if 0 <= number < len(self._hidden) else match[0]

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered text in which only the template's control tokens are control tokens."""
        assert self._split is not None
        ids: list[int] = []
        for index, piece in enumerate(self._split.split(text)):
            if index % 2:
                ids.append(self._ids[piece])
            elif piece:
                ids += self._tokenizer.encode_ordinary(self.reveal(piece))
        return ids


def _message(message: Any, where: str) -> Json:
    """A client's message as a plain dictionary with string content. Raises 400."""
    if not isinstance(message, dict):
        raise bad_request(f"{where}: expected an object", where)
    role = message.get("role")
    if role not in ROLES:
        raise bad_request(f"{where}.role: expected one of {', '.join(ROLES)}", f"{where}.role")
    plain: Json = {"role": role, "content": _content(message.get("content"), f"{where}.content")}
    for key in ("name", "tool_call_id", *_REASONING):
        if isinstance(message.get(key), str):
            plain[key] = message[key]
    calls = message.get("tool_calls")
    if role == "assistant" and calls:
        if not isinstance(calls, list):
            raise bad_request(f"{where}.tool_calls: expected an array", f"{where}.tool_calls")
        plain["tool_calls"] = [_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return plain


def _content(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise bad_request(f"{where}: expected a string, null or an array of parts", where)
    texts = []
    for index, part in enumerate(content):
        at = f"{where}[{index}]"
        if not isinstance(part, dict):
            raise bad_request(f"{at}: expected an object", at)
        kind = part.get("type", "text")
        text = part.get("refusal") if kind == "refusal" else part.get("text")
        if isinstance(text, str):
            texts.append(text)
        elif kind in _TEXT_PARTS or kind == "refusal":
            raise bad_request(f"{at}.text: expected a string", f"{at}.text")
        else:
            raise unsupported(f"{at}.type", "this model reads text parts only")
    return "\n".join(texts)


def _call(call: Any, where: str) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"{where}.function.name: expected a string", f"{where}.function.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # Templates print arguments through tojson; text that is not an object stays text.
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    body = {"name": function["name"], "arguments": {} if arguments is None else arguments}
    return {"id": call["id"] if isinstance(call.get("id"), str) else "", "type": "function", "function": body}


def _tool(tool: Any, where: str) -> Json:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"{where}.function.name: expected a string", f"{where}.function.name")
    return {"type": "function", "function": function}


def _call_text(function: Json) -> str:
    return f"<tool_call>\n{_dump({'name': function['name'], 'arguments': function['arguments']})}\n</tool_call>"


def _with_tools_text(messages: list[Json], tools: list[Json]) -> list[Json]:
    text = _TOOLS_TEXT + "\n".join(_dump(tool["function"]) for tool in tools)
    if messages[0]["role"] == "system":
        head = messages[0]["content"]
        return [{**messages[0], "content": f"{head}\n\n{text}" if head else text}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _dump(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise bad_request("tools: nested too deeply", "tools") from None


def _ids(ids: Sequence[int]) -> TokenArray:
    return np.asarray(ids, dtype=np.int32)


def _common_prefix(a: str, b: str) -> int:
    """Length of the common prefix, by bisection over slices: comparisons run in C."""
    if b.startswith(a) or a.startswith(b):
        return min(len(a), len(b))
    low, high = 0, min(len(a), len(b))
    same: Callable[[int], bool] = lambda n: a.startswith(b[:n])  # noqa: E731
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if same(middle) else (low, middle - 1)
    return low
