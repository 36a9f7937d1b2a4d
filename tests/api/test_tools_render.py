"""What a model wrote comes back to it as it wrote it: answer, parse, render again, for templates of every kind."""

import pytest

from tenuto_server.api.answer import Answer
from tenuto_server.api.chat_request import from_chat
from tenuto_server.api.output import output_parser
from tenuto_server.api.prompt import PromptBuilder
from tenuto_server.api.toolformat import tool_format
from tenuto_server.model.chat import ChatTemplate
from tenuto_server.model.scripted import scripted_chat
from tenuto_server.model.toy import toy_tokenizer

TURNS = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content }}CALLS{{- '<|im_end|>\n' }}{%- endfor %}"
)
ASK = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
LIST = "{%- if tools %}{{- '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{%- endif %}"


def chatml(calls: str) -> ChatTemplate:
    return ChatTemplate((LIST if calls else "") + TURNS.replace("CALLS", calls) + ASK)


PLAIN = chatml("")
QWEN3 = chatml(
    "{%- for c in m.tool_calls or [] %}{%- if m.content or not loop.first %}{{- '\n' }}{%- endif %}"
    "{{- '<tool_call>\n<function=' + c.function.name + '>\n' }}"
    "{%- for k, v in c.function.arguments.items() %}"
    "{{- '<parameter=' + k + '>\n' + (v if v is string else v | tojson) + '\n</parameter>\n' }}{%- endfor %}"
    "{{- '</function>\n</tool_call>' }}{%- endfor %}"
)
LLAMA = ChatTemplate(
    LIST
    + TURNS.replace(
        "CALLS",
        "{%- if m.tool_calls %}{{- '{\"name\": ' + m.tool_calls[0].function.name | tojson + ', \"parameters\": ' }}"
        "{{- m.tool_calls[0].function.arguments | tojson + '}' }}{%- endif %}",
    )
    + "{%- if false %}<|python_tag|>{%- endif %}"
    + ASK
)
MISTRAL = chatml(
    "{%- if m.tool_calls %}{{- '[TOOL_CALLS] [' }}{%- for c in m.tool_calls %}"
    "{{- '{\"name\": ' + c.function.name | tojson + ', \"arguments\": ' + c.function.arguments | tojson + '}' }}"
    "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']' }}{%- endif %}"
)
HERMES_CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls \\"x\\"", "timeout": 5}}\n</tool_call>'
XML = "<tool_call>\n<function=bash>\n<parameter=command>\na\n\nb\n</parameter>\n<parameter=timeout>\n5\n</parameter>\n</function>\n</tool_call>"
OBJECT = '{"name": "bash", "arguments": {"command": "ls"}}'
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}}},
    },
}


@pytest.mark.parametrize(
    ("chat", "name", "answer"),
    [
        (PLAIN, "hermes", f"I look.\n{HERMES_CALL}"),
        (PLAIN, "hermes", f"{HERMES_CALL}\n{HERMES_CALL}"),
        (scripted_chat(), "hermes", f"I look.\n{HERMES_CALL}\n{HERMES_CALL}"),
        (scripted_chat(), "hermes", f"<think>\nWhat now?\n</think>\n\n{HERMES_CALL}"),
        (QWEN3, "qwen3-coder", f"I look.\n{XML}"),
        (LLAMA, "llama3", '{"name": "bash", "parameters": {"command": "ls", "timeout": 5}}'),
        (MISTRAL, "mistral", f"[TOOL_CALLS] [{OBJECT}, {OBJECT}]"),
    ],
)
def test_a_round_trip_extends_the_prompt(chat, name, answer) -> None:
    format = tool_format([chat.source])
    assert format.name == name
    builder = PromptBuilder(toy_tokenizer(), chat)
    messages = [{"role": "user", "content": "look"}]
    first = builder.conversation(from_chat(messages, [TOOL]))
    assert "bash" in first.text
    assert '"timeout"' in first.text
    read = Answer()
    parser = output_parser(format, from_chat(messages, [TOOL]).tools)
    read.take(parser.feed(answer))
    read.take(parser.finish())
    back = {"role": "assistant", "content": read.text or None, "reasoning_content": read.reasoning}
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in read.calls
    ]
    assert calls
    result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "files"}
    second = builder.conversation(from_chat([*messages, {**back, "tool_calls": calls}, result], [TOOL]))
    assert second.text.startswith(first.text + answer + "<|im_end|>")
    assert "files" in second.text
