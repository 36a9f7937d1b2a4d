"""The public surface: what is exported, that all of it is documented, what importing it costs."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import tenuto

HERE = Path(tenuto.__file__).parent

EXPORTS = [
    "APIConnectionError",
    "APIError",
    "APIStatusError",
    "APITimeoutError",
    "AsyncClient",
    "AsyncSession",
    "AsyncTurnStream",
    "AuthenticationError",
    "BadRequestError",
    "CacheReport",
    "Client",
    "Compaction",
    "ConflictError",
    "DivergenceReport",
    "Fingerprint",
    "HintRejectedError",
    "HintStats",
    "Hints",
    "InternalServerError",
    "Keepalive",
    "Lease",
    "Miss",
    "NotFoundError",
    "Pause",
    "PauseForecast",
    "PauseForecaster",
    "PauseKey",
    "PayloadTooLargeError",
    "PermissionDeniedError",
    "PrefixDivergedError",
    "PrefixDivergedWarning",
    "RateLimitError",
    "Recorder",
    "Session",
    "SessionClosedError",
    "SessionUsage",
    "StreamEvent",
    "TenutoError",
    "ToolCall",
    "TraceError",
    "Turn",
    "TurnStream",
    "TurnUsage",
    "UnprocessableEntityError",
    "__version__",
    "assert_prefix_stable",
    "connect",
    "connect_sync",
    "current_session",
    "divergence",
    "fingerprint",
    "system",
    "tool_result",
    "user",
    "wrap",
]


def test_public_names() -> None:
    assert tenuto.__all__ == sorted(EXPORTS)
    assert all(getattr(tenuto, name) is not None for name in tenuto.__all__)
    assert dir(tenuto) == tenuto.__all__
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        tenuto.nonsense  # noqa: B018


@pytest.mark.parametrize("name", [n for n in EXPORTS if n != "__version__"])
def test_every_public_name_is_documented(name: str) -> None:
    value = getattr(tenuto, name)
    assert (value.__doc__ or "").strip()
    if not inspect.isclass(value):
        return
    for member, function in inspect.getmembers(value):
        if member.startswith("_") or not (inspect.isfunction(function) or isinstance(function, property)):
            continue
        home = inspect.getmodule(function.fget if isinstance(function, property) else function)
        if home is not None and home.__name__.startswith("tenuto."):
            assert (function.__doc__ or "").strip(), f"{name}.{member} has no docstring"


def test_every_module_names_its_state() -> None:
    for path in HERE.glob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text("utf-8"))), path.name


def test_only_the_client_imports_httpx() -> None:
    importers = set()
    for path in HERE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.partition(".")[0] in ("httpx", "httpx2") for name in names):
                importers.add(path.name)
    assert importers == {"client.py"}


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_import_is_light() -> None:
    code = "import time; t = time.perf_counter(); import tenuto; print(time.perf_counter() - t)"
    assert min(float(_python(code)) for _ in range(3)) < 0.3
    loaded = _python("import tenuto, sys; tenuto.connect; tenuto.wrap; print(*sys.modules)").split()
    assert not {"torch", "tenuto_server", "tenuto_kernels", "openai", "fastapi"} & set(loaded)


def test_forecaster_and_plugin_import_no_pydantic() -> None:
    for module in ("tenuto.forecast", "tenuto.trace", "tenuto.prefix", "tenuto.testing"):
        loaded = _python(f"import {module}, sys; print(*sys.modules)").split()
        assert not {"pydantic", "httpx", "torch"} & set(loaded), module
