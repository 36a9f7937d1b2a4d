"""What is remembered changes no prompt, only the work that it takes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto_server.api.chat_request import from_chat
from tenuto_server.api.locating import common_prefix
from tenuto_server.api.memory import Known, PromptMemory, generated
from tenuto_server.api.prompt import PromptBuilder
from tenuto_server.api.rendering import Rendered
from tenuto_server.api.shield import Encoded
from tenuto_server.model.chat import ChatTemplate
from tenuto_server.model.toy import toy_chat, toy_tokenizer

TOKENIZER = toy_tokenizer()


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def fresh():
    return PromptBuilder(TOKENIZER, toy_chat())


@settings(max_examples=25, deadline=None)
@given(
    talks=st.lists(
        st.lists(st.text(st.sampled_from("ab \n<|im_end|>"), max_size=12), min_size=1, max_size=5),
        min_size=2,
        max_size=5,
    )
)
def test_prompts_are_the_same_with_and_without_memory(talks):
    builder = fresh()
    for texts in talks:
        messages = [user(text) for text in texts]
        seen, new = builder.chat(messages), fresh().chat(messages)
        assert seen.tokens.tolist() == new.tokens.tolist()
        assert seen.text == new.text
        assert seen.encoded.ends.tolist() == new.encoded.ends.tolist()


def test_an_appending_turn_encodes_only_what_is_new():
    builder, talk = fresh(), [user("one " * 200), said("two")]
    first = builder.chat(talk)
    second = builder.chat([*talk, user("three")])
    # All of the first prompt but the generation prompt ("assistant\n", 10 bytes, here before the control token's end).
    assert first.reused == 0
    assert second.reused >= len(first.tokens) - len(TOKENIZER.encode("assistant\n"))
    assert second.tokens.tolist() == fresh().chat([*talk, user("three")]).tokens.tolist()


def test_a_fork_and_its_parent_both_reuse_what_they_share():
    builder, talk = fresh(), [user("shared " * 50), said("ok")]
    builder.chat(talk)
    child = builder.chat([*talk, user("child")])
    parent = builder.chat([*talk, user("parent")])
    assert child.reused > 50
    assert parent.reused > 50


def test_tenants_do_not_see_each_others_texts():
    builder = fresh()
    talk = from_chat([user("secret " * 30)])
    builder.conversation(talk, "one")
    assert builder.conversation(talk, "two").reused == 0
    assert builder.conversation(talk, "one").reused > 0


def odd_ids(text):
    """Ids of a text that no encoder would choose: one per byte."""
    return [TOKENIZER.encode(char)[0] for char in text]


def test_generated_answers_come_back_as_the_ids_that_were_generated():
    builder, talk = fresh(), [user("hi")]
    prompt = builder.chat(talk)
    ids = odd_ids("the answer")
    assert ids != TOKENIZER.encode("the answer")
    builder.remember_answer(prompt, said("the answer"), ids)
    after = builder.chat([*talk, said("the answer"), user("more")])
    assert after.tokens.tolist()[: len(prompt.tokens) + len(ids)] == prompt.tokens.tolist() + ids
    assert after.text == fresh().chat([*talk, said("the answer"), user("more")]).text
    assert after.spliced == 1
    # Another answer, or the same one in another conversation, is a text like any other.
    assert builder.chat([*talk, said("the answer!"), user("more")]).spliced == 0
    assert builder.chat([user("ho"), said("the answer"), user("more")]).spliced == 0


def test_a_generated_tool_call_keeps_its_own_spelling():
    builder, talk = fresh(), [user("list")]
    prompt = builder.chat(talk)
    written = (
        '<tool_call>\n{"name":"bash","arguments":{"command":"ls"}}\n</tool_call>'  # no spaces: not as templates do
    )
    ids = TOKENIZER.encode(written)
    call = {"id": "a", "type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}
    builder.remember_answer(prompt, {**said(""), "tool_calls": [call]}, ids)
    sent = {**call, "id": "b", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    after = builder.chat(
        [*talk, {**said(None), "tool_calls": [sent]}, {"role": "tool", "tool_call_id": "b", "content": "x"}]
    )
    assert after.tokens.tolist()[: len(prompt.tokens) + len(ids)] == prompt.tokens.tolist() + ids


def test_a_space_that_the_template_adds_does_not_come_between():
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}"
        "{% else %}{{ ' ' + m.content + '<|endoftext|>' }}{% endif %}{% endfor %}"
    )
    builder = PromptBuilder(TOKENIZER, ChatTemplate(source))
    prompt, ids = builder.chat([user("hi")]), TOKENIZER.encode(" the answer")
    builder.remember_answer(prompt, said("the answer"), ids)
    after = builder.chat([user("hi"), said("the answer"), user("more")]).tokens.tolist()
    assert after[: len(prompt.tokens) + len(ids) + 1] == [*prompt.tokens.tolist(), *ids, 0]


def test_a_template_that_refuses_a_spliced_answer_gets_the_message_itself():
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}{{ raise_exception('calls only') }}"
        "{% endif %}{{ '<|im_start|>' + m.role + (m.tool_calls | string) + '<|im_end|>' }}{% endfor %}"
    )
    builder = PromptBuilder(TOKENIZER, ChatTemplate(source))
    call = {"id": "a", "type": "function", "function": {"name": "PROBE", "arguments": {}}}
    talk = [user("list"), {**said(""), "tool_calls": [call]}]
    plain = builder.chat(talk).tokens.tolist()
    builder.remember_answer(builder.chat(talk[:1]), talk[1], [5, 6, 7])
    assert builder.chat(talk).tokens.tolist() == plain


def test_clients_cannot_write_keys_of_answers():
    for text in ("\ufdd1" + "0" * 32 + "\ufdd1", "\ufdd1", "\ufdd0\U000f0000"):
        prompt = fresh().chat([user("hi"), said(text), user(text)])
        assert TOKENIZER.decode(prompt.tokens.tolist()) == prompt.text
        assert prompt.text.count(text) == 2


def test_what_a_digest_leaves_out_cannot_carry_control_tokens():
    builder, text = fresh(), "hmm<|im_end|>"
    talk = [user("hi"), {**said("ok"), "reasoning_content": "hmm"}, {"role": "tool", "name": "x", "content": "y"}]
    before = builder.chat(talk)
    talk[1]["reasoning_content"], talk[2]["name"] = text, text
    after = builder.chat(talk)
    assert after.tokens.tolist().count(2) == before.tokens.tolist().count(2)
    assert after.tokens.tolist() == fresh().chat(talk).tokens.tolist()


def test_memory_is_bounded_in_bytes_and_forgets_the_oldest():
    memory = PromptMemory(100_000)
    encoded = Encoded(np.zeros(1000, np.int32), np.empty(0, np.int64), np.empty(0, np.int64))
    for number in range(50):
        memory.remember(Known(Rendered("x" * 4000, (), (), ""), encoded, (b"%d" % number,), (True,)))
        memory.remember_answer(b"a%d" % number, generated([1] * 100, "assistant\n"))
        assert memory.bytes <= 100_000
    assert memory.find([b"0"]) == (None, 0)
    assert memory.find([b"49", b"50"])[1] == 1
    assert memory.answer(b"a49").lead == "assistant\n"


@pytest.mark.parametrize(
    ("a", "b", "length"), [("", "x", 0), ("abc", "abc", 3), ("abc", "abd", 2), ("x" * 99 + "a", "x" * 99 + "b", 99)]
)
def test_common_prefix(a, b, length):
    assert common_prefix(a, b) == common_prefix(b, a) == length
