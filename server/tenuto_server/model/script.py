"""What a scripted model answers: rules over the last message of a conversation. ``Script`` owns the parsed rules.

A script is a JSON file, a list of rules or an object with ``rules``; the first rule that fits answers:

    {"when": "fix (?P<file>\\S+)", "role": "user", "step": 0,
     "reasoning": "...", "say": "I read ${file}.", "tool_call": {"name": "read", "arguments": {"path": "${file}"}}}

``when``: a regular expression searched in the last user or tool message (default: any). ``role``: only if that message is
the user's or a tool's. ``step``: only after so many answers since the user spoke. ``reasoning``, ``say``, ``tool_call`` (one
or a list): the answer, in that order; ``${1}`` or ``${name}`` stands for a group of the match. ``arguments`` may be a string
with JSON in it. A rule whose tools the client did not offer does not fit. ``stop``: "stop" or "length" (the answer repeats
until the client's limit).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from tenuto_server.errors import ModelError

_KEYS = frozenset({"when", "role", "step", "reasoning", "say", "tool_call", "stop"})
NO_RULE = "No rule of the script fits this message."


@dataclass(frozen=True, slots=True)
class Said:
    """What a rule is matched against. ``tools``: names of the tools on offer. ``step``: answers since the user spoke."""

    role: str
    text: str
    step: int = 0
    tools: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ScriptedAnswer:
    """``text``: with its reasoning and tool calls as the template writes them. ``endless``: it repeats."""

    text: str
    endless: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule; see the module."""

    when: re.Pattern[str]
    role: Literal["user", "tool"] | None
    step: int | None
    reasoning: str
    say: str
    tool_calls: tuple[Mapping[str, Any], ...]
    endless: bool

    def answer(self, said: Said) -> ScriptedAnswer | None:
        """The answer to what was said; None if the rule does not fit."""
        if self.role not in (None, said.role) or self.step not in (None, said.step):
            return None
        match = self.when.search(said.text)
        if match is None:
            return None
        calls = [_call(call, match) for call in self.tool_calls]
        if any(call["name"] not in said.tools for call in calls):
            return None
        reasoning, say = _filled(self.reasoning, match), _filled(self.say, match)
        parts = [f"<think>\n{reasoning}\n</think>\n\n"] if reasoning else []
        written = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
        parts.append("\n".join(([say] if say else []) + written))
        return ScriptedAnswer("".join(parts), self.endless)


class Script:
    """``prefill_tokens_per_s`` (of a script that is an object): how fast the model pretends to read; None: at once."""

    def __init__(self, rules: Sequence[Rule], prefill_tokens_per_s: float | None = None) -> None:
        self.rules, self.prefill_tokens_per_s = tuple(rules), prefill_tokens_per_s

    def answer(self, said: Said) -> ScriptedAnswer:
        """The answer of the first rule that fits."""
        for rule in self.rules:
            if (answer := rule.answer(said)) is not None:
                return answer
        return ScriptedAnswer(NO_RULE)


def read_script(path: Path | None) -> Script:
    """The script of a file; None: one that calls what it is asked to call (``call NAME {...}``) and else repeats what was
    said. Raises ``ModelError`` naming the rule and the field."""
    if path is None:
        return parse_script(_DEFAULT, "the default script")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the script {path.name}: {error}") from None
    return parse_script(raw, f"script {path.name}")


def parse_script(raw: Any, name: str = "script") -> Script:
    """A script from parsed JSON. Raises ``ModelError``."""
    speed = raw.get("prefill_tokens_per_s") if isinstance(raw, dict) else None
    if speed is not None and not (isinstance(speed, (int, float)) and speed > 0):
        raise ModelError(f"{name}: prefill_tokens_per_s must be a positive number")
    rules = raw.get("rules") if isinstance(raw, dict) else raw
    if not isinstance(rules, list):
        raise ModelError(f"{name}: expected a list of rules")
    return Script([_rule(rule, f"{name}: rules[{index}]") for index, rule in enumerate(rules)], speed)


def _rule(raw: Any, where: str) -> Rule:
    if not isinstance(raw, dict):
        raise ModelError(f"{where}: expected an object")
    if unknown := sorted(set(raw) - _KEYS):
        raise ModelError(f"{where}: unknown field {unknown[0]!r}; known: {', '.join(sorted(_KEYS))}")
    for key in ("when", "reasoning", "say"):
        if not isinstance(raw.get(key, ""), str):
            raise ModelError(f"{where}.{key}: expected a string")
    try:
        when = re.compile(raw.get("when", ""))
    except re.error as error:
        raise ModelError(f"{where}.when: {error}") from None
    role, step, stop = raw.get("role"), raw.get("step"), raw.get("stop", "stop")
    if role not in (None, "user", "tool"):
        raise ModelError(f"{where}.role: expected user or tool")
    if step is not None and type(step) is not int:
        raise ModelError(f"{where}.step: expected a number of answers")
    if stop not in ("stop", "length"):
        raise ModelError(f"{where}.stop: expected stop or length")
    calls = raw.get("tool_call", [])
    calls = calls if isinstance(calls, list) else [calls]
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ModelError(f"{where}.tool_call: expected name and arguments")
        if not isinstance(call.get("arguments", {}), (dict, str)):
            raise ModelError(f"{where}.tool_call.arguments: expected an object")
    said, reasoning = raw.get("say", ""), raw.get("reasoning", "")
    return Rule(when, cast(Any, role), step, reasoning, said, tuple(calls), stop == "length")


def _call(call: Mapping[str, Any], match: re.Match[str]) -> dict[str, Any]:
    arguments = _filled(call.get("arguments", {}), match)
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {"input": arguments}
    return {"name": _filled(call["name"], match), "arguments": arguments}


def _filled(value: Any, match: re.Match[str]) -> Any:
    """``value`` with the match's groups put in, wherever it holds text."""
    if isinstance(value, str):
        return re.sub(r"\$\{(\w+)\}", lambda found: _group(found, match), value)
    if isinstance(value, dict):
        return {key: _filled(item, match) for key, item in value.items()}
    return [_filled(item, match) for item in value] if isinstance(value, list) else value


def _group(found: re.Match[str], match: re.Match[str]) -> str:
    try:
        return match[int(found[1]) if found[1].isdigit() else found[1]] or ""
    except IndexError:  # not a group: a shell variable, say
        return found[0]


_DEFAULT = [
    {"role": "tool", "when": r"(?s)^\s*(.{0,200})", "say": "The tool answered: ${1}"},
    {
        "when": r"(?s)\bcall (?P<name>[\w.-]+) (?P<arguments>\{.*\})",
        "tool_call": {"name": "${name}", "arguments": "${arguments}"},
    },
    {"when": r"(?s)^\s*(.{0,200})", "say": "You said: ${1}"},
]
