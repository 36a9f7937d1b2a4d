"""How each coding agent is pointed at the proxy: environment and command-line overrides, never a file of the user's.

Pure functions. What the user set on the command line or in the environment wins over what is set here, except for the
address and, on a server of one's own, the key: a provider's key must not travel to another server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

LOCAL_KEY = "tenuto"
WORDS_SEARCHED = 6

# Names of commands and packages, as they may stand on a command line (``npx @openai/codex exec``).
_NAMES = {
    "claude": "claude",
    "claude-code": "claude",
    "codex": "codex",
    "opencode": "opencode",
    "opencode-ai": "opencode",
    "qwen": "qwen",
    "qwen-code": "qwen",
    "gemini": "gemini",
    "gemini-cli": "gemini",
    "aider": "aider",
    "aider-chat": "aider",
    "mini": "mini",
    "mini-swe-agent": "mini",
    "mini-extra": "mini",
    "openhands": "openhands",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """Where an agent is pointed. ``url``: the proxy, without ``/v1``. ``key``, ``model``, ``context`` (tokens): of the
    server behind, where known. ``hosted``: the host name of a provider's own service; None for a server of one's own.
    """

    url: str
    key: str | None = None
    model: str | None = None
    context: int | None = None
    hosted: str | None = None
    hooks: Mapping[str, Any] | None = None

    @property
    def local_key(self) -> str:
        """The key to give to an agent that insists on one."""
        return self.key or LOCAL_KEY


@dataclass(slots=True)
class Start:
    """What to run. ``env``: to set, or to remove where None. ``attended``: a person watches. ``notes``: for stderr."""

    agent: str | None
    argv: list[str]
    at: int
    env: dict[str, str | None] = field(default_factory=dict)
    attended: bool = True
    notes: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> list[str]:
        """What follows the agent's name."""
        return self.argv[self.at + 1 :]

    def has(self, *options: str) -> bool:
        """Whether one of these options is given, as ``--name value`` or ``--name=value``."""
        return any(word == option or word.startswith(f"{option}=") for word in self.arguments for option in options)

    def insert(self, *words: str) -> None:
        """Puts options right behind the agent's name."""
        self.argv[self.at + 1 : self.at + 1] = words


def agent_of(argv: Sequence[str]) -> tuple[str | None, int]:
    """The agent that a command line starts and where its name stands; ``(None, 0)`` for any other command."""
    for position, word in enumerate(argv[:WORDS_SEARCHED]):
        path = PurePath(word)
        # A script is called by the folder of its package: ``node .../@qwen-code/qwen-code/cli.js``.
        candidates = path.parts[:-1][::-1] if path.suffix in (".js", ".mjs", ".cjs") else ()
        for part in (path.name.removesuffix(".cmd").removesuffix(".exe"), *candidates):
            name = _NAMES.get(part.partition("@")[0] or part)
            if name is not None:
                return name, position
    return None, 0


def prepare(argv: Sequence[str], setting: Setting, environ: Mapping[str, str], agent: str | None = None) -> Start:
    """The command line and environment that make an agent use the proxy. ``agent``: where the name does not tell."""
    found, position = agent_of(argv)
    start = Start(agent or found, list(argv), position)
    _RECIPES.get(start.agent or "", _any)(start, setting, environ)
    start.env["TENUTO_HOOK_URL"] = f"{setting.url}/hook"
    return start


def _default(start: Start, environ: Mapping[str, str], name: str, value: str | None) -> None:
    if value is not None and not environ.get(name):
        start.env[name] = value


def _claude(start: Start, setting: Setting, environ: Mapping[str, str]) -> None:
    start.attended = not start.has("-p", "--print")
    start.env["ANTHROPIC_BASE_URL"] = setting.url
    if setting.hosted is None:
        start.env.update(ANTHROPIC_AUTH_TOKEN=setting.local_key, ANTHROPIC_API_KEY=None)
        start.env["CLAUDE_CODE_ATTRIBUTION_HEADER"] = "0"
        _default(start, environ, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1")
        # Side calls and subagents ask for models of their own: all of them have to exist here.
        kinds = ("DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL", "SMALL_FAST_MODEL")
        for name in ("ANTHROPIC_MODEL", *(f"ANTHROPIC_{kind}" for kind in kinds)):
            _default(start, environ, name, setting.model)
        _default(start, environ, "CLAUDE_CODE_SUBAGENT_MODEL", setting.model)
        if setting.context:
            _default(start, environ, "CLAUDE_CODE_MAX_CONTEXT_TOKENS", str(setting.context))
    if setting.hooks is not None:
        if start.has("--settings"):
            start.notes.append("--settings is given: the hooks of this run are left out, traffic tells the rest")
        else:
            start.insert("--settings", json.dumps({"hooks": setting.hooks}))


def _codex(start: Start, setting: Setting, environ: Mapping[str, str]) -> None:
    start.attended = "exec" not in start.arguments and "e" not in start.arguments[:1]
    key_name = "TENUTO_API_KEY" if setting.hosted is None else "OPENAI_API_KEY"
    provider = {"name": "Tenuto", "base_url": f"{setting.url}/v1", "env_key": key_name, "wire_api": "responses"}
    inline = ",".join(f"{name}={json.dumps(value)}" for name, value in provider.items())
    options = ["-c", 'model_provider="tenuto"', "-c", f"model_providers.tenuto={{{inline}}}"]
    if setting.hosted is None:
        start.env["TENUTO_API_KEY"] = setting.local_key
        if setting.model and not start.has("-m", "--model"):
            options += ["-c", f"model={json.dumps(setting.model)}"]
        if setting.context:
            limit = int(setting.context * 0.85)
            options += [
                "-c",
                f"model_context_window={setting.context}",
                "-c",
                f"model_auto_compact_token_limit={limit}",
            ]
    start.insert(*options)


def _opencode(start: Start, setting: Setting, environ: Mapping[str, str]) -> None:
    start.attended = start.arguments[:1] != ["run"]
    if setting.hosted is not None:
        provider = "anthropic" if "anthropic" in setting.hosted else "openai"
        config: dict[str, Any] = {"provider": {provider: {"options": {"baseURL": f"{setting.url}/v1"}}}}
    else:
        model = setting.model or "default"
        limit = {"limit": {"context": setting.context, "output": 8192}} if setting.context else {}
        config = {
            "model": f"tenuto/{model}",
            "small_model": f"tenuto/{model}",
            "provider": {
                "tenuto": {
                    "npm": "@ai-sdk/openai-compatible",
                    "name": "Tenuto",
                    "options": {"baseURL": f"{setting.url}/v1", "apiKey": setting.local_key},
                    "models": {model: {"name": model, **limit}},
                }
            },
        }
        _default(start, environ, "OPENCODE_DISABLE_MODELS_FETCH", "1")
    try:
        given = json.loads(environ.get("OPENCODE_CONFIG_CONTENT") or "{}")
    except ValueError:
        given = {}
        start.notes.append("OPENCODE_CONFIG_CONTENT is no JSON and is replaced for this run")
    start.env["OPENCODE_CONFIG_CONTENT"] = json.dumps(_merged(given, config))


def _qwen(start: Start, setting: Setting, environ: Mapping[str, str]) -> None:
    _openai(start, setting, environ)
    _default(start, environ, "OPENAI_MODEL", setting.model)
    words = start.arguments
    start.attended = not (start.has("-p", "--prompt") or (bool(words) and not words[-1].startswith("-")))
    if not start.has("--auth-type"):
        start.insert("--auth-type", "openai")


def _gemini(start: Start, setting: Setting, environ: Mapping[str, str]) -> None:
    start.attended = not start.has("-p", "--prompt")
    start.env["GOOGLE_GEMINI_BASE_URL"] = setting.url
    if setting.hosted is None:
        start.env["GEMINI_API_KEY"] = setting.local_key
        start.notes.append("Gemini CLI speaks only the Gemini dialect: the server behind has to understand it")


def _aider(start: Start, setting: Setting, environ: Mapping[str, str]) -> None:
    _openai(start, setting, environ)
    start.env["ANTHROPIC_API_BASE"] = setting.url
    start.attended = not start.has("--message", "-m", "--message-file", "-f")
    if setting.hosted is None:
        _default(start, environ, "LITELLM_LOCAL_MODEL_COST_MAP", "True")
        _default(start, environ, "AIDER_SHOW_MODEL_WARNINGS", "false")
        if setting.model and not start.has("--model"):
            _default(start, environ, "AIDER_MODEL", f"openai/{setting.model}")


def _mini(start: Start, setting: Setting, environ: Mapping[str, str]) -> None:
    _openai(start, setting, environ)
    start.attended = not start.has("-y", "--yolo")
    start.env["ANTHROPIC_API_BASE"] = setting.url
    _default(start, environ, "MSWEA_CONFIGURED", "true")
    if setting.hosted is None:
        _default(start, environ, "MSWEA_COST_TRACKING", "ignore_errors")
        _default(start, environ, "LITELLM_LOCAL_MODEL_COST_MAP", "True")
        if setting.model and not start.has("-m", "--model"):
            _default(start, environ, "MSWEA_MODEL_NAME", f"openai/{setting.model}")


def _openhands(start: Start, setting: Setting, environ: Mapping[str, str]) -> None:
    _openai(start, setting, environ)
    start.attended = not start.has("--headless")
    start.env["LLM_BASE_URL"] = f"{setting.url}/v1"
    if setting.hosted is None:
        start.env["LLM_API_KEY"] = setting.local_key
        _default(start, environ, "LLM_MODEL", f"openai/{setting.model}" if setting.model else None)


def _any(start: Start, setting: Setting, environ: Mapping[str, str]) -> None:
    """A program that nothing is known of: the variables that SDKs of both dialects read."""
    start.attended = False
    _openai(start, setting, environ)
    start.env["ANTHROPIC_BASE_URL"] = start.env["ANTHROPIC_API_BASE"] = setting.url
    start.env["TENUTO_BASE_URL"] = setting.url
    if setting.hosted is None:
        start.env["ANTHROPIC_API_KEY"] = setting.local_key
        start.env["ANTHROPIC_AUTH_TOKEN"] = None


def _openai(start: Start, setting: Setting, environ: Mapping[str, str]) -> None:
    start.env["OPENAI_BASE_URL"] = start.env["OPENAI_API_BASE"] = f"{setting.url}/v1"
    if setting.hosted is None:
        start.env["OPENAI_API_KEY"] = setting.local_key


def _merged(base: Any, over: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return {**base, **{name: _merged(base.get(name), value) for name, value in over.items()}}


_RECIPES: dict[str, Callable[[Start, Setting, Mapping[str, str]], None]] = {
    "claude": _claude,
    "codex": _codex,
    "opencode": _opencode,
    "qwen": _qwen,
    "gemini": _gemini,
    "aider": _aider,
    "mini": _mini,
    "openhands": _openhands,
}
