"""The text of an answer becomes events: every format, every split, and what is no call stays text."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto_server.api.output import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
    output_parser,
)
from tenuto_server.api.toolformat import FORMAT_NAMES, ToolFormat, tool_format
from tenuto_server.api.tools import ToolSpec
from tenuto_server.errors import ConfigError

TOOLS = (
    ToolSpec(
        "bash",
        parameters={
            "type": "object",
            "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}, "any": {}},
        },
    ),
    ToolSpec("read_file"),
)
HERMES = tool_format(["<tool_call> </tool_call>"])
THINKING = tool_format(["<tool_call> <think> </think>"])
QWEN3 = tool_format(["<tool_call> <function=x> <parameter=y>"])
LLAMA = tool_format(["<|python_tag|>"])
MISTRAL = tool_format(["[TOOL_CALLS]"])
MISTRAL11 = tool_format(["[TOOL_CALLS] [ARGS]"])


def events_of(pieces, format: ToolFormat = HERMES, tools=TOOLS, **options) -> list[OutputEvent]:
    """All events, with neighbouring pieces of one thing joined."""
    numbers = iter(range(1000))
    parser = output_parser(format, tools, new_id=lambda: f"id{next(numbers)}", **options)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    joined: list[OutputEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        match event, last:
            case TextDelta(text), TextDelta(before):
                joined[-1] = TextDelta(before + text)
            case ReasoningDelta(text), ReasoningDelta(before):
                joined[-1] = ReasoningDelta(before + text)
            case ToolCallDelta(index, text), ToolCallDelta(_, before):
                joined[-1] = ToolCallDelta(index, before + text)
            case _:
                joined.append(event)
    return joined


def summary(text: str, format: ToolFormat = HERMES, **options) -> tuple[str, str, list[tuple[str, object]]]:
    """(reasoning, text, [(name, parsed arguments)])."""
    events = events_of([text], format, **options)
    calls = [event.name for event in events if isinstance(event, ToolCallStart)]
    arguments = [""] * len(calls)
    for event in events:
        if isinstance(event, ToolCallDelta):
            arguments[event.index] += event.arguments
    assert [event.index for event in events if isinstance(event, ToolCallEnd)] == list(range(len(calls)))
    return (
        "".join(event.text for event in events if isinstance(event, ReasoningDelta)),
        "".join(event.text for event in events if isinstance(event, TextDelta)),
        [(name, json.loads(piece)) for name, piece in zip(calls, arguments, strict=True)],
    )


LS = ("bash", {"command": "ls"})
READ = ("read_file", {"path": "a"})


@pytest.mark.parametrize(
    ("format", "text", "said", "calls"),
    [
        (HERMES, "plain", "plain", []),
        (HERMES, '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>', "", [LS]),
        (HERMES, 'I look.\n<tool_call>\n{"name":"bash","arguments":{"command":"ls"}}</tool_call>\n', "I look.", [LS]),
        (HERMES, '<tool_call>{"arguments": {"command": "ls"}, "name": "bash"}</tool_call>', "", [LS]),
        (HERMES, '<tool_call>{"name": "bash", "arguments": "{\\"command\\": \\"ls\\"}"}</tool_call>', "", [LS]),
        (HERMES, '<tool_call>{"name": "bash", "arguments": {"command": "ls"}\n</tool_call>', "", [LS]),
        (HERMES, '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}}</tool_call>', "", [LS]),
        (
            HERMES,
            '<tool_call>{"name": "bash", "arguments": {"command": "ls"}, "id": 7, "x": [1]}</tool_call>',
            "",
            [LS],
        ),
        (HERMES, '<tool_call>{"name": "bash"}</tool_call>', "", [("bash", {})]),
        (HERMES, '<tool_call>{"name": "bash", "arguments": null}</tool_call>', "", [("bash", {})]),
        (
            HERMES,
            '<tool_call>[{"name": "bash", "arguments": {"command": "ls"}}, {"name": "read_file", "arguments": {"path": "a"}}]</tool_call>',
            "",
            [LS, READ],
        ),
        (
            HERMES,
            '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "read_file", "arguments": {"path": "a"}}\n</tool_call>',
            "",
            [LS, READ],
        ),
        (
            HERMES,
            '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>\nDone now. ',
            "Done now.",
            [LS],
        ),
        (
            HERMES,
            '<tool_call>{"name": "bash", "arguments": {"command": "echo \'</tool_call>\' \\"}{\\""}}</tool_call>',
            "",
            [("bash", {"command": "echo '</tool_call>' \"}{\""})],
        ),
        (
            HERMES,
            '<tool_call>{"name": "bash", "arguments": {"command": "a\nb\tc"}}</tool_call>',
            "",
            [("bash", {"command": "a\nb\tc"})],
        ),
        (HERMES, "a < b <tool_call without end", "a < b <tool_call without end", []),
        (HERMES, "see <tool_call> in the docs", "see <tool_call> in the docs", []),
        (HERMES, '<tool_call>{"nome": "bash"}</tool_call>', '<tool_call>{"nome": "bash"}</tool_call>', []),
        (HERMES, '<tool_call>{"name": ""}</tool_call>', '<tool_call>{"name": ""}</tool_call>', []),
        (HERMES, '<tool_call>{"name": "bash", "arguments": 3}', '<tool_call>{"name": "bash", "arguments": 3}', []),
        (
            HERMES,
            '<tool_call>oops <tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>',
            "<tool_call>oops",
            [LS],
        ),
        (
            QWEN3,
            "Now:\n<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>",
            "Now:",
            [LS],
        ),
        (
            QWEN3,
            '<tool_call>\n<function=bash>\n<parameter=command>\na "b"\n\nc\n\n</parameter>\n'
            "<parameter=timeout>\n5\n</parameter>\n<parameter=any>\n[1, true]\n</parameter>\n</function>\n</tool_call>",
            "",
            [("bash", {"command": 'a "b"\n\nc\n', "timeout": 5, "any": [1, True]})],
        ),
        (QWEN3, "<function=read_file>\n</function>", "", [("read_file", {})]),
        (QWEN3, "<function=no end", "<function=no end", []),
        (QWEN3, '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>', "", [LS]),
        (LLAMA, '{"name": "bash", "parameters": {"command": "ls"}}', "", [LS]),
        (LLAMA, ' {"type": "function", "name": "bash", "parameters": {"command": "ls"}}', "", [LS]),
        (LLAMA, '<|python_tag|>{"name": "bash", "parameters": {"command": "ls"}}', "", [LS]),
        (
            LLAMA,
            '{"name": "bash", "parameters": {"command": "ls"}}; {"name": "read_file", "parameters": {"path": "a"}}',
            "",
            [LS, READ],
        ),
        (LLAMA, '{"name": "Ada", "born": 1815}', '{"name": "Ada", "born": 1815}', []),
        (LLAMA, '{"a": [1, 2]} is JSON', '{"a": [1, 2]} is JSON', []),
        (LLAMA, "[1, 2] is a list", "[1, 2] is a list", []),
        (LLAMA, "<|python_tag|>print(1)", "print(1)", []),
        (MISTRAL, '[TOOL_CALLS] [{"name": "bash", "arguments": {"command": "ls"}}]', "", [LS]),
        (
            MISTRAL,
            'Yes.[TOOL_CALLS][{"name": "bash", "arguments": {"command": "ls"}}, {"name": "read_file", "arguments": {"path": "a"}}]',
            "Yes.",
            [LS, READ],
        ),
        (MISTRAL11, '[TOOL_CALLS]bash[ARGS]{"command": "ls"}', "", [LS]),
        (
            MISTRAL11,
            '[TOOL_CALLS]bash[CALL_ID]abc123def[ARGS]{"command": "ls"}[TOOL_CALLS]read_file[ARGS]{"path": "a"}',
            "",
            [LS, READ],
        ),
        (MISTRAL11, "[TOOL_CALLS]", "", []),
    ],
)
def test_formats(format, text, said, calls) -> None:
    assert summary(text, format) == ("", said, calls)
    assert events_of(text, format) == events_of([text], format)


def test_reasoning() -> None:
    call = '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
    assert summary(f"<think>\nhm\n</think>\n\nSo: {call}", THINKING) == ("hm", "So:", [LS])
    assert summary("hm\n</think>\n\nSo", THINKING, reasoning=True) == ("hm", "So", [])
    assert summary("cut <tool_call> o", THINKING, reasoning=True) == ("cut <tool_call> o", "", [])
    assert summary("I write <think> here", THINKING) == ("", "I write <think> here", [])
    assert summary("<think>x</think>y", HERMES) == ("", "<think>x</think>y", [])
    assert summary('<think>x</think>{"name": "bash"}', tool_format(["<|python_tag|></think>"]))[2] == [("bash", {})]


def test_without_tools_markup_is_text() -> None:
    text = '<tool_call>{"name": "bash"}</tool_call> '
    assert events_of([text], tools=()) == [TextDelta(text)]


def test_arguments_stream_before_the_call_is_complete() -> None:
    parser = output_parser(HERMES, TOOLS, new_id=lambda: "id")
    assert parser.feed("Look <tool_") == [TextDelta("Look")]
    assert parser.feed('call>{"name": "bash", "argu') == []
    assert parser.feed('ments": {"comm') == [ToolCallStart(0, "id", "bash"), ToolCallDelta(0, '{"comm')]
    assert parser.feed('and": "l') == [ToolCallDelta(0, 'and": "l')]
    assert parser.tool_calls == 1
    assert parser.finish() == [ToolCallEnd(0)]


def test_one_call_where_only_one_may_come() -> None:
    call = '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
    assert summary(f"{call}\n{call}", parallel=False)[2] == [LS]


def test_a_cut_call_is_still_a_call() -> None:
    events = events_of(['<tool_call>{"name": "bash", "arguments": {"command": "ls'])
    assert events == [ToolCallStart(0, "id0", "bash"), ToolCallDelta(0, '{"command": "ls'), ToolCallEnd(0)]
    whole = '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
    assert summary(f"{whole}\n<tool_c") == ("", "", [LS])


@pytest.mark.parametrize(
    ("format", "marker", "call"),
    [
        (HERMES, "<tool_call>", '\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'),
        (QWEN3, "<tool_call>", "\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"),
        (MISTRAL, "[TOOL_CALLS]", ' [{"name": "bash", "arguments": {"command": "ls"}}]'),
        (MISTRAL11, "[TOOL_CALLS]", 'bash[ARGS]{"command": "ls"}'),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_wherever_the_limit_cuts_a_call_off_none_of_its_markup_is_text(
    format: ToolFormat, marker: str, call: str
) -> None:
    for cut in range(len(call)):
        parser = output_parser(format, TOOLS)
        events = parser.feed(f"I look. {marker}{call[:cut]}") + parser.finish(cut=True)
        assert [event.text for event in events if isinstance(event, TextDelta)] == ["I look."], cut
        said = "".join(event.arguments for event in events if isinstance(event, ToolCallDelta))
        assert '{"command": "ls"}'.startswith(said), cut


def test_json_that_is_the_answer_itself_is_not_lost_where_it_is_cut() -> None:
    parser = output_parser(LLAMA, TOOLS)
    events = parser.feed('{"names": ["a", "b') + parser.finish(cut=True)
    assert events == [TextDelta('{"names": ["a", "b')]


def test_ids() -> None:
    def first_id(format: ToolFormat, text: str) -> str:
        start = output_parser(format, TOOLS).feed(text)[0]
        assert isinstance(start, ToolCallStart)
        return start.id

    ids = {first_id(HERMES, '<tool_call>{"name": "bash", "arguments": {') for _ in range(20)}
    assert len(ids) == 20
    assert len(first_id(MISTRAL11, "[TOOL_CALLS]bash[ARGS]{")) == 9


def test_detection() -> None:
    assert [tool_format([text]).name for text in ("", '<|start_header_id|> "parameters"', "[ARGS][TOOL_CALLS]")] == [
        "hermes",
        "llama3",
        "mistral-v11",
    ]
    assert tool_format([None, "[TOOL_CALLS]"], "hermes").name == "hermes"
    assert THINKING.opens_reasoning("assistant\n<think>\n")
    assert not THINKING.opens_reasoning("<think>\n\n</think>\n\n")
    with pytest.raises(ConfigError, match="qwen3-coder"):
        tool_format([], "yaml")


fragments = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<function=bash>", "<function=", "</function>", "<parameter=command>",
        "<parameter=timeout>", "</parameter>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<think>", "</think>",
        '{"name": "bash", "arguments": {', '"arguments":', '"name":', '"bash"', '{"command": "ls"}', "{", "}", "[", "]",
        ",", ";", ":", '"', "\\", "\n", " ", "5", "null", "bash", "x", "é", "<", "\x01", "[TOOL_CALLS] [{",
    ]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(FORMAT_NAMES),
    st.lists(fragments, max_size=14).map("".join),
    st.lists(st.integers(0, 200), max_size=8),
    st.booleans(),
)
def test_any_split_gives_the_same_events(name, text, cuts, reasoning) -> None:
    format = tool_format(["</think>"], name)
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    whole = events_of([text], format, reasoning=reasoning)
    assert events_of(pieces, format, reasoning=reasoning) == whole
    assert events_of(text, format, reasoning=reasoning) == whole
    starts = [event.index for event in whole if isinstance(event, ToolCallStart)]
    assert starts == [event.index for event in whole if isinstance(event, ToolCallEnd)] == list(range(len(starts)))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["word", " ", "\n", "<tool_", "call>", "<tool_call>", "{", '"', "}", "<"]), max_size=12)
)
def test_no_text_is_lost_where_there_is_no_call(parts) -> None:
    text = "".join(parts)
    assert "".join(event.text for event in events_of(parts) if isinstance(event, TextDelta)) == text


def test_long_answers_cost_linear_time() -> None:
    body = "x" * 200_000
    pieces = [
        '<tool_call>{"name": "bash", "arguments": {"command": "',
        *(body[i : i + 4] for i in range(0, 200_000, 4)),
        '"}}',
    ]
    events = events_of(pieces)
    assert isinstance(events[1], ToolCallDelta)
    assert len(events[1].arguments) == 200_000 + len('{"command": ""}')
