"""The scripted model: which rule answers, token by token, and that it reads its KV."""

import json

import numpy as np
import pytest
import torch

from tenuto_kernels.rows import AttentionRows
from tenuto_server.errors import ModelError
from tenuto_server.model.load import load_model, resolve_model
from tenuto_server.model.script import NO_RULE, Said, Script, parse_script, read_script
from tenuto_server.model.scripted import WINDOW_TOKENS, ScriptedModel, scripted_chat
from tenuto_server.model.toy import toy_tokenizer
from tenuto_server.model.transformer import ForwardBatch

TOKENIZER = toy_tokenizer()
BASH = {"type": "function", "function": {"name": "bash", "description": "d", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls src"}}\n</tool_call>'
SCRIPT = parse_script(
    [
        {"role": "tool", "step": 1, "when": "error", "say": "It failed."},
        {"role": "tool", "say": "Done after ${HOME}."},
        {
            "when": r"list (?P<where>\w+)",
            "reasoning": "where is ${where}?",
            "say": "I look.",
            "tool_call": {"name": "bash", "arguments": {"command": "ls ${where}"}},
        },
        {"when": "list", "say": "I have no tools."},
        {"when": r"repeat (\w+)", "say": "${1} ", "stop": "length"},
    ]
)


def generate(model: ScriptedModel, prompt: str, limit: int = 400, chunk: int = 50) -> list[int]:
    """Greedy decoding over a real pool, prompt in chunks, blocks in a shuffled order; ends with the end token."""
    size, count = 16, 200
    pool = model.kv_layout(size).allocate(count, "cpu")
    table = np.random.default_rng(0).permutation(count)
    ids = TOKENIZER.encode(prompt)
    done, answer = 0, []
    while len(answer) < limit:
        part = ids[done : done + chunk]
        positions = np.arange(done, done + len(part))
        slots = table[positions // size] * size + positions % size
        done += len(part)
        rows = AttentionRows((0, len(part)), (done,), torch.tensor(table[None, : -(-done // size)], dtype=torch.int32))
        last = torch.tensor([len(part) - 1]) if done == len(ids) else torch.tensor([], dtype=torch.int64)
        batch = ForwardBatch(torch.tensor(part), torch.tensor(positions), torch.tensor(slots), rows, last)
        logits = model.forward(batch, pool)
        if len(last):
            token = int(logits[0].argmax())
            answer.append(token)
            if token in TOKENIZER.eos_ids:
                break
            ids.append(token)
    return answer


def say(model: ScriptedModel, messages: list[dict], tools=(BASH,), **options) -> str:
    answer = generate(model, scripted_chat().render(messages, list(tools) or None), **options)
    assert answer[-1] in TOKENIZER.eos_ids
    return TOKENIZER.decode(answer[:-1])


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def test_a_conversation_with_a_tool_keeps_its_prefix() -> None:
    model = ScriptedModel(SCRIPT, TOKENIZER)
    talk = [{"role": "system", "content": "Be brief."}, user("list src")]
    assert say(model, talk) == f"<think>\nwhere is src?\n</think>\n\nI look.\n{CALL}"
    before = scripted_chat().render(talk, [BASH])
    talk.append(
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "where is src?",
            "tool_calls": [{"type": "function", "function": {"name": "bash", "arguments": {"command": "ls src"}}}],
        }
    )
    # What comes back from the client renders to what was generated.
    assert (
        scripted_chat().render(talk, [BASH], False)
        == f"{before}<think>\nwhere is src?\n</think>\n\nI look.\n{CALL}<|im_end|>\n"
    )
    assert say(model, [*talk, {"role": "tool", "content": "an error"}]) == "It failed."
    assert say(model, [*talk, {"role": "tool", "content": "files"}]) == "Done after ${HOME}."
    again = [*talk, {"role": "assistant", "content": "hm"}, {"role": "tool", "content": "an error"}]
    assert say(model, again) == "Done after ${HOME}."


def test_rules_need_their_tools_and_the_first_that_fits_answers() -> None:
    model = ScriptedModel(SCRIPT, TOKENIZER)
    assert say(model, [user("list src")], tools=()) == "I have no tools."
    assert say(model, [user("nothing known")]) == NO_RULE
    endless = generate(model, scripted_chat().render([user("repeat it")]), limit=50)
    assert TOKENIZER.decode(endless).startswith("it it it it it")
    assert len(endless) == 50


def test_the_default_script() -> None:
    script = read_script(None)
    offered = frozenset({"bash"})
    assert script.answer(Said("user", 'now call bash {"command": "ls src"} please', 0, offered)).text == CALL
    assert script.answer(Said("user", "hello", 0, offered)).text == "You said: hello"
    assert script.answer(Said("tool", "a\nb", 1, offered)).text == "The tool answered: a\nb"
    assert script.answer(Said("user", 'call other {"a": 1}', 0, offered)).text.startswith("You said: call other")


def test_chunks_do_not_matter() -> None:
    prompt = scripted_chat().render([user("word " * 150 + "list docs")], [BASH])
    answers = {tuple(generate(ScriptedModel(SCRIPT, TOKENIZER), prompt, chunk=size)) for size in (7, 64, 4000)}
    assert len(answers) == 1


def test_a_row_may_be_asked_after_each_of_its_tokens() -> None:
    """As when guessed tokens are checked: each answer sees only what comes before it."""
    model = ScriptedModel(SCRIPT, TOKENIZER)
    prompt = TOKENIZER.encode(scripted_chat().render([user("list docs")], []))
    expected = TOKENIZER.encode_ordinary("I have no tools.")
    ids = prompt + expected[:3] + [99]
    pool = model.kv_layout(16).allocate(64, "cpu")
    rows = AttentionRows((0, len(ids)), (len(ids),), torch.arange(64, dtype=torch.int32)[None])
    at = torch.arange(len(ids))
    asked = torch.arange(len(prompt) - 1, len(ids))
    logits = model.forward(ForwardBatch(torch.tensor(ids), at, at, rows, asked), pool)
    assert logits.argmax(dim=-1).tolist() == [*expected[:4], TOKENIZER.token_id("<|im_end|>")]


def test_wrong_kv_is_an_error_not_another_answer() -> None:
    model = ScriptedModel(SCRIPT, TOKENIZER)
    pool = model.kv_layout(16).allocate(4, "cpu")
    rows = AttentionRows((0, 1), (33,), torch.tensor([[0, 2, 1]], dtype=torch.int32))
    batch = ForwardBatch(torch.tensor([5]), torch.tensor([32]), torch.tensor([16]), rows, torch.tensor([0]))
    with pytest.raises(RuntimeError, match="the KV at position 1 of 33"):
        model.forward(batch, pool)


def test_pretended_speed() -> None:
    assert Script([]).prefill_tokens_per_s is None
    assert parse_script({"rules": [], "prefill_tokens_per_s": 5000}).prefill_tokens_per_s == 5000


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"rules": 5}, "expected a list"),
        ([5], r"rules\[0\]: expected an object"),
        ([{}, {"wen": "x"}], r"rules\[1\]: unknown field 'wen'"),
        ([{"when": "("}], r"rules\[0\].when: "),
        ([{"say": 3}], r"rules\[0\].say: expected a string"),
        ([{"role": "system"}], r"rules\[0\].role"),
        ([{"step": "1"}], r"rules\[0\].step"),
        ([{"stop": True}], r"rules\[0\].stop"),
        ([{"tool_call": {"arguments": {}}}], r"rules\[0\].tool_call: expected name"),
        ([{"tool_call": [{"name": "a", "arguments": 3}]}], r"rules\[0\].tool_call.arguments"),
        ({"rules": [], "prefill_tokens_per_s": 0}, "positive"),
    ],
)
def test_a_bad_script_is_refused_by_rule_and_field(rules, words, tmp_path) -> None:
    with pytest.raises(ModelError, match=words):
        parse_script(rules)
    (tmp_path / "s.json").write_text(json.dumps(rules))
    with pytest.raises(ModelError, match=r"script s\.json: .*"):
        load_model(f"scripted:{tmp_path / 's.json'}")


def test_loading(tmp_path) -> None:
    assert resolve_model("scripted").kind == "scripted"
    (tmp_path / "s.json").write_text('[{"say": "hi"}]')
    one, other = load_model("scripted"), load_model(f"scripted:{tmp_path / 's.json'}")
    assert one.name == other.name == "scripted"
    assert one.config.max_position == WINDOW_TOKENS == 262_144
    assert one.digest == other.digest  # KV is the tokens': another script finds its blocks
    with pytest.raises(ModelError, match="cannot read the script"):
        load_model(f"scripted:{tmp_path / 'none.json'}")
