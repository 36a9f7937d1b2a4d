"""Logs and spans. Owns the process's logging set-up; never sees the text of a prompt.

Log lines are ``time level logger message key=value ...``, one event a line. Spans go to OpenTelemetry where its API is
installed (and nowhere, at no cost, without an SDK behind it); attribute names follow its conventions for generative AI.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any, Protocol, TextIO

LEVELS = ("debug", "info", "warning", "error")


class Span(Protocol):
    """The part of an OpenTelemetry span that is used here."""

    def set_attribute(self, key: str, value: Any) -> Any: ...

    def end(self) -> Any: ...


class _NoSpan:
    def set_attribute(self, key: str, value: Any) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""


class KeyValueFormatter(logging.Formatter):
    """Appends the ``facts`` of a record as ``key=value``, quoting what needs it, so that lines stay lines."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        facts = getattr(record, "facts", None)
        if facts:
            line += "".join(f" {key}={_quote(value)}" for key, value in facts.items() if value is not None)
        return line


def _quote(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    plain = text.isascii() and text.isprintable() and text and not set(text) & set(' "=')
    return text if plain else json.dumps(text)


def setup_logging(level: str, stream: TextIO | None = None) -> None:
    """Sends all logs of this process to ``stream`` (default: stderr) from ``level`` on. Raises ``ValueError``."""
    if level not in LEVELS:
        raise ValueError(f"log level must be one of {', '.join(LEVELS)}, got {level!r}")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(KeyValueFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for chatty in ("uvicorn.error", "asyncio", "httpx"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def log_event(logger: logging.Logger, name: str, **facts: Any) -> None:
    """One event at level info; facts that are None are left out."""
    if logger.isEnabledFor(logging.INFO):
        logger.info(name, extra={"facts": facts})


def start_span(name: str, attributes: dict[str, Any] | None = None) -> Span:
    """A span that the caller ends; attributes that are None are left out."""
    try:
        from opentelemetry import trace
    except ImportError:
        return _NoSpan()
    given = {key: value for key, value in (attributes or {}).items() if value is not None}
    return trace.get_tracer("tenuto").start_span(name, attributes=given)
