"""API key to tenant. Owns the table of keys (as digests), fixed at start."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from tenuto_server.api.errors import ApiError

DEFAULT_TENANT = "default"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


class KeyRing:
    """``keys``: tenant name to API key. Without any, everybody is the tenant ``default`` and keys are ignored."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        # Looking up a digest instead of comparing keys leaves nothing for timing to tell.
        self._tenants = {_digest(key): name for name, key in keys.items()}

    def tenant(self, headers: Mapping[str, str]) -> str:
        """The tenant of ``Authorization: Bearer`` or ``x-api-key`` (some clients send both). Raises 401."""
        if not self._tenants:
            return DEFAULT_TENANT
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [bearer.strip()] if scheme.lower() == "bearer" else []
        given += [headers["x-api-key"].strip()] if "x-api-key" in headers else []
        for key in given:
            if (tenant := self._tenants.get(_digest(key))) is not None:
                return tenant
        message = "unknown API key" if any(given) else "no API key: send Authorization: Bearer <key> or x-api-key"
        raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
