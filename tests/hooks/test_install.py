"""``tenuto hooks install`` and ``uninstall`` on settings files as users have them."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto import hooks

FILES = {"claude": ".claude/settings.json", "codex": ".codex/hooks.json", "qwen": ".qwen/settings.json"}
FILES["gemini"] = ".gemini/settings.json"
OWN = {"matcher": "Bash", "hooks": [{"type": "command", "command": "notify-send done"}]}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for name in ("CLAUDE_CONFIG_DIR", "CODEX_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def handlers(table: dict[str, Any], event: str) -> list[dict[str, Any]]:
    return [handler for entry in table["hooks"][event] for handler in entry["hooks"]]


@pytest.mark.parametrize("agent", sorted(FILES))
def test_a_user_without_settings_gets_a_file_and_loses_it_again(
    home: Path, agent: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = home / FILES[agent]
    assert hooks.main(["install", agent]) == 0
    table = json.loads(path.read_text())
    assert "SessionEnd" in table["hooks"]
    shown = capsys.readouterr().out
    assert f"+++ {path}" in shown
    assert '+  "hooks": {' in shown
    before = path.read_bytes()
    assert hooks.main(["install", agent]) == 0
    assert path.read_bytes() == before
    assert "already installed" in capsys.readouterr().out
    assert hooks.main(["uninstall", agent]) == 0
    assert not path.exists()
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("agent", sorted(FILES))
def test_settings_and_foreign_hooks_stay_and_come_back_to_the_byte(home: Path, agent: str) -> None:
    path = home / FILES[agent]
    path.parent.mkdir()
    original = b'{"model":"x",\r\n\t"hooks": {"Stop": [' + json.dumps(OWN).encode() + b'], "Odd": []}}'
    path.write_bytes(original)
    path.chmod(0o640)
    assert hooks.main(["install", agent]) == 0
    table = json.loads(path.read_text())
    assert table["model"] == "x"
    assert table["hooks"]["Stop"][0] == OWN
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert path.with_name(path.name + hooks.BACKUP_SUFFIX).read_bytes() == original
    assert (
        hooks.main(["install", agent, "--url", "http://127.0.0.1:9/hook"]) == 0
    )  # another address: replaced, not doubled
    table = json.loads(path.read_text())
    ours = [h for event in table["hooks"] for h in handlers(table, event) if "127.0.0.1" in json.dumps(h)]
    assert ours
    assert all("127.0.0.1:9/hook" in json.dumps(h) for h in ours)
    assert hooks.main(["install", agent, "--uninstall"]) == 0
    assert path.read_bytes() == original
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_what_the_user_changed_since_is_kept(home: Path) -> None:
    path = home / FILES["claude"]
    path.parent.mkdir()
    path.write_text(json.dumps({"model": "x"}))
    hooks.main(["install", "claude"])
    table = json.loads(path.read_text())
    table["model"] = "y"
    table["hooks"]["Stop"].append(OWN)
    table["hooks"]["Stop"][0]["hooks"].append({"type": "command", "command": "echo mine"})
    path.write_text(json.dumps(table))
    assert hooks.main(["uninstall", "claude"]) == 0
    left = json.loads(path.read_text())
    assert left == {
        "model": "y",
        "hooks": {"Stop": [{"matcher": "*", "hooks": [{"type": "command", "command": "echo mine"}]}, OWN]},
    }


def test_dry_run_shows_and_changes_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hooks.main(["install", "claude", "--dry-run"]) == 0
    assert "hook/Stop" in capsys.readouterr().out
    assert list(home.iterdir()) == []
    assert hooks.main(["uninstall", "claude"]) == 0
    assert "no hooks of Tenuto" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{ // a comment\n}", "[1]", '{"hooks": []}', "\x00"])
def test_a_file_that_cannot_be_understood_is_left_alone(
    home: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = home / FILES["gemini"]
    path.parent.mkdir()
    path.write_text(text)
    assert hooks.main(["install", "gemini"]) == 1
    assert path.read_text() == text
    assert "tenuto hooks:" in capsys.readouterr().err


def test_each_client_gets_what_it_understands() -> None:
    url = "http://127.0.0.1:4040/hook"
    claude = {"hooks": hooks.hook_table(hooks.AGENTS["claude"], url)}
    kinds = {event: handlers(claude, event)[0]["type"] for event in claude["hooks"]}
    assert kinds.pop("SessionStart") == "command"  # not delivered over HTTP by Claude Code
    assert kinds.pop("SessionEnd") == "command"  # a refused connection would be told to the user
    assert set(kinds.values()) == {"http"}
    # Any type but its own makes Codex ignore the whole file.
    codex = {"hooks": hooks.hook_table(hooks.AGENTS["codex"], url, tools=True)}
    assert {h["type"] for event in codex["hooks"] for h in handlers(codex, event)} == {"command"}
    assert {"PreToolUse", "PostToolUse"} <= set(codex["hooks"])
    gemini = {"hooks": hooks.hook_table(hooks.AGENTS["gemini"], url)}
    assert "PreCompress" not in gemini["hooks"]
    assert handlers(gemini, "AfterAgent")[0]["name"] == "tenuto"


def test_other_places(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODEX_HOME", str(tmp_path / "elsewhere"))
    assert hooks.AGENTS["codex"].path(project=False) == tmp_path / "elsewhere" / "hooks.json"
    monkeypatch.chdir(tmp_path)
    assert hooks.AGENTS["claude"].path(project=True) == tmp_path / ".claude" / "settings.json"


JSON = st.recursive(
    st.none() | st.booleans() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["hooks", "matcher", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(
    value=st.dictionaries(st.sampled_from(["model", "x"]), JSON),
    events=st.dictionaries(st.sampled_from(["Stop", "Odd"]), JSON),
)
def test_whatever_the_file_holds_comes_back(value: dict[str, Any], events: dict[str, Any]) -> None:
    import tempfile

    given_text = json.dumps({**value, "hooks": events} if events else value)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "settings.json"
        path.write_text(given_text)
        agent = hooks.Agent("claude", folder, None, "settings.json", ("Stop", "SessionEnd"), ())
        hooks.AGENTS["trial"] = hooks.Agent(**{**{f: getattr(agent, f) for f in agent.__slots__}, "name": "trial"})
        try:
            status = hooks.main(["install", "trial", "--project"])
            if status == 0:
                assert hooks.main(["uninstall", "trial", "--project"]) == 0
            assert path.read_text() == given_text
        finally:
            del hooks.AGENTS["trial"]
