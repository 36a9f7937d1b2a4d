"""Stop strings, decoding over token boundaries, tool-call markup."""

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto_server.api.answer import program_of
from tenuto_server.api.text import AnswerText, StopMatcher
from tenuto_server.model.toy import toy_tokenizer

TOKENIZER = toy_tokenizer()


def first_stop(text: str, stops: list[str]) -> int | None:
    """By definition: of the stop strings that end first, the start of the longest."""
    for end in range(1, len(text) + 1):
        lengths = [len(s) for s in stops if text[:end].endswith(s)]
        if lengths:
            return end - max(lengths)
    return None


few_letters = st.text("abc", max_size=40)
stop_lists = st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=4)


@settings(max_examples=400, deadline=None)
@given(text=few_letters, stops=stop_lists, cuts=st.lists(st.integers(0, 40), max_size=8))
def test_stop_matching_equals_its_definition_however_the_text_is_cut(text, stops, cuts):
    matcher, out, stopped = StopMatcher(stops), "", False
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in itertools.pairwise(edges):
        piece, stopped = matcher.push(text[start:end])
        out += piece
        # Nothing that may still turn out to belong to a stop string has been let out.
        expected = first_stop(text, stops)
        assert expected is None or len(out) <= expected
        if stopped:
            break
    expected = first_stop(text, stops)
    assert stopped == (expected is not None)
    assert out + ("" if stopped else matcher.finish()) == (text if expected is None else text[:expected])


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(st.sampled_from("abe é€𝄞\n"), max_size=40),
    stop=st.text(st.sampled_from("abe é€"), min_size=1, max_size=4),
)
def test_stop_strings_across_tokens_and_what_is_kept(text, stop):
    ids = TOKENIZER.encode(text)
    answer = AnswerText(TOKENIZER, [stop])
    out = "".join(answer.push([token]) for token in ids)
    out += answer.finish()
    at = text.find(stop)
    assert out == (text if at < 0 else text[:at])
    assert answer.stopped == (at >= 0)
    if answer.stopped:
        # The kept tokens spell no more than the answer, and one more token would spell more.
        assert out.startswith(TOKENIZER.decode(ids[: answer.keep_tokens]).rstrip("\ufffd"))
        assert len(TOKENIZER.decode(ids[: answer.keep_tokens + 1])) > len(TOKENIZER.decode(ids[: answer.keep_tokens]))
        if TOKENIZER.decode(ids[: answer.keep_tokens]) != out:
            assert len(TOKENIZER.decode(ids[: answer.keep_tokens + 1]).encode()) > len(out.encode())


def test_characters_of_several_tokens_come_out_whole():
    answer = AnswerText(TOKENIZER, [])
    pieces = [answer.push([token]) for token in TOKENIZER.encode("a€𝄞")]
    assert "".join(pieces) == "a€𝄞"
    assert "\ufffd" not in "".join(pieces)
    assert answer.push(TOKENIZER.encode("€")[:2]) == ""
    assert answer.finish() == "\ufffd"


def test_control_tokens_are_not_text():
    answer = AnswerText(TOKENIZER, [])
    assert answer.push([*TOKENIZER.encode("ab"), 2, 0]) == "ab"


def test_cost_is_linear_in_the_answer():
    def seconds(tokens: int) -> float:
        answer = AnswerText(TOKENIZER, ["aaaaaaaaaaaaaaab", "zz"])
        ids = TOKENIZER.encode("a" * 16) * (tokens // 16)
        began = time.perf_counter()
        for token in ids:
            answer.push([token])
        return time.perf_counter() - began

    seconds(1_000)
    # Quadratic cost would be 16 times dearer per token, not within noise of 1.
    assert seconds(32_000) < 16 * 4 * max(seconds(2_000), 1e-3)


@pytest.mark.parametrize(
    ("arguments", "program"),
    [
        ({"command": "cd x && pytest -q"}, "cd"),
        ('{"cmd": ["/usr/bin/git", "log"]}', "git"),
        ({"command": "CI=1 make test"}, "make"),
        ({"command": "echo 'open"}, "echo"),
        ({"path": "a"}, None),
        ({"command": 7}, None),
        ("[" * 100_000, None),
        ("text", None),
        (None, None),
    ],
)
def test_the_program_of_a_call(arguments, program):
    assert program_of(arguments) == program


def test_control_tokens_that_mark_calls_are_text():
    answer = AnswerText(TOKENIZER, [], frozenset({1}))
    assert answer.push([*TOKENIZER.encode("ok "), 1, 2, *TOKENIZER.encode("[]")]) == "ok <|im_start|>[]"
