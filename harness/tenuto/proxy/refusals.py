"""Errors of the proxy itself, in the shape that the client's dialect uses for its own. No state."""

from __future__ import annotations

import json


def refusal(dialect: str | None, status: int, kind: str, message: str) -> bytes:
    """The JSON body of an error answer. ``kind``: a word for programs, such as ``upstream_unreachable``."""
    if dialect == "messages":
        named = {413: "request_too_large", 429: "rate_limit_error"}.get(
            status, "api_error" if status >= 500 else "invalid_request_error"
        )
        body: dict[str, object] = {"type": "error", "error": {"type": named, "message": message}}
    elif dialect == "gemini":
        word = "UNAVAILABLE" if status >= 500 else "INVALID_ARGUMENT"
        body = {"error": {"code": status, "message": message, "status": word}}
    else:
        body = {"error": {"message": message, "type": kind, "param": None, "code": kind}}
    return json.dumps(body).encode()
