"""Reads request bodies, and of a conversation's next one only what is new. ``Bodies`` owns the latest body of each conversation.

An agent sends its whole conversation with every turn. Where a body begins with the bytes of a known one up to the end of its
messages and ends with the bytes that followed them, all that has to be parsed is what lies between: the result is exactly
that of reading the whole. Everything else is read from the start.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tenuto.proxy.chains import CHAINS_MAX, Items
from tenuto.proxy.json_text import parse

KEPT_BYTES_MAX = 64 << 20
ENDS_MAX = 4
DECODED_BYTES_MAX = 32 << 20
_ITEMS = {"responses": "input", "gemini": "contents"}
_SPACE = b" \t\r\n"
_PROBE = 64  # bytes compared first: different conversations rarely agree on them
_CLOSING_TRIES = 8
_EMPTY = Items()

Body = bytes | bytearray  # a large one stays where the socket put it


@dataclass(frozen=True, slots=True)
class Reading:
    """One body. ``frame``: everything but the conversation; ``items``: the conversation. ``ends``: positions in ``data``
    behind the last message of this and earlier bodies, with the number of messages up to there; ``closing``: what follows
    the last one; empty where a later body cannot be compared with this one. One that is kept has its data up to there only."""

    form: str
    data: Body
    frame: Mapping[str, Any]
    items: Items
    ends: tuple[tuple[int, int], ...] = ()
    closing: bytes = b""


class Bodies:
    """The latest readings, by conversation; bounded in number and bytes, the least recently used go first."""

    def __init__(self, limit: int = CHAINS_MAX, bytes_max: int = KEPT_BYTES_MAX) -> None:
        self._limit = limit
        self._bytes_max = bytes_max
        self._bytes = 0
        self._latest: OrderedDict[tuple[str, str], Reading] = OrderedDict()

    def read(self, scope: str, form: str, data: Body) -> Reading | None:
        """A body of a client in ``scope``; None when it is no JSON object."""
        return self._grown(scope, form, data) or _whole(form, data)

    def keep(self, scope: str, name: str, reading: Reading) -> None:
        """Remembers the latest body of a conversation. Not on the way of a request: it may look for the messages' end."""
        self.drop(scope, name)
        if not reading.closing:
            reading = _closed(reading)
        if not reading.closing or len(reading.data) > self._bytes_max:
            return
        # Only what later bodies begin with: comparing with a part of it would copy that part.
        reading = replace(reading, data=bytes(memoryview(reading.data)[: reading.ends[-1][0]]))
        self._latest[scope, name] = reading
        self._bytes += len(reading.data)
        while self._bytes > self._bytes_max or len(self._latest) > self._limit:
            self._bytes -= len(self._latest.popitem(last=False)[1].data)

    def begun(self, scope: str, form: str, start: memoryview) -> str | None:
        """The conversation whose latest body begins as this one does; of several, the one that spoke last."""
        for (where, name), known in reversed(self._latest.items()):
            if where == scope and known.form == form and known.data.startswith(start):
                return name
        return None

    def grown(self, scope: str, form: str, data: Body) -> str | None:
        """The conversation of which this body holds all that its latest one did; of several, the one that says most. None
        where another one has gone on from there in its own way: which of them this is takes a closer look."""
        best, size = None, 0
        known = {name: r.data for (where, name), r in self._latest.items() if where == scope and r.form == form}
        for name, said in known.items():
            if len(said) >= size and _continues(data, self._latest[scope, name], len(said)):
                best, size = name, len(said)
        others = (said for said in known.values() if len(said) > size)
        return None if any(said.startswith(memoryview(data)[:size]) for said in others) else best

    def drop(self, scope: str, name: str) -> None:
        """Forgets a conversation."""
        known = self._latest.pop((scope, name), None)
        if known is not None:
            self._bytes -= len(known.data)

    def _grown(self, scope: str, form: str, data: Body) -> Reading | None:
        """Reads ``data`` as what a known body has become. Which one makes no difference but in work."""
        best, at, count = None, 0, 0
        for (where, _), known in reversed(self._latest.items()):
            if where != scope or known.form != form:
                continue
            found = next((e for e in reversed(known.ends) if e[0] > at and _continues(data, known, e[0])), None)
            if found is not None:
                best, (at, count) = known, found
                if found == known.ends[-1]:
                    break  # all of it: the conversation itself, most likely
        if best is None:
            return None
        middle = data[at : len(data) - len(best.closing)]
        end = at + len(middle.rstrip(_SPACE))
        middle = middle.strip(_SPACE)
        added = parse(b"[" + middle[1:] + b"]") if middle else []
        if middle[:1] not in (b"", b",") or not isinstance(added, list) or not _all_messages(added):
            return None
        if not added and (middle or count < best.items.count):
            return None
        items = best.items.cut(count).plus(added)
        ends = (*(e for e in best.ends if e[0] <= at), *([(end, items.count)] if added else ()))
        return Reading(form, data, best.frame, items, ends[-ENDS_MAX:], best.closing)


def decoded(data: Body, coding: str) -> Body | None:
    """A body without its content coding; None where that is not known here, broken, or too large. zstd needs the
    ``zstandard`` package."""
    if coding in ("", "identity"):
        return data
    try:
        if coding in ("gzip", "x-gzip", "deflate"):
            inflater = zlib.decompressobj(47)
            plain = inflater.decompress(data, DECODED_BYTES_MAX)
            return plain if inflater.eof else None
        if coding == "zstd":
            import zstandard

            with zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True) as reader:
                plain = reader.read(DECODED_BYTES_MAX + 1)
            return plain if len(plain) <= DECODED_BYTES_MAX else None
    except (ValueError, zlib.error, ModuleNotFoundError):
        return None
    except Exception as error:
        if type(error).__name__ == "ZstdError":
            return None
        raise
    return None


def _continues(data: Body, known: Reading, end: int) -> bool:
    """Whether ``data`` is ``known`` up to ``end``, something else, and what closes ``known``."""
    return (
        len(data) >= end + len(known.closing)
        and data[max(0, end - _PROBE) : end] == known.data[max(0, end - _PROBE) : end]
        and data[end : end + 1] in (b",", b"]", b" ", b"\n", b"\r", b"\t")
        and data.endswith(known.closing)
        and data.startswith(memoryview(known.data)[:end])
    )


def _whole(form: str, data: Body) -> Reading | None:
    body = parse(data)
    if not isinstance(body, dict):
        return None
    given = body.get(_ITEMS.get(form, "messages"))
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    messages = [item for item in given if isinstance(item, Mapping)] if isinstance(given, list) else []
    return Reading(form, data, body, _EMPTY.plus(messages))


def _closed(reading: Reading) -> Reading:
    """The reading with the end of its messages, where that can be told for certain."""
    name = _ITEMS.get(reading.form, "messages")
    given = reading.frame.get(name)
    if not isinstance(given, list) or not given or not _all_messages(given):
        return reading
    frame = {key: value if key != name else None for key, value in reading.frame.items()}
    keys = list(frame)
    after = keys[keys.index(name) + 1 :]
    at = len(reading.data)
    for _ in range(_CLOSING_TRIES):
        at = _bracket_before(reading.data, after[0] if after else None, at)
        if at < 0:
            break
        # With an odd number of quotes missing, or at another depth, this would be no JSON: it ends an array of the top.
        rest = parse(b'{"":[' + reading.data[at:])
        if isinstance(rest, dict) and list(rest) == ["", *after] and rest[""] == []:
            end = len(reading.data[:at].rstrip(_SPACE))
            return replace(reading, frame=frame, ends=((end, reading.items.count),), closing=bytes(reading.data[at:]))
    return replace(reading, frame=frame)


def _bracket_before(data: Body, key: str | None, limit: int) -> int:
    """Where a ``]`` stands that the field ``key``, or the body's end, follows; the last one before ``limit``, or -1."""
    if key is None:
        position = data.rfind(b"}", 0, limit)
    else:
        position = data.rfind(b'"%s"' % key.encode("utf-8", "replace"), 0, limit)
        while position > 0 and data[position - 1] in _SPACE:
            position -= 1
        if position <= 0:
            return -1
        position -= data[position - 1 : position] == b","
    while position > 0 and data[position - 1] in _SPACE:
        position -= 1
    return position - 1 if position > 0 and data[position - 1] == ord("]") else -1


def _all_messages(items: Sequence[Any]) -> bool:
    return all(isinstance(item, Mapping) for item in items)
