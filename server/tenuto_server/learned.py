"""The file in which a server keeps what pauses have taught it from one start to the next. ``LearnedFile`` owns it.

It lies in the disk tier's directory, under the same lock as the blocks. It is written as a whole under another name and
renamed, with a checksum over all of it; what is damaged, too large or of another version is not believed, and said so.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tenuto_server.policy.learned import Learned, Unfit

VERSION = 1
BYTES_MAX = 32 << 20
EVERY_S = 60.0
"""No more often than this is the file written while the server runs."""

logger = logging.getLogger(__name__)


def alias_of(secret: bytes) -> Callable[[str], str]:
    """The names that tenants go by in the file of a server with that secret."""
    key = hmac.new(secret, b"tenuto learned", hashlib.sha256).digest()
    return lambda tenant: hmac.new(key, tenant.encode(), hashlib.sha256).hexdigest()[:32]


class LearnedFile:
    """``path``: the file. ``load`` at the start, then ``tend`` from the thread that owns what is learned whenever it has
    nothing to do, and ``close`` at the end."""

    def __init__(
        self,
        path: Path,
        learned: Learned,
        *,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self._learned = learned
        self._every_s, self._clock = every_s, clock
        self._saved_s, self._known = clock(), learned.taught()
        self._writer: threading.Thread | None = None
        self._failed = False

    def load(self) -> bool:
        """Restores what the file holds; False, with a line in the log unless there is none, if nothing was restored."""
        try:
            size = self.path.stat().st_size
            if size > BYTES_MAX:
                raise Unfit(f"{size} bytes are more than {BYTES_MAX}")
            self._learned.restore(_checked(self.path.read_bytes()))
        except FileNotFoundError:
            return False
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("%s is ignored, pauses are learned anew: %s", self.path, error)
            return False
        self._known = self._learned.taught()
        return True

    def tend(self) -> None:
        """Writes the file in a thread of its own if something was learned since, and it is time."""
        now_s, taught = self._clock(), self._learned.taught()
        if now_s < self._saved_s + self._every_s or taught == self._known:
            return
        if self._writer is not None and self._writer.is_alive():
            return
        self._saved_s, self._known = now_s, taught
        self._writer = threading.Thread(target=self._write, args=(self._learned.dump(),), name="tenuto-learned")
        self._writer.start()

    def close(self) -> None:
        """Writes what has been learned since; call when its owner's thread has ended."""
        if self._writer is not None:
            self._writer.join()
        if self._learned.taught() != self._known:
            self._known = self._learned.taught()
            self._write(self._learned.dump())

    def _write(self, saved: dict[str, Any]) -> None:
        body = json.dumps(saved, separators=(",", ":")).encode()
        head = json.dumps({"tenuto_learned": VERSION, "sha256": hashlib.sha256(body).hexdigest()}).encode()
        fresh = self.path.with_suffix(".new")
        try:
            with open(fresh, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(head + b"\n" + body + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, self.path)
        except OSError as error:
            with suppress(OSError):
                fresh.unlink()
            if not self._failed:
                logger.warning("%s cannot be written, what pauses teach is not kept: %s", self.path, error)
            self._failed = True


def _checked(data: bytes) -> dict[str, Any]:
    """The contents of a file. Raises ``ValueError`` for anything but an undamaged file of this version."""
    first, _, rest = data.partition(b"\n")
    head, body = json.loads(first), rest.removesuffix(b"\n")
    if not isinstance(head, dict) or head.get("tenuto_learned") != VERSION:
        raise Unfit("it was written by another version")
    if head.get("sha256") != hashlib.sha256(body).hexdigest():
        raise Unfit("it is damaged")
    saved = json.loads(body)
    if not isinstance(saved, dict):
        raise Unfit("it is damaged")
    return saved
