"""Style as a test: who may import what, how long files may be, and what must not be in the project."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SERVER = "tenuto_server"

# What each package of ours may import of ours (prefixes), and what none of its files may import from outside.
# "!": exceptions by file name.
ALLOWED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tenuto": (("tenuto",), ("torch", "numpy", "triton", "fastapi", "uvicorn")),
    "tenuto_kernels": (("tenuto_kernels",), ("fastapi", "pydantic", "httpx")),
    "tenuto_server.policy": (
        ("tenuto.wire", "tenuto.forecast", "tenuto_server.policy"),
        ("torch", "time", "asyncio", "threading", "numpy"),
    ),
    "tenuto_server.cache": (
        ("tenuto_server.cache", "tenuto_server.errors", "tenuto_server.config"),
        ("torch", "time", "asyncio", "threading"),
    ),
    "tenuto_server.engine": (
        (
            "tenuto.wire",
            "tenuto_server.engine",
            "tenuto_server.cache",
            "tenuto_server.policy",
            "tenuto_server.config",
            "tenuto_server.errors",
            "tenuto_server.clock",
        ),
        ("torch", "asyncio"),
    ),
    "tenuto_server.runtime": (
        (
            "tenuto_server.runtime",
            "tenuto_server.model",
            "tenuto_server.engine.plan",
            "tenuto_server.engine.events",
            "tenuto_server.config",
            "tenuto_server.errors",
            "tenuto_server.clock",
            "tenuto_kernels",
        ),
        ("fastapi", "asyncio"),
    ),
    "tenuto_server.model": (
        ("tenuto_server.model", "tenuto_server.errors", "tenuto_kernels"),
        ("fastapi", "asyncio", "transformers"),
    ),
    "tenuto_server.sim": (
        (
            "tenuto_server.sim",
            "tenuto_server.engine",
            "tenuto_server.cache",
            "tenuto_server.policy",
            "tenuto_server.config",
            "tenuto_server.errors",
            "tenuto.trace",
            "tenuto.forecast",
            "tenuto.wire",
        ),
        ("torch", "asyncio"),
    ),
    "tenuto_server.api": (
        (
            "tenuto_server.api",
            "tenuto_server.engine",
            "tenuto_server.model.tokenizer",
            "tenuto_server.model.chat",
            "tenuto_server.config",
            "tenuto_server.errors",
            "tenuto_server.telemetry",
            "tenuto_server.clock",
            "tenuto.wire",
            "tenuto.headers",
        ),
        ("torch",),
    ),
    "tenuto_server.parity": (
        (
            "tenuto_server.parity",
            "tenuto_server.sim",
            "tenuto_server.engine",
            "tenuto_server.cache.identity",
            "tenuto_server.policy",
            "tenuto_server.runtime",
            "tenuto_server.model.load",
            "tenuto_server.config",
            "tenuto_server.errors",
        ),
        ("fastapi", "asyncio"),
    ),
    "tenuto_server.bench": (
        (
            "tenuto_server.bench",
            "tenuto_server.sim",
            "tenuto_server.api",
            "tenuto_server.model",
            "tenuto_server.config",
            "tenuto_server.errors",
            "tenuto",
            "tenuto_kernels",
        ),
        (),
    ),
}
ONLY_IN = {
    "httpx": ("harness/tenuto/client.py", "harness/tenuto/proxy/"),
    "time": ("server/tenuto_server/engine/loop.py",),
    "threading": ("server/tenuto_server/engine/loop.py",),
}
LINES_MAX = 500
FUNCTION_LINES_MAX = 75


def sources() -> list[Path]:
    folders = ("harness", "server", "kernels")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> list[tuple[str, bool]]:
    """Every imported module, and whether only type checkers see it."""
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, typing_only: bool) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            typing_only = True
        if isinstance(node, ast.Import):
            found.extend((alias.name, typing_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append((node.module, typing_only))
            if node.module in ("tenuto", "tenuto_server", "tenuto_kernels"):
                found.extend((f"{node.module}.{alias.name}", typing_only) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child, typing_only)

    visit(ast.parse(path.read_text()), False)
    return found


def under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports(package: str) -> None:
    """The table of docs/architecture.md."""
    ours, banned = ALLOWED[package]
    wrong = []
    for path in sources():
        module = module_of(path)
        if not under(module, package):
            continue
        where = path.relative_to(ROOT).as_posix()
        for name, typing_only in imports(path):
            root = name.split(".")[0]
            if root in ("tenuto", "tenuto_server", "tenuto_kernels"):
                bare = name in ("tenuto", "tenuto_server", "tenuto_kernels") and name != package
                if not any(under(name, prefix) for prefix in ours) and not bare:
                    wrong.append(f"{where}: {name}")
            elif root in banned and not typing_only:
                wrong.append(f"{where}: {name}")
            elif root in ONLY_IN and package in ("tenuto", "tenuto_server.engine") and not typing_only:
                fits = any(where.startswith(allowed) for allowed in ONLY_IN[root])
                if not fits and (root == "httpx") == (package == "tenuto"):
                    wrong.append(f"{where}: {name}")
    assert not wrong, "\n".join(wrong)


def test_sizes() -> None:
    """A file is one idea; a function fits on a screen."""
    wrong = []
    for path in sources():
        text = path.read_text()
        where = path.relative_to(ROOT).as_posix()
        if text.count("\n") > LINES_MAX:
            wrong.append(f"{where}: {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    wrong.append(f"{where}: {node.name} has {lines} lines")
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_is() -> None:
    missing = [p.relative_to(ROOT).as_posix() for p in sources() if not ast.get_docstring(ast.parse(p.read_text()))]
    assert not missing


def test_no_machine_paths_and_no_registry_hosts() -> None:
    """The project speaks of itself alone."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout: nothing says which files are the project's")
    home, registry = "/" + "root/", "py" + "pi.org"
    wrong = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".txt", "", ".cpp", ".h", ".json") and path.is_file():
            text = path.read_text(errors="replace")
            wrong += [f"{name}: {word}" for word in (home, registry) if word in text]
    assert not wrong, "\n".join(wrong)


def test_lines_of_the_readme() -> None:
    assert (ROOT / "README.md").read_text().count("\n") < 150
