"""The ``tenuto`` command, run as a user runs it."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from tenuto import __main__ as command


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tenuto", *args], capture_output=True, text=True, check=False)


def test_help_is_fast_and_lists_commands() -> None:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        done = run("--help")
        times.append(time.perf_counter() - start)
        assert done.returncode == 0
    assert min(times) < 1.0
    for line in ("usage: tenuto <command> [options]", "serve", "start the inference server"):
        assert line in done.stdout


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from tenuto.__main__ import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert not {"torch", "pydantic", "httpx", "tenuto_server"} & loaded


def test_version() -> None:
    assert run("--version").stdout.strip() == "tenuto 0.1.0"


def test_unknown_command() -> None:
    done = run("frobnicate")
    assert done.returncode == 2
    assert "no command 'frobnicate'" in done.stderr


@pytest.fixture
def point(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Registers one entry point in place of the installed ones."""

    def register(name: str, value: str) -> None:
        found = EntryPoint(name, value, command.GROUP)
        monkeypatch.setattr(command, "entry_points", lambda group: [found])

    return register


def test_missing_extra_is_named(point: Any, capsys: pytest.CaptureFixture[str]) -> None:
    point("serve", "a_module_nobody_has.commands:serve")
    assert command.main(["serve"]) == 2
    said = capsys.readouterr().err
    assert "needs the module 'a_module_nobody_has'" in said
    assert "pip install 'tenuto[server]'" in said


def test_commands_of_others(point: Any, capsys: pytest.CaptureFixture[str]) -> None:
    point("theirs", "a_module_nobody_has:main")
    assert command.main(["theirs"]) == 2
    assert "which is not installed" in capsys.readouterr().err
    assert command.main([]) == 0
    assert "a_module_nobody_has:main" in capsys.readouterr().out


def test_command_gets_its_arguments_and_gives_the_status(
    point: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[str]] = []

    def echo(args: list[str]) -> int | None:
        seen.append(args)
        if args == ["interrupt"]:
            raise KeyboardInterrupt
        if args == ["lacks"]:
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return 3 if args else None

    monkeypatch.setattr(command, "echo", echo, raising=False)
    point("demo", "tenuto.__main__:echo")
    assert command.main(["demo"]) == 0
    assert command.main(["demo", "--x", "1"]) == 3
    assert command.main(["demo", "interrupt"]) == 130
    assert command.main(["demo", "lacks"]) == 2
    assert "tenuto[server]" in capsys.readouterr().err
    assert seen[:2] == [[], ["--x", "1"]]


def test_entry_point_that_leads_nowhere(point: Any, capsys: pytest.CaptureFixture[str]) -> None:
    point("demo", "tenuto.errors:nothing_here")
    assert command.main(["demo"]) == 2
    assert "does not provide tenuto.errors:nothing_here" in capsys.readouterr().err
    point("demo", "tenuto.no_such_module:demo")
    assert command.main(["demo"]) == 2
    assert "does not provide tenuto.no_such_module" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tenuto", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()  # long before anything is printed
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (1, "")
