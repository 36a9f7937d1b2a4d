"""Chat templates render byte for byte as transformers renders them, and fail with their own words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tenuto_server.model.chat import ChatTemplate, ChatTemplateError, chat_template_from_folder
from tenuto_server.model.gguf_file import GGUFFile
from tenuto_server.model.toy import TEMPLATE

# Exercises what real templates use: whitespace control, namespaces, loop controls, tool JSON, reasoning, slicing.
RICH = """\
{{- bos_token }}
{%- set ns = namespace(last_user=-1, count=0) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}
{%- endfor %}
{% if tools %}
    {{- '<tools>' }}
    {% for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
        {{- '\\n' + tool | tojson(indent=2) }}
    {% endfor %}
    {{- '</tools>\\n' }}
{% endif %}
{%- for m in messages %}
    {%- if m.role == 'skip' %}{% continue %}{% endif %}
    {%- if m.role == 'assistant' %}
        {%- generation %}
        {{- '[A]' }}
        {%- if m.reasoning_content and loop.index0 > ns.last_user %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
        {%- if m.content is defined %}{{ m.content | trim }}{% endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '<call>' + call.function.name + ' ' + call.function.arguments | tojson + '</call>' }}
        {%- endfor %}
        {%- endgeneration %}
    {%- elif m.content is string %}
        {{- '[' + m.role[:1].upper() + ']' + m.content.split('</x>')[-1].lstrip('\\n') }}
    {%- else %}
        {%- for part in m.content %}{{ part.text }}{% endfor %}
    {%- endif %}
    {{- eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[A]' }}{% if enable_thinking is defined and not enable_thinking %}{{ '(quick)' }}{% endif %}{% endif %}
"""
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "grep", "description": "find <text> & 'more' é", "parameters": {"type": "object", "b": 1}},
    }
]
CALL = {"id": "c1", "type": "function", "function": {"name": "grep", "arguments": {"z": "ü\n", "a": [1, None, True]}}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": " s \n"}, {"role": "user", "content": "</x>\n\nq"}],
    [
        {"role": "user", "content": "run it"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "hm"},
        {"role": "tool", "content": "out\n  indented\n", "tool_call_id": "c1"},
        {"role": "assistant", "content": "  done <|im_end|>  "},
        {"role": "user", "content": "日本語 👩‍👩‍👧 {{ not_a_template }}"},
    ],
]


def reference(source: str, messages: list[dict[str, Any]], tools: Any, prompt: bool, **variables: Any) -> str:
    # apply_chat_template drops null fields before it renders; here that step is written out.
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    rendered, _ = render_jinja_template(
        [messages], tools=tools, chat_template=source, add_generation_prompt=prompt, **TOKENS, **variables
    )
    return str(rendered[0])


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("source", [RICH, TEMPLATE], ids=["rich", "toy"])
def test_rendering_equals_transformers(source: str, tools: Any, prompt: bool) -> None:
    template = ChatTemplate(source, TOKENS)
    for messages in CONVERSATIONS:
        expected = reference(source, messages, tools, prompt)
        assert template.render(messages, tools, add_generation_prompt=prompt) == expected


def test_variables_reach_the_template() -> None:
    messages = CONVERSATIONS[0]
    expected = reference(RICH, messages, None, True, enable_thinking=False)
    assert ChatTemplate(RICH, TOKENS).render(messages, enable_thinking=False) == expected
    assert expected.endswith("(quick)")


@pytest.mark.model
def test_bundled_template_equals_transformers(gguf_path: Path) -> None:
    source = GGUFFile(gguf_path).metadata["tokenizer.chat_template"]
    for messages in (CONVERSATIONS[0], CONVERSATIONS[1]):
        assert ChatTemplate(source).render(messages) == reference(source, messages, None, True)


def test_a_refusal_carries_the_templates_words() -> None:
    with pytest.raises(ChatTemplateError, match="unknown role: judge"):
        ChatTemplate(TEMPLATE).render([{"role": "judge", "content": "?"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[5].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_broken_or_hostile_templates_are_errors_of_the_request(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source).render([{"role": "user", "content": "hi"}])


def test_a_template_sees_only_plain_data() -> None:
    with pytest.raises(ChatTemplateError, match="PosixPath"):
        ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": Path("/")}])


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        ChatTemplate(None).render(CONVERSATIONS[0])


def test_syntax_errors_show_at_load() -> None:
    with pytest.raises(ChatTemplateError, match="not valid"):
        ChatTemplate("{% if %}")


def test_folder_templates(tmp_path: Path) -> None:
    config: dict[str, Any] = {"chat_template": "{{ bos_token }}one", "bos_token": {"content": "<b>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert chat_template_from_folder(tmp_path).render([]) == "<b>one"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools | length }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert chat_template_from_folder(tmp_path).render([]) == "plain"
    assert chat_template_from_folder(tmp_path).render([], TOOLS) == "with 1"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert chat_template_from_folder(tmp_path).render([], TOOLS) == "from the file"
