"""Server-sent events from bytes. ``SSEDecoder`` owns the unfinished line and event; no input or output here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tenuto.errors import APIConnectionError, APIError

DONE = "[DONE]"


class SSEDecoder:
    """Splits a byte stream into the data of its events, whatever the chunking.

    Lines end at LF, CR LF or CR only: other line separators of Unicode are legal inside JSON.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[str]:
        """Adds bytes and returns the data of the events that they complete."""
        buffer = self._rest + chunk
        # A CR at the very end may be half of a CR LF.
        held = b"\r" if buffer.endswith(b"\r") else b""
        buffer = buffer[: len(buffer) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = buffer.split(b"\n")
        self._rest += held
        events: list[str] = []
        for line in lines:
            if not line:
                if self._data:
                    events.append("\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" ").decode("utf-8", "replace"))
        return events


def parse_chunk(data: str) -> Mapping[str, Any]:
    """The JSON object of an event. Raises ``APIError`` for an error event, ``APIConnectionError`` for broken JSON."""
    try:
        chunk = json.loads(data)
    except ValueError:
        raise APIConnectionError("the stream holds an event that is not JSON") from None
    if not isinstance(chunk, dict):
        raise APIConnectionError("the stream holds an event that is not a JSON object")
    error = chunk.get("error")
    if error:
        message = error.get("message") if isinstance(error, dict) else error
        raise APIError(f"the server ended the stream with an error: {message}")
    return chunk
