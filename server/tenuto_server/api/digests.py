"""Messages and conversations in digests. Holds no state.

A conversation is named by a chain of digests over its messages, begun with the tenant's name: nobody can learn from the time
an answer takes whether another tenant sent the same text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

Digest = bytes
_SIZE = 16


def digest_of(message: dict[str, Any]) -> Digest:
    """What a message says, in 16 bytes. An answer's reasoning does not count: clients may or may not send it back."""
    state = hashlib.blake2b(digest_size=_SIZE)
    content = message["content"]
    if message["role"] == "assistant":
        content = content.strip()
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        state.update(json.dumps(calls, sort_keys=True).encode("utf-8", "surrogatepass"))
    state.update(f"{message['role']}\0{len(content)}\0".encode())
    state.update(content.encode("utf-8", "surrogatepass"))
    return state.digest()


def root(scope: str) -> Digest:
    """Where the chain of a tenant's conversations begins."""
    return hashlib.blake2b(scope.encode("utf-8", "surrogatepass"), digest_size=_SIZE).digest()


def extend(link: Digest, digest: Digest) -> Digest:
    """The chain behind one more message."""
    return hashlib.blake2b(link + digest, digest_size=_SIZE).digest()


def chain(scope: str, digests: Sequence[Digest]) -> list[Digest]:
    """One digest after each message, over all up to it. ``scope``: whose conversation it is."""
    return extended(root(scope), digests)


def extended(link: Digest, digests: Iterable[Digest]) -> list[Digest]:
    """The links behind ``link``, one for each of these messages."""
    links = []
    for digest in digests:
        link = extend(link, digest)
        links.append(link)
    return links
