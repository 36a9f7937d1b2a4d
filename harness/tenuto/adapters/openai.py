"""The OpenAI SDK: ``client()`` and ``async_client()`` are its own clients, pointed at the server and wrapped. No state."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tenuto.adapters.address import server
from tenuto.wrapping import wrap

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI


def client(base_url: str | None = None, *, api_key: str | None = None, session: str = "auto", **options: Any) -> OpenAI:
    """An ``openai.OpenAI`` whose calls carry hints. ``options`` are those of the SDK; ``session`` as in ``wrap``."""
    url, key = server(base_url, api_key)
    made: OpenAI = importlib.import_module("openai").OpenAI(base_url=f"{url}/v1", api_key=key, **options)
    return wrap(made, session=session)


def async_client(
    base_url: str | None = None, *, api_key: str | None = None, session: str = "auto", **options: Any
) -> AsyncOpenAI:
    """An ``openai.AsyncOpenAI`` whose calls carry hints."""
    url, key = server(base_url, api_key)
    made: AsyncOpenAI = importlib.import_module("openai").AsyncOpenAI(base_url=f"{url}/v1", api_key=key, **options)
    return wrap(made, session=session)
