"""The Anthropic SDK: ``client()`` and ``async_client()`` are its own clients, pointed at the server and wrapped. No state."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tenuto.adapters.address import server
from tenuto.wrapping import wrap

if TYPE_CHECKING:
    from anthropic import Anthropic, AsyncAnthropic


def client(
    base_url: str | None = None, *, api_key: str | None = None, session: str = "auto", **options: Any
) -> Anthropic:
    """An ``anthropic.Anthropic`` whose calls carry hints. ``options`` are those of the SDK; ``session`` as in ``wrap``."""
    url, key = server(base_url, api_key)
    made: Anthropic = importlib.import_module("anthropic").Anthropic(base_url=url, api_key=key, **options)
    return wrap(made, session=session)


def async_client(
    base_url: str | None = None, *, api_key: str | None = None, session: str = "auto", **options: Any
) -> AsyncAnthropic:
    """An ``anthropic.AsyncAnthropic`` whose calls carry hints."""
    url, key = server(base_url, api_key)
    made: AsyncAnthropic = importlib.import_module("anthropic").AsyncAnthropic(base_url=url, api_key=key, **options)
    return wrap(made, session=session)
