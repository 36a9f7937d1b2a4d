"""Grammars of forced calls and schemas: what they accept is what the parser reads, and what they mask is never drawn."""

import json
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto_server.api.constrain import Constraint, check_schema, compiled, constraint
from tenuto_server.api.errors import ApiError
from tenuto_server.api.output import TextDelta, ToolCallDelta, ToolCallStart, output_parser
from tenuto_server.api.toolformat import FORMAT_NAMES, ToolFormat, tool_format
from tenuto_server.api.tools import ToolSpec
from tenuto_server.engine.events import Sampling
from tenuto_server.engine.plan import ForwardRow
from tenuto_server.model.toy import toy_config, toy_tokenizer
from tenuto_server.runtime.grammar import GrammarBook
from tenuto_server.runtime.sampler import mask_logits, sample

pytest.importorskip("xgrammar", reason="the extra 'constrain' is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the library's own imports

PLACE = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
COUNT = {"type": "object", "properties": {"n": {"type": "integer"}, "deep": {"type": "boolean"}}, "required": ["n"]}
TOOLS = (ToolSpec("weather", parameters=PLACE), ToolSpec("count", parameters=COUNT))
TOKENIZER = toy_tokenizer()
VOCAB = toy_config().vocab_size


@pytest.fixture(scope="module")
def book() -> GrammarBook:
    return GrammarBook(TOKENIZER, VOCAB, TOKENIZER.eos_ids)


def accepts(book: GrammarBook, wanted: Constraint | None, text: str) -> bool:
    """Whether the whole text is an answer under the constraint."""
    import xgrammar

    assert wanted is not None
    matcher = xgrammar.GrammarMatcher(compiled(book, wanted))
    return matcher.accept_string(text) and matcher.is_completed()


def drawn(book: GrammarBook, wanted: Constraint, seed: int, limit: int = 4000) -> str:
    """An answer of a model that has no idea: uniform logits, drawn under the mask, until it ends."""
    number = book.open(compiled(book, wanted))
    tokens: list[int] = []
    generator = torch.Generator().manual_seed(seed)
    while len(tokens) < limit:
        sampling = Sampling(limit, temperature=1.0, seed=seed, grammar=number)
        row = ForwardRow(1, 0, np.zeros(1, np.int32), np.zeros(1, np.int32), True, sampling, len(tokens))
        logits = torch.randn((1, VOCAB), generator=generator)
        logits[:, list(TOKENIZER.eos_ids)] += 6.0
        book.constrain(logits, [row])
        [token] = sample(logits, [sampling], [row.draw])
        book.advance([row], [token])
        if token in TOKENIZER.eos_ids:
            break
        tokens.append(token)
    else:
        pytest.fail("no end")
    book.close(number)
    return TOKENIZER.decode(tokens)


def read(format: ToolFormat, text: str) -> tuple[str, list[tuple[str, object]]]:
    parser = output_parser(format, TOOLS)
    events = parser.feed(text) + parser.finish()
    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    arguments = [""] * len(names)
    for event in events:
        if isinstance(event, ToolCallDelta):
            arguments[event.index] += event.arguments
    said = "".join(event.text for event in events if isinstance(event, TextDelta))
    return said, [(name, json.loads(piece)) for name, piece in zip(names, arguments, strict=True)]


def valid(name: str, arguments: object) -> bool:
    """By hand what the two schemas say."""
    assert isinstance(arguments, dict)
    if name == "weather":
        # To the grammar an encoded surrogate is one character (to a decoder three), and space around XML values is none.
        return set(arguments) == {"city"} and len(re.sub("\ufffd+", "x", arguments["city"].strip())) <= 20
    return (
        name == "count"
        and {"n"} <= set(arguments) <= {"n", "deep"}
        and type(arguments["n"]) is int
        and isinstance(arguments.get("deep", True), bool)
    )


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("parallel", [False, True])
def test_a_forced_call_comes_out_whatever_the_model_wants(book, name, parallel) -> None:
    format = tool_format([], name)
    wanted = constraint(format, TOOLS, "required", parallel=parallel)
    assert wanted is not None
    for seed in range(4):
        text = drawn(book, wanted, seed)
        said, calls = read(format, text)
        assert said == "", text
        assert calls, text
        assert len(calls) == 1 or parallel
        assert all(valid(*call) for call in calls), text


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_a_named_tool_is_the_one_called(book, name) -> None:
    format = tool_format([], name)
    wanted = constraint(format, TOOLS, "count", parallel=False)
    assert wanted is not None
    [(called, arguments)] = read(format, drawn(book, wanted, 7))[1]
    assert called == "count"
    assert valid(called, arguments)


def test_what_the_formats_accept(book) -> None:
    one, two = '{"name": "weather", "arguments": {"city": "Rom"}}', '{"name": "count", "arguments": {"n": 1}}'
    hermes = constraint(tool_format([], "hermes"), TOOLS, "required")
    assert accepts(book, hermes, f"<tool_call>\n{one}\n</tool_call>\n<tool_call>\n{two}\n</tool_call>")
    assert not accepts(book, hermes, f"Well: <tool_call>\n{one}\n</tool_call>")
    assert not accepts(book, hermes, "")
    mistral = constraint(tool_format([], "mistral"), TOOLS, "required")
    assert accepts(book, mistral, f"[TOOL_CALLS] [{one}, {two}]")
    thinking = tool_format(["</think>"], "hermes")
    assert accepts(
        book, constraint(thinking, TOOLS, "weather"), f"<think>\nhm\n</think>\n\n<tool_call>\n{one}\n</tool_call>"
    )
    assert accepts(book, constraint(thinking, TOOLS, "weather"), f"<tool_call>\n{one}\n</tool_call>")
    began = constraint(thinking, TOOLS, "weather", reasoning=True)
    assert accepts(book, began, f"hm\n</think>\n\n<tool_call>\n{one}\n</tool_call>")
    assert not accepts(book, began, f"<tool_call>\n{one}\n</tool_call>")


def test_strict_tools_are_held_to_their_schema_only_when_called(book) -> None:
    tools = (ToolSpec("weather", parameters=PLACE, strict=True), TOOLS[1])
    wanted = constraint(tool_format([], "hermes"), tools, "auto")
    assert wanted is not None
    assert wanted.optional
    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    assert accepts(book, wanted, "No call at all.")
    assert accepts(book, wanted, "So: " + call % ("weather", '{"city": "Rom"}'))
    assert not accepts(book, wanted, call % ("weather", '{"town": "Rom"}'))
    assert accepts(book, wanted, call % ("count", '{"anything": [1]}'))
    assert not accepts(book, wanted, call % ("other", "{}"))
    assert constraint(tool_format([], "hermes"), TOOLS, "auto") is None
    assert constraint(tool_format([], "hermes"), tools, "none") is None


def test_a_response_schema(book) -> None:
    format = tool_format([], "hermes")
    wanted = constraint(format, response_schema=COUNT)
    assert accepts(book, wanted, '{"n": 5, "deep": true}')
    assert not accepts(book, wanted, '{"deep": true}')
    assert not accepts(book, wanted, '```json\n{"n": 5}\n```')
    assert accepts(book, constraint(format, response_schema={"type": "object"}), '{"a": [1, {"b": null}]}')
    both = constraint(format, TOOLS, "auto", response_schema=COUNT)
    assert accepts(book, both, '{"n": 5}')
    assert accepts(book, both, '<tool_call>\n{"name": "count", "arguments": {"n": 1}}\n</tool_call>')
    assert both is not None
    for seed in range(3):
        text = drawn(book, constraint(format, response_schema=COUNT) or both, seed)
        assert valid("count", json.loads(text))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nope"},
        {"type": "object", "properties": 5},
        {"$ref": "#/nowhere"},
        {"type": "string", "pattern": "(("},
        {"type": "string", "pattern": 5},
        {"type": "string", "minLength": -1},
        {"type": "integer", "minimum": 1e30},
        {"type": "object", "required": [5]},
    ],
)
def test_a_bad_schema_is_refused_by_name(book, schema) -> None:
    bad = ToolSpec("bad", parameters={"type": "object", "properties": {"x": schema}})
    wanted = constraint(tool_format([], "hermes"), (*TOOLS, bad), "required")
    assert wanted is not None
    with pytest.raises(ApiError) as refused:
        compiled(book, wanted)
    assert (refused.value.status, refused.value.param) == (400, "tools[2].function.parameters")
    assert not re.search(r"::|<|Check failed|\.cc", refused.value.message)  # nothing of the library's own inside
    wanted = constraint(tool_format([], "hermes"), response_schema=schema, response_field="text.format.schema")
    assert wanted is not None
    with pytest.raises(ApiError, match=r"^text\.format\.schema: "):
        compiled(book, wanted)


def test_limits() -> None:
    deep: dict[str, object] = {"type": "integer"}
    for _ in range(100):
        deep = {"type": "array", "items": deep}
    with pytest.raises(ApiError, match="nests deeper than 64"):
        check_schema(deep, "x")
    with pytest.raises(ApiError, match="expected a JSON schema object"):
        check_schema([], "x")
    wide = {"enum": [f"{n:0100}" for n in range(6000)]}
    with pytest.raises(ApiError, match="limit is 262144"):
        constraint(tool_format([]), response_schema=wide)


def test_hostile_schemas_compile_in_bounded_time(book) -> None:
    item = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 10**9}}}
    for schema in (
        {"type": "array", "items": item, "minItems": 100_000},
        {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"},
        {"type": "string", "pattern": "^(a|b|ab)*(x{1,1000}){1,1000}$"},
    ):
        wanted = constraint(tool_format([]), response_schema=schema)
        assert wanted is not None
        compiled(book, wanted)


def test_without_the_library_the_field_and_the_cure_are_named() -> None:
    class Missing(GrammarBook):
        def compile(self, source: str) -> object:
            from tenuto_server.runtime.grammar import INSTALL, GrammarsMissing

            raise GrammarsMissing(f"constrained decoding is not installed: {INSTALL}")

    missing = Missing(TOKENIZER, VOCAB, TOKENIZER.eos_ids)
    forced = constraint(tool_format([]), TOOLS, "required")
    assert forced is not None
    with pytest.raises(ApiError, match=r"tool_choice: .*pip install 'tenuto\[constrain\]'"):
        compiled(missing, forced)
    strict = constraint(tool_format([]), (ToolSpec("a", parameters=PLACE, strict=True),), "auto")
    assert strict is not None
    assert compiled(missing, strict) is None


def test_a_mask_leaves_other_rows_alone() -> None:
    logits = torch.arange(3 * 70, dtype=torch.float32).view(3, 70)
    masks = torch.zeros((1, 3), dtype=torch.int32)
    masks[0, 0], masks[0, 1], masks[0, 2] = 1 << 5, -(1 << 31), 0b100000  # tokens 5, 63, 69
    before = logits.clone()
    mask_logits(logits, [1], masks)
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    assert (logits[1] > -torch.inf).nonzero().flatten().tolist() == [5, 63, 69]
    assert sample(logits, [Sampling(1)] * 3, [0] * 3) == [69, 69, 69]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.lists(st.integers(1, 5), max_size=6))
def test_a_draw_that_was_not_believed_is_drawn_again_under_the_same_mask(book, seed, steps) -> None:
    """A forward that fails after drawing leaves the matcher ahead of the engine; the next row takes it back."""
    wanted = constraint(tool_format([]), TOOLS, "required")
    assert wanted is not None
    number = book.open(compiled(book, wanted))

    def row(draw: int) -> ForwardRow:
        sampling = Sampling(1000, grammar=number)
        return ForwardRow(1, 0, np.zeros(1, np.int32), np.zeros(1, np.int32), True, sampling, draw)

    masks: list[torch.Tensor] = []
    tokens: list[int] = []
    generator = torch.Generator().manual_seed(seed)

    def step(draw: int) -> None:
        logits = torch.randn((1, VOCAB), generator=generator)
        book.constrain(logits, [row(draw)])
        allowed = logits[0] > -torch.inf
        if draw < len(masks):
            assert torch.equal(allowed, masks[draw])
            token = tokens[draw]
        else:
            masks.append(allowed)
            token = int(logits.argmax())
            tokens.append(token)
        book.advance([row(draw)], [token])

    at = 0
    for back in steps:
        for _ in range(6):
            step(at)
            at += 1
        at -= min(back, at)
    book.close(number)
    logits = torch.zeros((1, VOCAB))
    book.constrain(logits, [row(at)])  # closed: nobody reads this row any more
    assert bool((logits == 0).all())
