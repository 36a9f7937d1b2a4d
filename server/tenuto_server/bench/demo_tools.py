"""The agents' work folder and their tools: a bounded copy of this project's own sources, and calls that really run.

``WorkFolder`` owns the folder; nothing outside it is written. Tools run one process each (``bash``) or touch one file.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from subprocess import STDOUT
from typing import Any

import anyio

from tenuto_server.bench.workload import Sources, ToolStep

_PARTS = (("tenuto", ""), ("tenuto_server", "policy"), ("tenuto_server", "cache"), ("tenuto_server", "engine"))
_FILES_MAX = 80
_FILE_BYTES_MAX = 60_000
_WORDS = 40
_TOOL_LIMIT_S = 60.0

_TEST_FORECAST = """\
import random
import unittest

from tenuto.forecast import PauseForecaster
from tenuto.pause_key import PauseKey


class ForecastTest(unittest.TestCase):
    def test_learns_the_scale(self):
        chance, forecaster = random.Random(3), PauseForecaster()
        key = PauseKey.of("tool", "bash", command="make all")
        for _ in range(600):
            forecaster.observe(key, chance.lognormvariate(2.0, 0.5))
            if chance.random() < 0.2:
                forecaster.predict(key)
        self.assertLess(abs(forecaster.predict(key).p50_s - 7.4), 2.0)
"""
_TEST_SERVICE = """\
import subprocess
import sys
import time
import unittest
import urllib.request

SERVICE = (
    "import http.server, time; time.sleep(3); "
    "server = http.server.HTTPServer(('127.0.0.1', 0), http.server.SimpleHTTPRequestHandler); "
    "print(server.server_port, flush=True); server.serve_forever()"
)


class ServiceTest(unittest.TestCase):
    def test_it_answers_once_it_is_up(self):
        command = [sys.executable, "-c", SERVICE]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
            port = int(child.stdout.readline())
            try:
                for _ in range(4):
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/sizes.py") as answer:
                        self.assertEqual(answer.status, 200)
                    time.sleep(0.5)
            finally:
                child.terminate()
"""
_TEST_COMMAND = """\
import unittest

from tenuto.pause_key import split_command


class CommandTest(unittest.TestCase):
    def test_programs(self):
        for _ in range(500):
            self.assertEqual(split_command("cd x && timeout 5 python -m pytest -q tests"), ("python -m pytest", "tests"))
            self.assertEqual(split_command("grep -rn word src")[0], "grep")
"""
_SCRIPT_NAMES = """\
import ast
import collections
import pathlib

names = collections.Counter()
for path in sorted(pathlib.Path(".").rglob("*.py")):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Name):
            names[node.id] += 1
for name, count in names.most_common(12):
    print(count, name)
"""
_SCRIPT_RATE = """\
import time

from tenuto.forecast import PauseForecaster
from tenuto.pause_key import PauseKey

key, forecaster, count, took = PauseKey.of("tool", "bash", command="make"), PauseForecaster(), 0, 0.0
end = time.perf_counter() + 6.0
while time.perf_counter() < end:
    began = time.perf_counter()
    forecaster.predict(key)
    took, count = took + time.perf_counter() - began, count + 1
    time.sleep(0.1)
print(f"{count} forecasts, {1000 * took / count:.2f} ms each, over 6 s")
"""
_SCRIPT_SIZES = """\
import pathlib

rows = [(path.read_text("utf-8").count("\\n"), path) for path in pathlib.Path(".").rglob("*.py")]
for lines, path in sorted(rows, reverse=True)[:10]:
    print(lines, path)
"""
_TESTS = {"test_forecast.py": _TEST_FORECAST, "test_service.py": _TEST_SERVICE, "test_command.py": _TEST_COMMAND}
_SCRIPTS = {"names.py": _SCRIPT_NAMES, "rate.py": _SCRIPT_RATE, "sizes.py": _SCRIPT_SIZES}
_SLOW = ("test_forecast.py", "test_service.py", "rate.py")
_AFTER_EDIT = "python -m pytest -q test_command.py"

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {field: {"type": kind} for field, kind in fields.items()},
                "required": list(fields),
            },
        },
    }
    for name, description, fields in (
        ("bash", "Run a command in the repository and return what it printed.", {"command": "string"}),
        ("read_file", "Read some lines of a file.", {"path": "string", "line": "integer", "count": "integer"}),
        ("edit_file", "Append a line to a file and run the quick tests.", {"path": "string", "append": "string"}),
        ("task", "Have subagents look into questions side by side.", {"questions": "string"}),
    )
]


class WorkFolder:
    """A copy of the sources in ``root``, which must be empty or absent. ``output_chars``: cut of a tool's output.

    Raises ``OSError`` when it cannot be written.
    """

    def __init__(self, root: Path, output_chars: int) -> None:
        self.root = root
        self.output_chars = output_chars
        root.mkdir(parents=True, exist_ok=True)
        copied = 0
        for package, part in _PARTS:
            source = _package(package)
            for path in sorted((source / part).glob("*.py")):
                if copied < _FILES_MAX and path.stat().st_size <= _FILE_BYTES_MAX:
                    target = root / package / path.relative_to(source)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, target)
                    copied += 1
        for name, text in {**_TESTS, **_SCRIPTS}.items():
            (root / name).write_text(text, "utf-8")
        (root / "pytest.ini").write_text("[pytest]\n", "utf-8")

    def sources(self, *, slow: bool = True) -> Sources:
        """What a plan may name; ``slow`` False leaves out tests and scripts that take seconds."""
        files, words = [], Counter[str]()
        for path in sorted(self.root.rglob("*.py")):
            text = path.read_text("utf-8")
            if path.parent != self.root:
                files.append((path.relative_to(self.root).as_posix(), text.count("\n")))
                words.update(set(re.findall(r"\b[a-z]{4,12}_[a-z]{3,12}\b", text)))
        usual = sorted(words, key=lambda word: (-words[word], word))[:_WORDS]
        tests, scripts = (tuple(name for name in names if slow or name not in _SLOW) for names in (_TESTS, _SCRIPTS))
        return Sources(tuple(files), tests, scripts, tuple(usual))

    def excerpt(self, path: str, first: int, chars: int) -> str:
        """Source lines from line ``first`` (1-based), cut at ``chars`` characters."""
        lines = (self.root / path).read_text("utf-8").splitlines()
        return "\n".join(lines[first - 1 :])[:chars]

    async def run(self, step: ToolStep) -> str:
        """Runs a tool call and returns its output, cut; a failure is output like any other."""
        given = step.arguments
        match step.tool:
            case "bash":
                text = await self._command(str(given["command"]))
            case "read_file":
                text = await anyio.to_thread.run_sync(self._read, given["path"], given["line"], given["count"])
            case "edit_file":
                done = await anyio.to_thread.run_sync(self._append, given["path"], given["append"])
                text = f"{done}; quick tests:\n{await self._command(_AFTER_EDIT)}"
            case other:
                raise ValueError(f"no tool {other!r}")
        return text[: self.output_chars] or "(no output)"

    async def _command(self, command: str) -> str:
        words = command.split()
        if words[0] == "python":
            words[0] = sys.executable
        if words[1:3] == ["-m", "pytest"]:
            if importlib.util.find_spec("pytest") is None:
                words[2:] = ["unittest", *(word for word in words[3:] if word != "-q")]
            else:
                words[3:3] = ["-p", "no:cacheprovider"]
        elif words[0] == "grep":
            words[1:1] = ["--include=*.py"]
        with anyio.move_on_after(_TOOL_LIMIT_S):
            done = await anyio.run_process(
                words, cwd=self.root, stderr=STDOUT, check=False, env={"PATH": _path(), "PYTHONDONTWRITEBYTECODE": "1"}
            )
            return done.stdout.decode("utf-8", "replace").replace(str(self.root), ".").strip()
        return f"timed out after {_TOOL_LIMIT_S:g} s"

    def _read(self, path: str, line: int, count: int) -> str:
        lines = (self.root / path).read_text("utf-8").splitlines()[line - 1 : line - 1 + count]
        return "\n".join(f"{line + n}\t{text}" for n, text in enumerate(lines))

    def _append(self, path: str, text: str) -> str:
        with (self.root / path).open("a", encoding="utf-8") as file:
            file.write(text + "\n")
        return f"appended 1 line to {path}"


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def _path() -> str:
    return os.environ.get("PATH", os.defpath)
