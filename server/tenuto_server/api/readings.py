"""What clients sent before, so that the part of a body which repeats it is compared instead of read again.

``Readings`` owns the conversations as they were read last, bounded in bytes; the one unused for longest is forgotten. A
message that is equal to the remembered one keeps the canonical message object, its digest and its link; reading goes on
behind the last such message. Whoever holds two conversations can therefore tell by identity how far they are the same.
"""

from __future__ import annotations

import marshal
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tenuto_server.api.conversation import TEXT_PARTS, Mark, Writer
from tenuto_server.api.digests import Digest
from tenuto_server.api.retain import longest, marks_of

_SAME_BEGINNING_MAX = 8
_MOVED = 2  # clients move their cache marks, so that the last messages of a request differ when they come back
_ITEM_BYTES = 600  # what an item costs beside its text, about
_TEXT_ITEMS = ("message", "function_call", "function_call_output")


class Reader(Protocol):
    """Takes a client's items apart, one after the other. ``read`` answers False while what an item began is still open,
    and raises 400. ``restart``: goes on with another writer; nothing is open. ``basis``: what else items are read by."""

    writer: Writer
    basis: bytes

    def read(self, item: Any, index: int) -> bool: ...

    def restart(self, writer: Writer) -> None: ...


@dataclass(frozen=True, slots=True)
class _Stop:
    """Behind one item. ``mark``: where the writer stood, None while something was open. ``text_only``: see below.
    ``asked_s``, ``marked_s``: the longest lives that its cache marks ask for. ``size``: bytes up to here, about."""

    mark: Mark | None
    text_only: bool
    asked_s: float | None
    marked_s: float | None
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """A conversation as it was read. ``first``: how many items stood for its beginning. ``raw``, ``stops``: its items."""

    first: int
    raw: list[Any]
    stops: list[_Stop]
    writer: Writer

    @property
    def size(self) -> int:
        """Bytes, about."""
        return self.stops[-1].size if self.stops else 0


class Readings:
    """See the module. Safe to share between threads."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._beginnings: OrderedDict[Digest, list[Reading]] = OrderedDict()
        self.bytes = 0
        self.items_reused = 0

    def read(self, scope: str, reader: Reader, raw: Sequence[Any]) -> Reading:
        """Reads a tenant's (``scope``) items behind what the reader's writer holds already. Raises what the reader raises."""
        stops: list[_Stop] = []
        writer = reader.writer
        while len(stops) < len(raw) and (not stops or stops[-1].mark is None):
            _read_one(reader, raw[len(stops)], stops)
        first = len(stops)
        writer.link(scope)
        key = (writer.links[-1] if writer.links else b"") + reader.basis
        before, count = self._longest(key, first, raw, writer) if stops and stops[-1].mark is not None else (None, 0)
        if before is not None and (mark := before.stops[count - 1].mark) is not None:
            removed = writer.removed
            # What was read from the beginning is equal, its marks need not be.
            beginning = [_remarked(old, new) for old, new in zip(before.stops, stops, strict=False)]
            stops = [*beginning, *before.stops[first:count]]
            writer = before.writer.resumed(mark)
            writer.removed = list(dict.fromkeys((*removed, *writer.removed)))
            reader.restart(writer)
        for item in raw[len(stops) :]:
            _read_one(reader, item, stops)
        writer.link(scope)
        reading = Reading(first, list(raw), stops, writer)
        if writer.links:
            self._keep(key, reading, before, count)
        return reading

    def _longest(self, key: Digest, first: int, raw: Sequence[Any], writer: Writer) -> tuple[Reading | None, int]:
        """The remembered reading that shares the most items, and how many. Fewer than one beyond the beginning: None."""
        with self._lock:
            candidates = tuple(self._beginnings.get(key, ()))
        best: tuple[Reading | None, int] = (None, first)
        for old in reversed(candidates):
            if old.first != first or not same(old.writer.messages[: len(writer.messages)], writer.messages):
                continue
            count = _shared(old, raw)
            while count > first and old.stops[count - 1].mark is None:
                count -= 1
            if count > best[1]:
                best = old, count
            if count >= len(old.raw) - _MOVED:
                break  # it goes on from this one
        return best

    def _keep(self, key: Digest, reading: Reading, before: Reading | None, count: int) -> None:
        with self._lock:
            self.items_reused += count
            held = self._beginnings.setdefault(key, [])
            self._beginnings.move_to_end(key)
            if before is not None and before in held and count >= len(before.raw) - _MOVED:
                held.remove(before)
                self.bytes -= before.size
            held.append(reading)
            self.bytes += reading.size
            if len(held) > _SAME_BEGINNING_MAX:
                self.bytes -= held.pop(0).size
            while self.bytes > self._bytes_max and self._beginnings:
                _, dropped = self._beginnings.popitem(last=False)
                self.bytes -= sum(old.size for old in dropped)


def facts(reading: Reading, scope: str) -> dict[str, Any]:
    """The fields of a ``Conversation`` that a reading fills."""
    writer = reading.writer
    return {
        "messages": tuple(writer.messages),
        "places": tuple(writer.places),
        "removed": tuple(writer.removed),
        "digests": tuple(writer.digests),
        "links": tuple(writer.links),
        "scope": scope,
        "asked_s": longest(*(stop.asked_s for stop in reading.stops)),
        "marked_s": longest(*(stop.marked_s for stop in reading.stops)),
    }


def _read_one(reader: Reader, item: Any, stops: list[_Stop]) -> None:
    before = len(reader.writer.messages)
    closed = reader.read(item, len(stops))
    last = stops[-1] if stops else _Stop(None, True, None, None, 0)
    asked, marked = marks_of(item)
    # Its strings are in the raw item and, mostly the same objects, in the canonical message; non-Latin text takes more.
    chars = sum(len(message["content"]) for message in reader.writer.messages[before:])
    stop = _Stop(
        reader.writer.mark() if closed else None,
        _text_only(item),
        asked,
        marked,
        last.size + 2 * chars + _ITEM_BYTES,
    )
    stops.append(stop)


def _remarked(old: _Stop, new: _Stop) -> _Stop:
    return replace(old, asked_s=new.asked_s, marked_s=new.marked_s)


def _shared(old: Reading, raw: Sequence[Any]) -> int:
    """How many items both begin with; those of the beginning were found equal already."""
    count = old.first
    for before, now, stop in zip(old.raw[count:], raw[count:], old.stops[count:], strict=False):
        try:
            if before is not now and not (before == now if stop.text_only else same(before, now)):
                break
        except RecursionError:
            break
        count += 1
    return count


def same(a: Any, b: Any) -> bool:
    """Equality of JSON values that tells 1 from 1.0 and True, and one order of keys from another, as a rendered prompt does:
    by their serialised form, without references (version 0)."""
    try:
        return marshal.dumps(a, 0) == marshal.dumps(b, 0)
    except ValueError:  # nested too deeply
        return False


def _text_only(item: Any) -> bool:
    """Whether only texts of this item are read, so that ``==`` says all."""
    if not isinstance(item, dict) or item.get("type", "message") not in _TEXT_ITEMS:
        return False
    if any(value is not None and type(value) is not str for key, value in item.items() if key != "content"):
        return False
    return _texts(item.get("content"))


def _texts(content: Any) -> bool:
    return content is None or isinstance(content, str) or (isinstance(content, list) and all(map(_text_block, content)))


def _text_block(block: Any) -> bool:
    if not isinstance(block, dict):
        return False
    kind = block.get("type")
    return (kind in TEXT_PARTS and isinstance(block.get("text"), str)) or (
        kind == "tool_result" and isinstance(block.get("tool_use_id"), str) and _texts(block.get("content"))
    )
