"""From the text of an answer, as it arrives, to what it says: text, reasoning, tool calls.

``OutputParser`` owns one answer's undecided tail. The rules, for every format of ``toolformat``:

- no part of a marker gets out, and no text is lost: what turns out not to be a call (no JSON, no name) is text; the head
  of a marked call that the limit cut off before its name is neither;
- the arguments of a call stream as soon as its name is known; from then on it is a call, whatever follows. Raw control
  characters in its strings, which JSON forbids and models write, are escaped;
- spaces and newlines between text and markup are the template's, not the answer's: they are dropped;
- how the text was cut into pieces changes nothing.

The parser is one generator that is resumed with every piece; it yields where it cannot decide yet.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeAlias

from tenuto_server.api.toolformat import ToolFormat
from tenuto_server.api.toolformat_calls import Calls
from tenuto_server.api.tools import ToolSpec


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the visible answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the reasoning before it."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. ``index``: 0, 1, ... within the answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of the JSON text of a call's arguments."""

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """A call is over. Its arguments are complete JSON unless the answer was cut off or the model wrote something else."""

    index: int


OutputEvent: TypeAlias = TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta | ToolCallEnd


class OutputParser:
    """See the module. ``reasoning``: the answer starts inside its reasoning. Without ``parallel``, calls after the first
    are left out."""

    def __init__(
        self,
        format: ToolFormat,
        tools: tuple[ToolSpec, ...],
        *,
        reasoning: bool,
        parallel: bool,
        new_id: Callable[[], str],
    ) -> None:
        self._events: list[OutputEvent] = []
        self._new_id = new_id
        self._index = -1
        self._undecided = False
        self._parallel, self._muted = parallel, False
        self._calls = Calls(format, tools, self)
        self._format, self._tools, self._reasoning = format, tools, reasoning
        self._input = self._calls.input
        self._machine = self._run()
        next(self._machine, None)

    @property
    def tool_calls(self) -> int:
        """Calls begun so far."""
        return self._index + 1

    def feed(self, text: str) -> list[OutputEvent]:
        """What this piece decided."""
        self._input.push(text)
        return self._resume()

    def finish(self, cut: bool = False) -> list[OutputEvent]:
        """What was held back; ends a call that was cut off. ``cut``: the answer's limit ended it. Nothing may be fed
        afterwards."""
        self._input.final, self._input.cut = True, cut
        return self._resume()

    def _resume(self) -> list[OutputEvent]:
        next(self._machine, None)
        events, self._events = self._events, []
        return events

    # Where the readers of calls put what they find.

    def text(self, text: str) -> None:
        """Visible text; pieces that come together go out as one."""
        if not text:
            return
        if self._events and isinstance(last := self._events[-1], TextDelta):
            self._events[-1] = TextDelta(last.text + text)
        else:
            self._events.append(TextDelta(text))

    def begin_call(self, name: str) -> None:
        """A call of this tool."""
        self._muted = self._index >= 0 and not self._parallel
        if self._muted:
            return
        self._index += 1
        self._events.append(ToolCallStart(self._index, self._new_id(), name))

    def arguments(self, text: str) -> None:
        """More of its arguments."""
        if self._muted:
            return
        if self._events and isinstance(last := self._events[-1], ToolCallDelta):
            self._events[-1] = ToolCallDelta(self._index, last.arguments + text)
        elif text:
            self._events.append(ToolCallDelta(self._index, text))

    def end_call(self) -> None:
        """It is complete."""
        if not self._muted:
            self._events.append(ToolCallEnd(self._index))

    # The machine.

    def _run(self) -> Generator[None, None, None]:
        yield from self._think()
        markers = self._format.begin if self._tools else ()
        if self._tools and self._format.bare:
            yield from self._call("")
        yield from self._answer(markers)
        while True:  # after ``finish``
            yield

    def _think(self) -> Generator[None, None, None]:
        """Reasoning at the start of the answer, if there is any."""
        source = self._input
        if self._format.think is None:
            return
        begin, end = self._format.think
        if not self._reasoning:
            source.mark()
            yield from source.skip_space()
            if not (yield from source.literal(begin)):
                source.back()
                return
            source.unmark()
        yield from source.skip_space()
        while True:
            text, found = source.until((end,))
            if source.final and found is None:
                text += source.rest().rstrip()
            if text:
                self._events.append(ReasoningDelta(text))
            if found is not None:
                break
            if source.final:
                return
            yield
        yield from source.skip_space()

    def _call(self, marker: str) -> Generator[None, None, bool]:
        """Whether calls stood behind the marker. Without one it may be text to its end, whatever it looks like."""
        self._undecided = bool(marker)
        found = yield from self._calls.read(marker)
        self._undecided &= self._input.cut
        return found

    def _answer(self, markers: tuple[str, ...]) -> Generator[None, None, None]:
        """Text and, between it, what the markers open."""
        source = self._input
        if self._index >= 0:  # a bare call was the beginning
            yield from source.skip_space()
        while True:
            text, found = source.until(markers)
            self.text(text)
            if found is not None:
                space = source.skipped_space
                if (yield from self._call(found)):
                    yield from source.skip_space()
                elif self._undecided:  # when the limit came
                    source.rest()
                    return
                else:  # the marker was text (unless it is a control token), and reading goes on behind it
                    self.text(space + ("" if found in self._format.control else found))
            elif source.final:
                rest = source.rest()
                if self._index < 0:
                    self.text(rest)
                elif not any(marker.startswith(rest.strip()) for marker in markers):
                    self.text(rest.rstrip())  # else the next call was cut off
                return
            else:
                yield


def output_parser(
    format: ToolFormat,
    tools: tuple[ToolSpec, ...] = (),
    *,
    reasoning: bool = False,
    parallel: bool = True,
    new_id: Callable[[], str] | None = None,
) -> OutputParser:
    """A parser for one answer. Without ``tools`` (none offered, or ``tool_choice`` none) markup of calls is plain text.

    ``reasoning``: the prompt's end opened it (``ToolFormat.opens_reasoning``). ``parallel``: more than one call may come out.
    ``new_id``: makes the ids of calls.
    """
    short = format.name.startswith("mistral")
    return OutputParser(
        format, tools, reasoning=reasoning, parallel=parallel, new_id=new_id or (_short_id if short else _call_id)
    )


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    """Mistral's templates insist on nine letters and digits."""
    return secrets.token_hex(5)[:9]
