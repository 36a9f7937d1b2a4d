"""Takes out of a request what changes from session to session and means nothing to the model. Bytes in, bytes out.

Only for a server of one's own: a hosted service gets every byte as the client sent it. What is cut is exactly one JSON
object, found in the bytes, so that everything else stays as it was.
"""

from __future__ import annotations

import re

# The first system block of Claude Code: a line with its version, hex digits of the first user text, and a mark in
# subagents. Inside a JSON string its quotes would be escaped, so the pattern can only match structure.
_ATTRIBUTION = re.compile(
    rb'("system"\s*:\s*\[\s*)\{\s*"type"\s*:\s*"text"\s*,\s*"text"\s*:\s*"x-anthropic-billing-header:[^"\\]*"'
    rb'(?:\s*,\s*"cache_control"\s*:\s*(?:\{[^{}]*\}|null))?\s*\}\s*,?\s*'
)
_MARK = b"x-anthropic-billing-header:"


def strip_attribution(body: bytes) -> bytes:
    """The body without its attribution block; the same object when there is none."""
    if _MARK not in body:
        return body
    return _ATTRIBUTION.sub(rb"\1", body, count=1)
