"""Hints and identity in HTTP headers: names, encoding, size limits.

Identity is accepted in every form that clients already send (protocol.md section 3). Nothing here holds state.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from tenuto.wire import Envelope, describe_error

HINTS_HEADER = "x-tenuto-hints"
HINTS_HEADER_BYTES_MAX = 8 * 1024
SESSION_HEADER = "x-session-id"
PARENT_HEADER = "x-parent-session-id"
SALT_HEADER = "x-tenuto-cache-salt"
ID_CHARS_MAX = 256

# (session, child, parent) header triples in order of precedence. A child header, where present, is the identity of the
# conversation, and the session header then names its root.
_TRIPLES: tuple[tuple[str, str | None, str | None], ...] = (
    (SESSION_HEADER, None, PARENT_HEADER),
    ("x-claude-code-session-id", "x-claude-code-agent-id", "x-claude-code-parent-agent-id"),
    ("session-id", "thread-id", "x-codex-parent-thread-id"),
    ("x-dynamo-session-id", None, "x-dynamo-parent-session-id"),
    ("x-litellm-session-id", None, None),
    ("x-opencode-session", None, None),
    ("x-session-affinity", None, None),
    ("x-affinity", None, None),
)
_FINAL_HEADER = "x-dynamo-session-final"


class HeaderError(ValueError):
    """A header of ours that cannot be used; the message names the header and the limit."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who is speaking, as far as the headers tell. ``final``: the client says that this is the session's last turn."""

    session: str | None = None
    parent: str | None = None
    final: bool = False


def encode_hints(envelope: Envelope) -> str:
    """The envelope as a header value: base64url JSON. Raises ``HeaderError`` above 8 KiB."""
    raw = envelope.model_dump_json(exclude_none=True).encode()
    value = base64.urlsafe_b64encode(raw).decode("ascii").rstrip("=")
    if len(value) > HINTS_HEADER_BYTES_MAX:
        raise HeaderError(f"{HINTS_HEADER}: {len(value)} bytes exceed the limit of {HINTS_HEADER_BYTES_MAX}")
    return value


def decode_hints(value: str) -> Envelope:
    """Reads a header value back. Raises ``HeaderError`` with the reason when it is too long or malformed."""
    if len(value) > HINTS_HEADER_BYTES_MAX:
        raise HeaderError(f"{HINTS_HEADER}: {len(value)} bytes exceed the limit of {HINTS_HEADER_BYTES_MAX}")
    try:
        raw = base64.b64decode(value + "=" * (-len(value) % 4), altchars=b"-_", validate=True)
        return Envelope.model_validate_json(raw)
    except (binascii.Error, ValueError) as error:
        detail = describe_error(error) if isinstance(error, ValidationError) else "not base64url"
        raise HeaderError(f"{HINTS_HEADER}: {detail}") from None


def _clean(headers: Mapping[str, str], name: str | None) -> str | None:
    value = headers.get(name, "").strip() if name else ""
    if not value:
        return None
    if len(value) > ID_CHARS_MAX:
        raise HeaderError(f"{name}: {len(value)} characters exceed the limit of {ID_CHARS_MAX}")
    return value


def read_identity(headers: Mapping[str, str]) -> Identity:
    """The session and its parent from request headers (case-insensitive mapping with lower-case lookup).

    The first family of headers that names a session wins. Raises ``HeaderError`` for an id above 256 characters.
    """
    final = headers.get(_FINAL_HEADER, "").strip().lower() in ("1", "true", "yes")
    for session_name, child_name, parent_name in _TRIPLES:
        root = _clean(headers, session_name)
        if root is None:
            continue
        child = _clean(headers, child_name)
        parent = _clean(headers, parent_name)
        if child is None or child == root:
            return Identity(root, parent if parent != root else None, final)
        return Identity(f"{root}/{child}", f"{root}/{parent}" if parent and parent != root else root, final)
    return Identity(final=final)


def write_identity(session: str, parent: str | None = None) -> dict[str, str]:
    """The headers that name a session and its parent."""
    headers = {SESSION_HEADER: session}
    if parent:
        headers[PARENT_HEADER] = parent
    return headers
