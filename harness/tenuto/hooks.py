"""``tenuto hooks install|uninstall``: puts Tenuto's hooks into a coding agent's own settings, and takes them out again.

Holds no state of its own. The settings file is the agent's: other people's entries are never touched, the file as it was
is kept beside it, and taking the hooks out gives back exactly that file unless it was edited in the meantime.

Exit status: 0 done or nothing to do, 1 the file cannot be read or written, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenuto import hook_send

DEFAULT_URL = hook_send.DEFAULT_URL
BACKUP_SUFFIX = ".tenuto-backup"
TIMEOUT_S = 5
# How entries of ours are recognised again.
_COMMAND_MARK = "hook_send.py"
_URL_MARK = "from=tenuto"


class SettingsError(ValueError):
    """A settings file that cannot be changed safely; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Agent:
    """Where an agent keeps hooks and which events are worth one. ``http``: it can post events itself, except those in
    ``command_only``. ``tool_events``: those that traffic shows as well."""

    name: str
    home: str
    home_variable: str | None
    file: str
    events: tuple[str, ...]
    tool_events: tuple[str, ...]
    http: bool = False
    command_only: tuple[str, ...] = ()
    named: bool = False
    note: str = ""

    def path(self, *, project: bool) -> Path:
        """The settings file of the user, or of the project in the working folder."""
        if project:
            return Path.cwd() / self.home / self.file
        given = os.environ.get(self.home_variable) if self.home_variable else None
        return (Path(given) if given else Path.home() / self.home) / self.file


_SHARED = ("UserPromptSubmit", "Stop", "SubagentStart", "SubagentStop", "PreCompact", "PostCompact", "SessionEnd")
_TOOLS = ("PreToolUse", "PostToolUse")
AGENTS = {
    agent.name: agent
    for agent in (
        Agent(
            "claude",
            ".claude",
            "CLAUDE_CONFIG_DIR",
            "settings.json",
            ("SessionStart", "PermissionRequest", "Notification", *_SHARED),
            _TOOLS,
            http=True,
            # The first is not delivered over HTTP; a failure of the second is told to the user, as where no proxy runs.
            command_only=("SessionStart", "SessionEnd"),
        ),
        Agent(
            "codex",
            ".codex",
            "CODEX_HOME",
            "hooks.json",
            ("SessionStart", "PermissionRequest", *_SHARED),
            _TOOLS,
            note="Codex runs new hooks only after they are reviewed: open it once and use /hooks",
        ),
        Agent("qwen", ".qwen", None, "settings.json", ("SessionStart", "Notification", *_SHARED), _TOOLS, http=True),
        Agent(
            "gemini",
            ".gemini",
            None,
            "settings.json",
            ("SessionStart", "BeforeAgent", "Notification", "AfterAgent", "SessionEnd"),
            ("BeforeTool", "AfterTool"),
            named=True,
        ),
    )
}


def main(argv: list[str]) -> int:
    """``tenuto hooks install AGENT``, ``tenuto hooks uninstall AGENT``."""
    text = "Puts Tenuto's hooks into a coding agent's own settings, or takes them out again; shows the difference."
    parser = argparse.ArgumentParser(prog="tenuto hooks", description=text)
    parser.add_argument("action", choices=("install", "uninstall"))
    parser.add_argument("agent", choices=sorted(AGENTS), help="whose settings")
    parser.add_argument("--uninstall", action="store_true", help="the same as the action of that name")
    parser.add_argument("--dry-run", action="store_true", help="show the difference and change nothing")
    parser.add_argument("--project", action="store_true", help="the settings of the project in this folder")
    parser.add_argument("--url", default=DEFAULT_URL, help="hook address of the proxy; default %(default)s")
    parser.add_argument("--command", action="store_true", help="commands even where the agent can post events itself")
    parser.add_argument(
        "--tool-events", action="store_true", help="also before and after each tool, as traffic shows too"
    )
    args = parser.parse_args(argv)
    agent = AGENTS[args.agent]
    path = agent.path(project=args.project)
    remove = args.uninstall or args.action == "uninstall"
    try:
        before = _read(path)
        ours = {} if remove else hook_table(agent, args.url, command=args.command, tools=args.tool_events)
        after = _removed(path, before) if remove else _installed(before, ours)
        if after == before:
            print(f"{path}: {'no hooks of Tenuto in it' if remove else 'already installed'}")
            return 0
        print(_difference(path, before, after), end="")
        if not args.dry_run:
            _change(path, before, after, remove=remove)
            print(f"{path}: {'removed' if remove else 'installed'}")
            if agent.note and not remove:
                print(agent.note)
    except (SettingsError, OSError) as error:
        print(f"tenuto hooks: {error}", file=sys.stderr)
        return 1
    return 0


def hook_table(
    agent: Agent, url: str, *, command: bool = False, tools: bool = False
) -> dict[str, list[dict[str, Any]]]:
    """Our entries by event, in the agent's own form."""
    table: dict[str, list[dict[str, Any]]] = {}
    for event in agent.events + (agent.tool_events if tools else ()):
        handler: dict[str, Any]
        if agent.http and not command and event not in agent.command_only:
            handler = {"type": "http", "url": f"{url}/{event}?{_URL_MARK}", "timeout": TIMEOUT_S}
        else:
            handler = {"type": "command", "command": send_command(url), "timeout": TIMEOUT_S}
            if agent.named:
                # Gemini CLI counts in milliseconds.
                handler |= {"name": "tenuto", "timeout": TIMEOUT_S * 1000}
        # Of all session starts only a resume says what traffic does not.
        matcher = "resume" if event == "SessionStart" else "*"
        table[event] = [{"matcher": matcher, "hooks": [handler]}]
    return table


def claude_run_hooks(url: str) -> dict[str, list[dict[str, Any]]]:
    """The hooks of one ``tenuto run -- claude``, handed over on its command line."""
    return hook_table(AGENTS["claude"], url)


def send_command(url: str) -> str:
    """The command line that hands an event over: this interpreter, isolated, without site packages."""
    return shlex.join([sys.executable, "-I", "-S", str(Path(hook_send.__file__).resolve()), url])


# -- the settings file --------------------------------------------------------------------------------------------------


def _read(path: Path) -> str | None:
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        raise SettingsError(f"{path} is not UTF-8 text") from None


def _parsed(path: Path | str, text: str | None) -> dict[str, Any]:
    if text is None or not text.strip():
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"{path} is not plain JSON ({error}); hooks have to be added by hand there") from None
    table: dict[str, Any] | None = value if isinstance(value, dict) else None
    hooks = table.get("hooks", {}) if table is not None else None
    if table is None or not isinstance(hooks, dict) or not all(isinstance(entries, list) for entries in hooks.values()):
        raise SettingsError(f"{path} does not hold an object whose 'hooks' are lists by event; nothing is changed")
    return table


def _installed(before: str | None, ours: Mapping[str, Sequence[Any]]) -> str:
    value = _parsed("the settings file", before)
    clean = _without_ours(value)
    hooks = {event: list(entries) for event, entries in clean.get("hooks", {}).items()}
    for event, entries in ours.items():
        hooks[event] = [*hooks.get(event, []), *entries]
    after = {**clean, "hooks": hooks}
    if before is not None and after == value:
        return before
    return json.dumps(after, indent=2, ensure_ascii=False) + "\n"


def _removed(path: Path, before: str | None) -> str | None:
    """The file without our entries: the kept original where nothing else differs from it; None for no file at all."""
    if before is None:
        return None
    value = _parsed(path, before)
    clean = _without_ours(value)
    if clean == value:
        return before
    original = _read(_backup(path))
    if original is None:
        return json.dumps(clean, indent=2, ensure_ascii=False) + "\n" if clean else None
    kept = _parsed(_backup(path), original)
    if _without_empty(kept) == _without_empty(clean):
        return original
    return json.dumps(clean, indent=2, ensure_ascii=False) + "\n"


def _without_ours(value: Mapping[str, Any]) -> dict[str, Any]:
    hooks: dict[str, Any] = {}
    for event, entries in value.get("hooks", {}).items():
        left = [kept for entry in entries for kept in _entry_without_ours(entry)]
        if left or not entries:
            hooks[event] = left
    out = {name: inner for name, inner in value.items() if name != "hooks"}
    if hooks or not value.get("hooks", True):
        out["hooks"] = hooks
    return out


def _entry_without_ours(entry: Any) -> list[Any]:
    """The entry without our handlers, in a list; an empty list where nothing else was in it."""
    handlers = entry.get("hooks") if isinstance(entry, dict) else None
    if not isinstance(handlers, list):
        return [entry]
    left = [handler for handler in handlers if not _is_ours(handler)]
    if left == handlers:
        return [entry]
    return [{**entry, "hooks": left}] if left else []


def _is_ours(handler: Any) -> bool:
    if not isinstance(handler, dict):
        return False
    return _COMMAND_MARK in str(handler.get("command", "")) or _URL_MARK in str(handler.get("url", ""))


def _without_empty(value: Mapping[str, Any]) -> dict[str, Any]:
    hooks = {event: entries for event, entries in value.get("hooks", {}).items() if entries}
    return {**{name: inner for name, inner in value.items() if name != "hooks"}, **({"hooks": hooks} if hooks else {})}


def _backup(path: Path) -> Path:
    return path.with_name(path.name + BACKUP_SUFFIX)


def _difference(path: Path, before: str | None, after: str | None) -> str:
    old, new = (before or "").splitlines(keepends=True), (after or "").splitlines(keepends=True)
    names = ("/dev/null" if before is None else str(path), "/dev/null" if after is None else str(path))
    return "".join(line if line.endswith("\n") else line + "\n" for line in difflib.unified_diff(old, new, *names))


def _change(path: Path, before: str | None, after: str | None, *, remove: bool) -> None:
    backup = _backup(path)
    if not remove and before is None:
        backup.unlink(missing_ok=True)
    elif not remove and before is not None and _without_ours(_parsed(path, before)) == _parsed(path, before):
        _write(backup, before, like=path)  # the file as it was before us, not as a second installation finds it
    if after is None:
        path.unlink()
    else:
        _write(path, after, like=path)
    if remove:
        backup.unlink(missing_ok=True)


def _write(path: Path, text: str, *, like: Path) -> None:
    """Replaces a file in one step; keeps the permissions of ``like``, and follows links as editors do."""
    target = path.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    mode = like.stat().st_mode & 0o777 if like.exists() else 0o600
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        os.chmod(name, mode)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
