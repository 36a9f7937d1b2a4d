"""Tenuto: tell the inference server how long your agent will pause, so that its KV cache is still there when it returns.

    async with tenuto.connect() as tn:
        async with tn.session("fix-issue-42", model="smollm2-135m") as s:
            turn = await s.chat(messages, tools=TOOLS)
            for call in turn.tool_calls:
                async with s.pause("tool", call):
                    result = await run(call)

Every public name of the SDK is listed in ``__all__`` and imported when it is first used, so that ``import tenuto`` costs
next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenuto.client import AsyncClient as AsyncClient
    from tenuto.client import Client as Client
    from tenuto.client import connect as connect
    from tenuto.client import connect_sync as connect_sync
    from tenuto.errors import APIConnectionError as APIConnectionError
    from tenuto.errors import APIError as APIError
    from tenuto.errors import APIStatusError as APIStatusError
    from tenuto.errors import APITimeoutError as APITimeoutError
    from tenuto.errors import AuthenticationError as AuthenticationError
    from tenuto.errors import BadRequestError as BadRequestError
    from tenuto.errors import ConflictError as ConflictError
    from tenuto.errors import HintRejectedError as HintRejectedError
    from tenuto.errors import InternalServerError as InternalServerError
    from tenuto.errors import NotFoundError as NotFoundError
    from tenuto.errors import PayloadTooLargeError as PayloadTooLargeError
    from tenuto.errors import PermissionDeniedError as PermissionDeniedError
    from tenuto.errors import PrefixDivergedError as PrefixDivergedError
    from tenuto.errors import PrefixDivergedWarning as PrefixDivergedWarning
    from tenuto.errors import RateLimitError as RateLimitError
    from tenuto.errors import SessionClosedError as SessionClosedError
    from tenuto.errors import TenutoError as TenutoError
    from tenuto.errors import TraceError as TraceError
    from tenuto.errors import UnprocessableEntityError as UnprocessableEntityError
    from tenuto.forecast import PauseForecast as PauseForecast
    from tenuto.forecast import PauseForecaster as PauseForecaster
    from tenuto.keepalive import Keepalive as Keepalive
    from tenuto.pause import Compaction as Compaction
    from tenuto.pause import Pause as Pause
    from tenuto.pause_key import PauseKey as PauseKey
    from tenuto.prefix import DivergenceReport as DivergenceReport
    from tenuto.prefix import Fingerprint as Fingerprint
    from tenuto.prefix import assert_prefix_stable as assert_prefix_stable
    from tenuto.prefix import divergence as divergence
    from tenuto.prefix import fingerprint as fingerprint
    from tenuto.recorder import Recorder as Recorder
    from tenuto.sender import Hints as Hints
    from tenuto.sender import HintStats as HintStats
    from tenuto.session import AsyncSession as AsyncSession
    from tenuto.session import AsyncTurnStream as AsyncTurnStream
    from tenuto.session import Session as Session
    from tenuto.session import TurnStream as TurnStream
    from tenuto.session import current_session as current_session
    from tenuto.session import system as system
    from tenuto.session import tool_result as tool_result
    from tenuto.session import user as user
    from tenuto.session_core import SessionUsage as SessionUsage
    from tenuto.turn import Miss as Miss
    from tenuto.turn import StreamEvent as StreamEvent
    from tenuto.turn import ToolCall as ToolCall
    from tenuto.turn import Turn as Turn
    from tenuto.turn import TurnUsage as TurnUsage
    from tenuto.wire import CacheReport as CacheReport
    from tenuto.wire import Lease as Lease
    from tenuto.wrapping import wrap as wrap

_HOME = {
    "client": ("AsyncClient", "Client", "connect", "connect_sync"),
    "errors": (
        "APIConnectionError",
        "APIError",
        "APIStatusError",
        "APITimeoutError",
        "AuthenticationError",
        "BadRequestError",
        "ConflictError",
        "HintRejectedError",
        "InternalServerError",
        "NotFoundError",
        "PayloadTooLargeError",
        "PermissionDeniedError",
        "PrefixDivergedError",
        "PrefixDivergedWarning",
        "RateLimitError",
        "SessionClosedError",
        "TenutoError",
        "TraceError",
        "UnprocessableEntityError",
    ),
    "forecast": ("PauseForecast", "PauseForecaster"),
    "keepalive": ("Keepalive",),
    "pause": ("Compaction", "Pause"),
    "pause_key": ("PauseKey",),
    "prefix": ("DivergenceReport", "Fingerprint", "assert_prefix_stable", "divergence", "fingerprint"),
    "recorder": ("Recorder",),
    "sender": ("HintStats", "Hints"),
    "session": (
        "AsyncSession",
        "AsyncTurnStream",
        "Session",
        "TurnStream",
        "current_session",
        "system",
        "tool_result",
        "user",
    ),
    "session_core": ("SessionUsage",),
    "turn": ("Miss", "StreamEvent", "ToolCall", "Turn", "TurnUsage"),
    "wire": ("CacheReport", "Lease"),
    "wrapping": ("wrap",),
}
_WHERE = {name: module for module, names in _HOME.items() for name in names}

__version__ = "0.1.0"
__all__ = sorted(["__version__", *_WHERE])


def __getattr__(name: str) -> Any:
    module = _WHERE.get(name)
    if module is None:
        raise AttributeError(f"module 'tenuto' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tenuto.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
