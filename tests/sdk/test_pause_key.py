"""Command lines reduced to program and first argument; expectations written by hand."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.pause_key import PauseKey, _words, split_command


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("pytest tests/ -q", ("pytest", "tests/")),
        ("python -m pytest -x tests/sdk", ("python -m pytest", "tests/sdk")),
        ("/usr/bin/python3.11 -m pip install x", ("python -m pip", "install")),
        ("python3 run.py", ("python3", "run.py")),
        ("git status", ("git", "status")),
        ("git -C repo status", ("git", "repo")),
        ("cd /src/app && git diff | head", ("git", "diff")),
        ("cd /src/app; make test", ("make", "test")),
        ("source .venv/bin/activate && pytest", ("pytest", None)),
        ("source .venv/bin/activate", ("source", ".venv/bin/activate")),
        ("FOO=1 BAR='a b' cargo build --release", ("cargo", "build")),
        ("env FOO=1 cargo test", ("cargo", "test")),
        ("timeout 60 npm test", ("npm", "test")),
        ("timeout -k 5 60 npm test", ("npm", "test")),
        ("sudo -E time ls", ("ls", None)),
        ("uv run pytest tests", ("uv run pytest", "tests")),
        ("uv run python -m mypy src", ("uv run python -m mypy", "src")),
        ("echo 'unclosed", ("echo", "'unclosed")),
        ("./scripts/build.sh all", ("build.sh", "all")),
        ("grep -rn 'a && b' src", ("grep", "a && b")),
        ("export A=1\npytest one", ("pytest", "one")),
        (["bash", "-lc", "cd x && go test ./..."], ("go", "test")),
        (["rg", "--files"], ("rg", None)),
        ("", (None, None)),
        ("&& ;", (None, None)),
    ],
)
def test_split_command(command: str | list[str], expected: tuple[str | None, str | None]) -> None:
    assert split_command(command) == expected


def test_key_from_a_tool_call() -> None:
    assert PauseKey.of("tool", "Bash", arguments={"command": "ls -l src"}) == PauseKey("tool", "Bash", "ls", "src")
    assert PauseKey.of("tool", arguments={"cmd": ["ls"]}) == PauseKey("tool", "bash", "ls", None)
    assert PauseKey.of("tool", "Read", arguments={"path": "a.py"}) == PauseKey("tool", "Read")
    assert PauseKey.of("tool", "x", arguments={"command": 7}) == PauseKey("tool", "x")
    assert PauseKey.of("human") == PauseKey("human")
    # Providers send arguments as JSON text; a custom tool's input is any text.
    assert PauseKey.of("tool", "Bash", arguments='{"command": "ls -l src"}') == PauseKey("tool", "Bash", "ls", "src")
    for text in ("*** Begin Patch", "[1]", "{", "7"):
        assert PauseKey.of("tool", "apply_patch", arguments=text) == PauseKey("tool", "apply_patch")


def test_argument_is_not_printed() -> None:
    assert "hunter2" not in repr(PauseKey.of("tool", command="login hunter2"))


@given(st.one_of(st.text(max_size=200), st.lists(st.text(max_size=20), max_size=8)))
def test_never_raises_and_stays_short(command: str | list[str]) -> None:
    key = PauseKey.of("tool", "bash", command=command)
    assert len(key.program or "") <= 64
    assert len(key.argument or "") <= 64


@given(st.text(alphabet="ab -./=~*?&|;()<>\t$#%é", max_size=40))
def test_unquoted_commands_are_split_as_a_shell_would(text: str) -> None:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    assert _words(text) == list(lexer)
