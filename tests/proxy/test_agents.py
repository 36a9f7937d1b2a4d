"""How each agent is started: the environment and options that the recipes of its documentation ask for."""

from __future__ import annotations

import json
import tomllib

import pytest

from tenuto.proxy.agents import Setting, Start, agent_of, prepare

OWN = Setting("http://127.0.0.1:5", key="k", model="qwen3-coder", context=131072)
HOSTED = Setting("http://127.0.0.1:5", hosted="api.anthropic.com")


@pytest.mark.parametrize(
    ("command", "name", "at"),
    [
        ("claude -p hi", "claude", 0),
        ("/opt/bin/codex exec hi", "codex", 0),
        ("npx -y @anthropic-ai/claude-code -p hi", "claude", 2),
        ("npx @openai/codex@0.171.0 exec", "codex", 1),
        ("node /lib/node_modules/@qwen-code/qwen-code/cli.js --yolo", "qwen", 1),
        ("uvx --from aider-chat aider", "aider", 2),
        ("uv run mini -t x", "mini", 2),
        ("python agent.py", None, 0),
        ("python /home/me/claude/agent.py", None, 0),
    ],
)
def test_agents_are_known_by_their_commands(command: str, name: str | None, at: int) -> None:
    assert agent_of(command.split()) == (name, at)


def start(command: str, setting: Setting = OWN, **environ: str) -> Start:
    return prepare(command.split(), setting, environ)


def test_claude_code() -> None:
    made = start("claude -p hi")
    assert made.argv == ["claude", "-p", "hi"]
    assert made.env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:5"
    assert made.env["ANTHROPIC_AUTH_TOKEN"] == "k"
    assert made.env["ANTHROPIC_API_KEY"] is None  # a provider's key does not travel to another server
    assert made.env["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert made.env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "131072"
    models = {value for name, value in made.env.items() if "MODEL" in name}
    assert models == {"qwen3-coder"}
    assert not made.attended
    assert start("claude").attended


def test_what_the_user_set_stays() -> None:
    made = start("claude", ANTHROPIC_MODEL="mine", CLAUDE_CODE_MAX_CONTEXT_TOKENS="5")
    assert not {"ANTHROPIC_MODEL", "CLAUDE_CODE_MAX_CONTEXT_TOKENS"} & set(made.env)
    assert "-c" in start("codex -m mine").argv
    assert not any(word.startswith("model=") for word in start("codex -m mine").argv)
    assert "AIDER_MODEL" not in start("aider --model=openai/mine").env


def test_a_hosted_service_keeps_the_users_key_and_model() -> None:
    made = start("claude", HOSTED)
    assert set(made.env) == {"ANTHROPIC_BASE_URL", "TENUTO_HOOK_URL"}
    assert not any("KEY" in name for name in start("aider", HOSTED).env)


def test_claude_codes_hooks_ride_on_its_command_line() -> None:
    hooks = {"Stop": [{"matcher": "*", "hooks": []}]}
    setting = Setting("http://127.0.0.1:5", hooks=hooks)
    made = start("claude -p hi", setting)
    assert made.argv[:2] == ["claude", "--settings"]
    assert json.loads(made.argv[2]) == {"hooks": hooks}
    assert made.argv[3:] == ["-p", "hi"]
    own = start("claude --settings mine.json", setting)
    assert own.argv == ["claude", "--settings", "mine.json"]
    assert own.notes


def test_codex_gets_a_provider_on_its_command_line() -> None:
    made = start("codex exec fix")
    assert made.argv[0] == "codex"
    assert made.argv[-2:] == ["exec", "fix"]
    pairs = made.argv[1:-2]
    assert pairs[::2] == ["-c"] * (len(pairs) // 2)
    config = tomllib.loads("\n".join(pairs[1::2]))
    assert config["model"] == "qwen3-coder"
    assert config["model_context_window"] == 131072 > config["model_auto_compact_token_limit"]
    assert config["model_providers"][config["model_provider"]] == {
        "name": "Tenuto",
        "base_url": "http://127.0.0.1:5/v1",
        "env_key": "TENUTO_API_KEY",
        "wire_api": "responses",
    }
    assert made.env["TENUTO_API_KEY"] == "k"
    assert not made.attended


def test_opencode_merges_with_what_the_environment_holds() -> None:
    made = start("opencode run fix", OPENCODE_CONFIG_CONTENT='{"share": "disabled", "provider": {"x": {}}}')
    config = json.loads(made.env["OPENCODE_CONFIG_CONTENT"] or "")
    assert config["share"] == "disabled"
    assert config["model"] == config["small_model"] == "tenuto/qwen3-coder"
    assert set(config["provider"]) == {"x", "tenuto"}
    assert config["provider"]["tenuto"]["options"]["baseURL"] == "http://127.0.0.1:5/v1"
    # A model without a limit has no context for opencode, and is never compacted.
    assert config["provider"]["tenuto"]["models"]["qwen3-coder"]["limit"]["context"] == 131072
    hosted = json.loads(start("opencode", HOSTED).env["OPENCODE_CONFIG_CONTENT"] or "")
    assert hosted == {"provider": {"anthropic": {"options": {"baseURL": "http://127.0.0.1:5/v1"}}}}


@pytest.mark.parametrize(
    "command", ["qwen --yolo fix", "aider --message x", "mini -t x -y", "openhands", "python a.py"]
)
def test_clients_of_the_chat_dialect(command: str) -> None:
    made = start(command)
    assert made.env["OPENAI_BASE_URL"] == made.env["OPENAI_API_BASE"] == "http://127.0.0.1:5/v1"
    assert made.env["OPENAI_API_KEY"] == "k"
    assert not made.attended or command == "openhands"


def test_the_models_of_chat_clients() -> None:
    assert start("qwen").env["OPENAI_MODEL"] == "qwen3-coder"
    assert start("qwen").argv == ["qwen", "--auth-type", "openai"]
    assert start("qwen --auth-type gemini").argv == ["qwen", "--auth-type", "gemini"]
    assert start("aider").env["AIDER_MODEL"] == "openai/qwen3-coder"
    assert start("mini -t x").env["MSWEA_MODEL_NAME"] == "openai/qwen3-coder"
    assert start("openhands").env["LLM_BASE_URL"] == "http://127.0.0.1:5/v1"
    assert start("gemini -p x").notes
