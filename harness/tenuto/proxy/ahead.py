"""Passes the beginning of a large request on while the rest still comes in over a slow line. ``Ahead`` owns the upstream
connection meanwhile.

What goes ahead rests on a guess: that the session is the one that the beginning looks like, and that nothing has to be
rewritten. It is never all of it: the end goes when the whole is known. If the guess was wrong, the connection is dropped before
its request is complete, which no server answers, and the request is sent anew.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import h11

from tenuto.proxy.bodies import Body
from tenuto.proxy.front import Front
from tenuto.proxy.upstream import Link

READ_BODY_BYTES_MAX = 8 << 20
BODY_BYTES_MAX = 512 << 20
# A client on this machine has sent a megabyte in less: to pass it on in two parts would take longer.
PATIENCE_S = 0.005
# Smaller bodies are not worth it; and what has to be seen of a larger one to tell whose it is.
AHEAD_BYTES_MIN = 384 << 10
GUESS_BYTES = 64 << 10


class TooLarge(ValueError):
    """A request's body exceeds the limit."""


@dataclass(slots=True)
class Ahead:
    """``head``: as it was sent; ``sent``: bytes of the body that followed it."""

    link: Link
    head: h11.Request
    sent: int

    async def push(self, piece: memoryview) -> bool:
        """More has come; False when the upstream does not take it, and the connection is closed."""
        try:
            await self.link.send(piece)
        except (OSError, TimeoutError):
            self.link.close()
            return False
        self.sent += len(piece)
        return True


Begin = Callable[[bytearray, int], Awaitable[Ahead | None]]


async def read_body(front: Front, begin: Begin) -> tuple[Body, bool, Ahead | None]:
    """The body, whether that is all of it, and what went ahead. ``begin`` is asked once, with the beginning of a body
    that is worth it. Raises ``TooLarge``."""
    length = front.length
    if length is None:
        return *await _chunks(front), None
    if length > BODY_BYTES_MAX:
        raise TooLarge(f"the body has {length} bytes, the proxy takes {BODY_BYTES_MAX}")
    if length > READ_BODY_BYTES_MAX:
        return b"", False, None
    if length < AHEAD_BYTES_MIN:
        await front.fill(length)
        return front.buffer, True, None
    ahead = await _in_step(front, length, begin)
    return front.buffer, True, ahead


async def _chunks(front: Front) -> tuple[bytes, bool]:
    pieces: list[bytes] = []
    size = 0
    while size <= READ_BODY_BYTES_MAX:
        piece = await front.body()
        if piece is None:
            return b"".join(pieces), True
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces), False


async def _in_step(front: Front, length: int, begin: Begin) -> Ahead | None:
    """Reads a large body; where that takes its time, all but its end passes on as it comes."""
    ahead: Ahead | None = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            await front.fill(length)
    try:
        await front.fill(GUESS_BYTES)
        if front.filled < length:
            ahead = await begin(front.buffer, front.filled)
        while ahead is not None and front.filled < length:
            had = front.filled
            if ahead.sent < had and not await ahead.push(memoryview(front.buffer)[ahead.sent : had]):
                ahead = None
            await front.fill(had + 1)
        await front.fill(length)
    except BaseException:
        if ahead is not None:
            ahead.link.close()
        raise
    return ahead
