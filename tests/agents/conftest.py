"""Real coding agents from their registries, and a real server with a scripted model for them to talk to.

Agents are installed once, into a folder of the user's cache, with the versions that ``package.json`` and ``PYTHON_AGENTS``
name. That is mostly waiting: it begins when the tests are collected, beside all others, and these tests come last. Where it is
not possible (no npm, no network, another platform) their tests are skipped and say why. Every agent runs in a home of its own,
so that nothing of the user's is read or written.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
INSTALL_S = 420.0
RUN_S = 150.0
START_S = 180.0
# Packages, the program, and the oldest Python that they run on.
PYTHON_AGENTS = {
    "mini": (["mini-swe-agent==2.4.6"], "bin/mini", (3, 11)),
    "aider": (["aider-chat==0.86.2"], "bin/aider", (3, 11)),
    "openhands": (["openhands-sdk==1.58.2", "openhands-tools==1.58.2"], "bin/python", (3, 12)),
}
# Where the platform's own program lies, so that no install script of a package has to run.
NATIVE = {
    "claude": "@anthropic-ai/claude-code-linux-x64/claude",
    "codex": ".bin/codex",
    "gemini": "@google/gemini-cli/bundle/gemini.js",
    "opencode": "opencode-linux-x64/bin/opencode",
    "qwen": ".bin/qwen",
}


def cache() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "tenuto" / "agents"


_RUNNING: set[subprocess.Popen[str]] = set()
_PROBLEMS: dict[Path, str] = {}


def installed(commands: list[list[str]], folder: Path, mark: str, text: str) -> str | None:
    """Runs an installation once for each ``text``, at the lowest priority; what went wrong, None for nothing. Whoever else
    wants the same meanwhile waits for it."""
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / f"{mark}.installed"
    digest = hashlib.sha256(text.encode()).hexdigest()
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists() and done.read_text() == digest:
            return None
        if folder in _PROBLEMS:
            return _PROBLEMS[folder]
        for command in commands:
            if (problem := _failed(command, folder)) is not None:
                _PROBLEMS[folder] = problem
                return problem
        done.write_text(digest)
    return None


def _failed(command: list[str], folder: Path) -> str | None:
    words = ["nice", "-n", "19", *command] if shutil.which("nice") else command
    name, pipe = Path(command[0]).name, subprocess.PIPE
    with subprocess.Popen(
        words, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=pipe, text=True
    ) as process:
        _RUNNING.add(process)
        try:
            _, said = process.communicate(timeout=INSTALL_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return f"{name} did not finish within {INSTALL_S:g} s"
        finally:
            _RUNNING.discard(process)
    return f"{name} failed: {said.strip()[-300:]}" if process.returncode else None


def _beside(install: Callable[[], object]) -> None:
    """Installs while other tests run; what goes wrong is told where it is wanted."""
    threading.Thread(target=install, daemon=True).start()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    mine = set(map(id, ours))
    items[:] = [*(item for item in items if id(item) not in mine), *ours]


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly:
        return
    ours = [item for item in session.items if HERE in item.path.parents]
    if NPM and any("node_agents" in getattr(item, "fixturenames", ()) for item in ours):
        _beside(_install_node)
    wanted = {mark.args[0] for item in ours for mark in item.iter_markers("agent")}

    def python_agents() -> None:
        for name in sorted(wanted & _by_default()):
            _install_python(name)

    _beside(python_agents)


def pytest_sessionfinish() -> None:
    for process in list(_RUNNING):
        process.kill()


NPM = shutil.which("npm") if (sys.platform, platform.machine()) == ("linux", "x86_64") else None


def _install_node() -> str | None:
    assert NPM is not None
    folder = cache()
    folder.mkdir(parents=True, exist_ok=True)
    listed = (HERE / "package.json").read_text()
    (folder / "package.json").write_text(listed)
    command = [NPM, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]
    return installed([command], folder, "npm", listed)


@pytest.fixture(scope="session")
def node_agents() -> Path:
    """The folder with the agents' programs."""
    if NPM is None:
        pytest.skip("npm is not installed, or this is not linux-x64, which the agents' programs are named for")
    problem = _install_node()
    if problem is not None:
        pytest.skip(problem)
    return cache() / "node_modules"


def interpreter(oldest: tuple[int, int]) -> str | None:
    """A Python of at least this version."""
    if sys.version_info >= oldest:
        return sys.executable
    for minor in range(oldest[1], oldest[1] + 4):
        found = shutil.which(f"python3.{minor}")
        if found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
            return found
    return None


def _by_default() -> frozenset[str]:
    """The Python agents that are installed for the tests: hundreds of megabytes each."""
    choice = os.environ.get("TENUTO_TEST_PYTHON_AGENTS", "")
    return frozenset({"0": (), "1": PYTHON_AGENTS}.get(choice, ("mini", "aider")))


def _install_python(name: str) -> str | None:
    packages, _, oldest = PYTHON_AGENTS[name]
    python = interpreter(oldest)
    if python is None:
        return f"no Python {oldest[0]}.{oldest[1]} or newer is installed"
    folder = cache() / f"py-{name}"
    made = [python, "-m", "venv", "--clear", "--without-pip", str(folder)]
    target = str(folder / "bin" / "python")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        target,
        "install",
        "-q",
        "--disable-pip-version-check",
        "--no-compile",
    ]
    return installed([made, [*pip, *packages]], folder, "pip", " ".join(packages))


def python_agent(name: str) -> Path:
    """The program of an agent written in Python, in a virtual environment of its own. Installed already, it is always used."""
    packages, program, _ = PYTHON_AGENTS[name]
    found = cache() / f"py-{name}" / program
    if name not in _by_default() and not found.exists():
        pytest.skip(f"{' '.join(packages)} is not installed; TENUTO_TEST_PYTHON_AGENTS=1 installs it into the cache")
    problem = _install_python(name)
    if problem is not None:
        pytest.skip(problem)
    return found


@dataclass(frozen=True)
class Server:
    """A running ``tenuto serve``. ``journal``: the engine's decisions, as they are made."""

    url: str
    journal: Path

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=20) as answer:
            return json.load(answer)

    def tree(self) -> dict[str, dict[str, Any]]:
        return {view["id"]: view for view in self.get("/v1/sessions")["data"]}

    def pauses(self, session: str) -> list[str]:
        """The classes of a session's pauses that have ended, in order."""
        lines = [json.loads(line) for line in self.journal.read_text().splitlines() if line]
        return [x["pause"] for x in lines if x.get("session") == session and "length_s" in x]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    port, journal, log = folder / "port", folder / "journal.jsonl", folder / "log"
    model = f"scripted:{HERE / 'script.json'}"
    words = ["serve", "--model", model, "--port", "0", "--port-file", str(port), "--journal", str(journal)]
    words += ["--device-bytes", "1GiB", "--host-bytes", "256MiB", "--threads", "1"]
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, "-m", "tenuto", *words], stdout=out, stderr=subprocess.STDOUT)
    try:
        give_up = time.monotonic() + START_S
        while not port.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < give_up, log.read_text()
            time.sleep(0.05)
        yield Server(f"http://127.0.0.1:{port.read_text().strip()}", journal)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def run_agent(
    server: Server, command: list[str], home: Path, *, path: list[Path] | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """``tenuto run -- COMMAND`` in a project folder, with a home of its own and nothing of the caller's agents. ``command``
    may begin with options of ``tenuto run`` and ``--``."""
    work = home / "project"
    work.mkdir()
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(
            (
                "ANTHROPIC",
                "CLAUDE",
                "OPENAI",
                "CODEX",
                "QWEN",
                "OPENCODE",
                "AIDER",
                "MSWEA",
                "TENUTO",
                "GEMINI",
                "GOOGLE",
            )
        )
    }
    places = {f"XDG_{kind}_HOME": str(home / f".{kind.lower()}") for kind in ("CONFIG", "DATA", "CACHE", "STATE")}
    search = os.pathsep.join([*(str(p) for p in path or ()), kept.get("PATH", "")])
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "tenuto",
            "run",
            "--upstream",
            server.url,
            *([] if "--" in command else ["--"]),
            *command,
        ],
        env={**kept, **places, "HOME": str(home), "TENUTO_HISTORY": "off", "PATH": search, **env},
        cwd=work,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
