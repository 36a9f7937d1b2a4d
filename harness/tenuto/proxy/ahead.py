"""Passes the beginning of a large request on while the rest still comes in. ``Ahead`` owns the upstream connection meanwhile.

What goes ahead rests on a guess: that the session is the one that the beginning looks like, and that nothing has to be
rewritten. The last piece stays here until the whole is known. If the guess was wrong, the connection is dropped before
its request is complete, which no server answers, and the request is sent anew.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import h11

from tenuto.proxy.front import Front
from tenuto.proxy.upstream import Link

READ_BODY_BYTES_MAX = 8 << 20
BODY_BYTES_MAX = 512 << 20
# Below, all of a body arrives at once; and what has to be seen of a larger one to tell whose it is.
AHEAD_BYTES_MIN = 384 << 10
GUESS_BYTES = 64 << 10


class TooLarge(ValueError):
    """A request's body exceeds the limit."""


@dataclass(slots=True)
class Ahead:
    """``head``: as it was sent. ``held``: the piece that waits for the next one, or for the request's end."""

    link: Link
    head: h11.Request
    held: bytes = b""

    async def push(self, piece: bytes) -> bool:
        """One more piece has come; False when the upstream does not take them, and the connection is closed."""
        try:
            if self.held:
                await self.link.send(h11.Data(data=self.held))
        except (OSError, TimeoutError):
            self.link.close()
            return False
        self.held = piece
        return True


Begin = Callable[[bytes], Awaitable[Ahead | None]]


async def read_body(front: Front, headers: Mapping[str, str], begin: Begin) -> tuple[bytes, bool, Ahead | None]:
    """The body, whether that is all of it, and what went ahead. ``begin`` is asked once, with the beginning of a body
    that is worth it. Raises ``TooLarge``."""
    declared = int(headers.get("content-length", "0"))
    if declared > BODY_BYTES_MAX:
        raise TooLarge(f"the body has {declared} bytes, the proxy takes {BODY_BYTES_MAX}")
    pieces: list[bytes] = []
    size, ahead = 0, None
    ask = AHEAD_BYTES_MIN <= declared <= READ_BODY_BYTES_MAX
    try:
        while size <= READ_BODY_BYTES_MAX:
            piece = await front.body()
            if piece is None:
                return b"".join(pieces), True, ahead
            pieces.append(piece)
            size += len(piece)
            if ahead is not None:
                ahead = ahead if await ahead.push(piece) else None
            elif ask and GUESS_BYTES <= size < declared:
                ask, ahead = False, await begin(b"".join(pieces))
    except BaseException:
        if ahead is not None:
            ahead.link.close()
        raise
    return b"".join(pieces), False, None
