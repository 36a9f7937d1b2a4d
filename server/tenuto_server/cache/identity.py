"""Who a block belongs to: the root of the chained block hash, and the chain itself. Holds no state.

The root covers everything that decides what a block's bytes mean and who may read them, so that no restart with another
model, quantisation, layout or tenant can ever match an old block.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class RootIdentity:
    """What all blocks of one server have in common. ``secret``: the server's stable secret, at least 16 bytes.

    Tenants are separated by an HMAC of a per-tenant secret (derived from ``secret``) and the client's own salt: a client
    can narrow sharing with a salt, never widen it.
    """

    weights_digest: str
    adapter: str
    kv_dtype: str
    layout_version: int
    block_tokens: int
    secret: bytes

    def _what(self) -> bytes:
        parts = (self.weights_digest, self.adapter, self.kv_dtype, str(self.layout_version), str(self.block_tokens))
        return b"\x00".join(part.encode() for part in parts)

    def root(self, tenant: str, salt: str = "") -> bytes:
        """The chain's start for that tenant and salt, 16 bytes."""
        return _root(self, tenant, salt)

    def _derive(self, tenant: str, salt: str) -> bytes:
        tenant_secret = hmac.new(self.secret, b"tenant\x00" + tenant.encode(), hashlib.sha256).digest()
        salted = hmac.new(tenant_secret, salt.encode(), hashlib.sha256).digest()
        return hashlib.blake2b(self._what() + b"\x00" + salted, digest_size=HASH_BYTES).digest()

    def family(self) -> str:
        """A name for the directory of blocks that this identity can use, hexadecimal; reveals nothing of the secret."""
        return hmac.new(self.secret, b"family\x00" + self._what(), hashlib.sha256).hexdigest()[:32]


@lru_cache(maxsize=4096)
def _root(identity: RootIdentity, tenant: str, salt: str) -> bytes:
    return identity._derive(tenant, salt)


def chain(parent: bytes, tokens: NDArray[np.int32], block_tokens: int) -> bytes:
    """Chained hashes of consecutive blocks, 16 bytes each: h[i] = blake2b(h[i-1] || tokens of block i).

    ``tokens``: int32 [n]; a last partial block hashes the tokens that it has (its length tells it from a full one).
    """
    data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    step = 4 * block_tokens
    hashes = []
    for offset in range(0, len(data), step):
        parent = hashlib.blake2b(parent + data[offset : offset + step], digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return b"".join(hashes)
