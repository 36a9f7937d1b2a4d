"""Readers of the body of a tool call, one for each way of writing one. ``Calls`` belongs to one answer's parser.

JSON is followed rather than parsed: brackets and strings are tracked as they come, so that arguments go out at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from typing import Any, Protocol

from tenuto_server.api.toolformat import ToolFormat
from tenuto_server.api.toolformat_input import Input
from tenuto_server.api.tools import ToolSpec

NAME_CHARS_MAX = 256
_OUTSIDE = re.compile(r'[^"{}\[\]<]+')
_INSIDE = re.compile(r'[^"\\\x00-\x1f]+')
_NAME = re.compile(r"[\w.:/-]+")
_CLOSES = {"{": "}", "[": "]"}

Reading = Generator[None, None, bool]


class Sink(Protocol):
    """Who is told about calls."""

    def begin_call(self, name: str) -> None: ...

    def arguments(self, text: str) -> None: ...

    def end_call(self) -> None: ...


class Calls:
    """Reads what follows a marker. ``input`` is shared with the parser."""

    def __init__(self, format: ToolFormat, tools: tuple[ToolSpec, ...], sink: Sink) -> None:
        self.input = Input()
        self._format, self._sink = format, sink
        self._schemas = {tool.name: tool.parameters for tool in tools}

    def read(self, marker: str) -> Reading:
        """Reads the call or calls behind ``marker`` ("": a bare answer). False, with nothing consumed, if there is none."""
        source = self.input
        source.mark()
        if marker == "<function=" or (self._format.name == "qwen3-coder" and (yield from self._at_function())):
            found = yield from self._function()
        elif self._format.name.startswith("mistral") and (yield from source.skip_space()) not in "{[":
            found = yield from self._named()
        else:
            found = yield from self._json_calls(bare=not marker)
        if not found:
            source.back()
            return False
        if self._format.end:
            while (yield from source.skip_space()) in ("}", "]"):  # one bracket too many is a common slip
                source.at += 1
            yield from source.literal(self._format.end)
        source.unmark()
        return True

    # ---- {"name": ..., "arguments": {...}} ---------------------------------------------------------------------------

    def _json_calls(self, bare: bool) -> Reading:
        """One call, or several: in an array, or separated as Llama does it. A bare answer must name a known tool, since
        JSON may be the answer itself."""
        source = self.input
        array = (yield from source.skip_space()) == "["
        source.at += array
        found = False
        while (yield from source.skip_space()) == "{":
            if not (yield from self._json_call(bare)):
                break
            found = True
            source.mark()
            if (yield from source.skip_space()) == "]" and array:
                source.at += 1
                source.mark()
                return True
            if (yield from source.peek()) != ("," if array else ";"):
                break
            source.at += 1
        if found:  # what follows the last call is read as text
            source.back()
            source.mark()
        return found

    def _json_call(self, bare: bool) -> Reading:
        source, name, held, begun = self.input, None, "{}", False
        source.at += 1
        while (char := (yield from source.skip_space())) != "}":
            if char == ",":
                source.at += 1
                continue
            key = yield from self._string()
            if key is None or (yield from source.skip_space()) != ":":
                return begun and self._end()
            source.at += 1
            char = yield from source.skip_space()
            if key in ("arguments", "parameters") and char == "{" and name is not None and not begun:
                begun = self._begin(name)
                yield from self._value(stream=True)
            elif key in ("arguments", "parameters") and not begun:
                value = yield from self._held_value()
                if value is None:
                    return False
                held = value
            elif key == "name" and not begun:
                name = yield from self._string()
                if not name or len(name) > NAME_CHARS_MAX or (bare and name not in self._schemas):
                    return False
            elif not (yield from self._value(stream=False)):
                return begun and self._end()
        source.at += 1
        if not begun:
            if name is None:
                return False
            self._begin(name)
            self._sink.arguments(held)
        return self._end()

    def _begin(self, name: str) -> bool:
        self._sink.begin_call(name)
        self.input.unmark()
        return True

    def _end(self) -> bool:
        self._sink.end_call()
        return True

    def _held_value(self) -> Generator[None, None, str | None]:
        """Arguments that cannot stream: their name is not known yet, or they are a string with JSON in it. Their text as
        an object; None if they are none."""
        source, start = self.input, self.input.at  # a mark is set: indices stay valid
        if not (yield from self._value(stream=False)):
            return None
        try:
            value: Any = json.loads(source.text[start : source.at], strict=False)
            if isinstance(value, str):
                value = json.loads(value, strict=False) if value.strip() else {}
        except (ValueError, RecursionError):
            return None
        if value is None:
            return "{}"
        return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else None

    def _string(self) -> Generator[None, None, str | None]:
        """A JSON string, decoded; None if there is none. A mark must be set or the string short: it is kept whole."""
        source = self.input
        if (yield from source.peek()) != '"':
            return None
        pieces = ['"']
        source.at += 1
        while char := (yield from source.peek()):
            if char == '"':
                source.at += 1
                try:
                    return str(json.loads("".join(pieces) + '"', strict=False))
                except ValueError:
                    return None
            pieces.append((yield from self._inside()))
        return None

    def _inside(self) -> Generator[None, None, str]:
        """The next run of characters inside a string, as valid JSON writes them."""
        source = self.input
        if run := _INSIDE.match(source.text, source.at):
            source.at = run.end()
            return run[0]
        char = source.text[source.at]
        source.at += 1
        if char != "\\":
            return json.dumps(char)[1:-1]
        escaped = yield from source.peek()
        source.at += bool(escaped)
        return char + escaped

    def _value(self, stream: bool) -> Reading:
        """Consumes one JSON value. False if its brackets do not match, or it does not end."""
        source, emit = self.input, self._sink.arguments if stream else _ignore
        stack: list[str] = []
        while char := (yield from source.peek()):
            if char == '"':
                source.at += 1
                emit(char)
                while (char := (yield from source.peek())) and char != '"':
                    emit((yield from self._inside()))
                if not char:
                    return False
            elif char in "{[":
                stack.append(_CLOSES[char])
            elif char in "}]":
                if not stack:
                    return True  # a number or word ends where its container does
                if stack.pop() != char:
                    return False
            elif char == "<":  # a closing tag: the brackets will not close any more
                return False
            elif not stack and char in ", \t\r\n":
                return True
            else:
                run = _OUTSIDE.match(source.text, source.at)
                assert run is not None
                text = run[0] if stack else re.split(r"[, \t\r\n]", run[0], maxsplit=1)[0]
                source.at += len(text)
                emit(text)
                continue
            source.at += 1
            emit(char)
            if not stack:
                return True
        return False

    # ---- [TOOL_CALLS]NAME[ARGS]{...} ---------------------------------------------------------------------------------

    def _named(self) -> Reading:
        source, name = self.input, ""
        while (yield from source.more()) and (run := _NAME.match(source.text, source.at)):
            source.at, name = run.end(), name + run[0]
        if not name or len(name) > NAME_CHARS_MAX:
            return False
        if (yield from source.literal("[CALL_ID]")):
            while (yield from source.more()) and (run := _NAME.match(source.text, source.at)):
                source.at = run.end()
        yield from source.literal("[ARGS]")
        if (yield from source.skip_space()) != "{":
            return False
        self._begin(name)
        yield from self._value(stream=True)
        source.mark()
        return self._end()

    # ---- <function=NAME><parameter=KEY>value</parameter></function> ---------------------------------------------------

    def _at_function(self) -> Reading:
        yield from self.input.skip_space()
        return (yield from self.input.literal("<function="))

    def _function(self) -> Reading:
        source = self.input
        name = yield from source.take_until(">")
        if not name or len(name) > NAME_CHARS_MAX or not _NAME.fullmatch(name):
            return False
        self._begin(name)
        properties = self._schemas.get(name, {}).get("properties")
        between = "{"
        yield from source.skip_space()
        while (yield from source.literal("<parameter=")):
            key = yield from source.take_until(">")
            if key is None:
                if source.cut:
                    source.rest()
                break
            schema = properties.get(key) if isinstance(properties, dict) else None
            self._sink.arguments(f"{between}{json.dumps(key, ensure_ascii=False)}: ")
            between = ", "
            if not (yield from self._parameter(schema)):
                break
            yield from source.skip_space()
        if (yield from source.literal("</function>")) or not source.cut:  # else half a call would look like a whole one
            self._sink.arguments("{}" if between == "{" else "}")
        source.mark()
        return self._end()

    def _parameter(self, schema: Any) -> Reading:
        """A parameter's value: one that can only be a string streams, any other is read as JSON where it is JSON."""
        source, end = self.input, "</parameter>"
        kind = schema.get("type") if isinstance(schema, dict) else None
        yield from source.literal("\n")
        if kind != "string":
            text = yield from source.take_until(end)
            if text is None and source.cut:
                return False
            whole = (source.rest() if text is None else text).removesuffix("\n")
            self._sink.arguments(_as_json(whole, kind))
            return text is not None
        self._sink.arguments('"')
        while True:
            text, found = source.until((end,))
            space = source.skipped_space.removesuffix("\n") if found else ""
            if not found and source.final:
                rest = source.rest()  # held back, since the tag may begin with it
                text += "" if source.cut else rest
            self._sink.arguments(json.dumps(text + space, ensure_ascii=False)[1:-1])
            if found or source.final:
                self._sink.arguments('"' if found or not source.cut else "")
                return found is not None
            yield


def _ignore(_: str) -> None:
    pass


def _as_json(text: str, kind: Any) -> str:
    """A parameter's text as a JSON value: itself where it is one, else a string."""
    if not (isinstance(kind, list) and "string" in kind):
        stripped = text.strip()
        try:
            value = json.loads({"True": "true", "False": "false", "None": "null"}.get(stripped, stripped))
        except (ValueError, RecursionError):
            pass
        else:
            return json.dumps(value, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)
