"""A model's own chat template, rendered the way its authors tested it.

Owns the compiled template. Templates come from model files, so they run in jinja2's immutable sandbox and see nothing but
plain JSON data; the environment (block trimming, ``tojson``, ``raise_exception``, ``strftime_now``, loop controls, the
``generation`` tag) is the one that transformers documents for chat templates, and output is equal to its output.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tenuto_server.errors import ModelError, TenutoServerError


class ChatTemplateError(TenutoServerError):
    """The template refused these messages (its own words are the message), or it is missing or broken."""


class ChatTemplate:
    """``tokens`` are the names a template may print, such as ``bos_token`` and ``eos_token``. ``tool_source`` replaces
    ``source`` when tools are given, for models that ship two templates. Safe to share between threads."""

    def __init__(self, source: str | None, tokens: Mapping[str, str] | None = None, tool_source: str | None = None):
        self.source, self.tool_source = source, tool_source
        self._tokens = dict(tokens or {})
        self._plain = None if source is None else _compile(source)
        self._with_tools = self._plain if tool_source is None else _compile(tool_source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text. ``messages`` are dictionaries of JSON values as in the chat API (tool-call arguments already
        parsed); ``tools`` are function schemas; ``variables`` reach the template by name (``enable_thinking=False``).

        Raises ``ChatTemplateError`` with the template's own message.
        """
        template = self._with_tools if tools else self._plain
        if template is None:
            raise ChatTemplateError("this model has no chat template; use the completions endpoint")
        try:
            return template.render(
                **self._tokens,
                **_plain(variables),
                messages=[_message(m) for m in messages],
                tools=_plain(list(tools)) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        # Whatever a template runs into (its own refusal, a missing field, a wrong type, endless recursion) is an answer
        # to the caller about these messages, never a reason to fail the server.
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise ChatTemplateError(str(error) or type(error).__name__) from error
        except (RecursionError, MemoryError, AssertionError) as error:
            raise ChatTemplateError(f"the chat template failed: {type(error).__name__}") from error


def chat_template_from_folder(folder: Path) -> ChatTemplate:
    """Read ``chat_template.jinja`` or ``tokenizer_config.json`` of a Hugging Face folder."""
    config: dict[str, Any] = {}
    if (path := folder / "tokenizer_config.json").exists():
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelError(f"tokenizer_config.json is not JSON: {error}") from None
    template = config.get("chat_template")
    if (path := folder / "chat_template.jinja").exists():
        template = path.read_text(encoding="utf-8")
    named = {t["name"]: t["template"] for t in template} if isinstance(template, list) else {"default": template}
    return ChatTemplate(named.get("default"), token_names(config), named.get("tool_use"))


def token_names(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The ``*_token`` entries of tokenizer_config.json as strings (they may be objects with a ``content``)."""
    names: dict[str, str] = {}
    for key, value in tokenizer_config.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if key.endswith("_token") and isinstance(text, str):
            names[key] = text
    return names


class _Namespace(jinja2.utils.Namespace):
    """``namespace()`` without underscore names: storing one of those is a known way out of the sandbox."""

    def __init__(*arguments: Any, **attributes: Any) -> None:
        this, *sources = arguments
        values = dict(*sources, **attributes)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(this, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.TemplateError(f"a chat template may not store {name!r} in a namespace")


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}``: marks assistant text for training; at inference it prints its body."""

    tags = {"generation"}  # noqa: RUF012 (the attribute is jinja2's)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["namespace"] = _Namespace
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _compile(source: str) -> jinja2.Template:
    try:
        return _ENVIRONMENT.from_string(source)
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"the model's chat template is not valid: {error}") from None


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Not jinja2's own filter: that one escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _plain(value: Any) -> Any:
    """``value`` rebuilt from exact JSON types, so that a template can reach no method of a richer object."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    raise ChatTemplateError(f"a chat message holds a {type(value).__name__}, which is not a JSON value")


_REASONING = ("reasoning_content", "thinking", "reasoning")


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: no null fields (``content: null`` beside tool calls would print "None"), and the
    reasoning text under both of its common names."""
    plain = {key: value for key, value in _plain(message).items() if value is not None}
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    if reasoning is None:
        return plain
    return {"thinking": reasoning, **plain, "reasoning_content": reasoning}


_ENVIRONMENT = _environment()
