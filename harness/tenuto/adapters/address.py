"""Where adapters find the server: arguments, then ``TENUTO_BASE_URL`` and ``TENUTO_API_KEY``, then loopback. No state."""

from __future__ import annotations

import os

from tenuto.client import DEFAULT_BASE_URL

# SDKs insist on a key even where the server takes none.
NO_KEY = "tenuto"


def server(base_url: str | None, api_key: str | None) -> tuple[str, str]:
    """The server's URL without ``/v1``, and the key to send."""
    url = base_url or os.environ.get("TENUTO_BASE_URL") or DEFAULT_BASE_URL
    return url.rstrip("/").removesuffix("/v1"), api_key or os.environ.get("TENUTO_API_KEY") or NO_KEY
