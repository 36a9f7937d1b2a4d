"""A turn rendered behind a known one says what the whole conversation rendered at once says, whatever changed.

Two builders get the same requests and answers; one of them renders everything whole. Requests are parsed anew each time, as
a server gets them.
"""

import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto_server.api.chat_request import from_chat
from tenuto_server.api.messages_request import MessagesRequest, to_conversation
from tenuto_server.api.prompt import PromptBuilder
from tenuto_server.api.readings import Readings, same
from tenuto_server.api.responses_request import ResponsesRequest
from tenuto_server.api.responses_request import to_conversation as from_responses
from tenuto_server.model.chat import ChatTemplate
from tenuto_server.model.scripted import scripted_chat
from tenuto_server.model.toy import toy_chat, toy_tokenizer

TOKENIZER = toy_tokenizer()
NEVER = 10**9

PLAIN = "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}BODY{{- '<|im_end|>\n' }}{%- endfor %}"
LOOP = PLAIN.replace("+ m.role +", "+ ('tool' if m.role == 'tool' else m.role) +")
ASK = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
TOOLS = "{%- if tools %}{{- '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{%- endif %}"
CALLS = (
    "{%- for c in m.tool_calls or [] %}{{- '\n<tool_call>\n' + c.function | tojson + '\n</tool_call>' }}{%- endfor %}"
)
LAST = (
    "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
)
TEMPLATES = {
    "toy": toy_chat(),
    # Reasoning stays in every answer.
    "scripted": scripted_chat(),
    # Neither tools nor calls nor results are known to it.
    "bare": ChatTemplate(PLAIN.replace("BODY", "{{- m.content }}") + ASK),
    # Reasoning is shown behind the last question only.
    "last question": ChatTemplate(
        LAST
        + TOOLS
        + LOOP.replace(
            "BODY",
            "{%- if m.reasoning_content and loop.index0 > ns.last %}"
            "{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{%- endif %}{{- m.content }}" + CALLS,
        )
        + ASK
    ),
    # Reasoning is never shown, and the prompt for an answer opens it.
    "opened": ChatTemplate(
        TOOLS + LOOP.replace("BODY", "{{- m.content }}" + CALLS) + ASK.replace("assistant\n", "assistant\n<think>\n")
    ),
    # Tools stand in front of the last question.
    "late tools": ChatTemplate(
        LAST
        + LOOP.replace(
            "BODY",
            "{%- if tools and loop.index0 == ns.last %}{{- '[TOOLS]' + tools | tojson }}{%- endif %}{{- m.content }}"
            + CALLS,
        )
        + ASK
    ),
    # Roles must alternate, and no system message is taken.
    "strict": ChatTemplate(
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
    ),
    # Every message bears its number: nothing can be taken over from a shorter conversation.
    "numbered": ChatTemplate(LOOP.replace("BODY", "{{- loop.index ~ m.content }}") + ASK),
    # Neighbours matter: a result behind a result is joined to it.
    "joined results": ChatTemplate(
        TOOLS + "{%- for m in messages %}{%- if m.role != 'tool' or loop.first or loop.previtem.role != 'tool' %}"
        "{{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' }}{%- endif %}{{- m.content }}"
        + CALLS
        + "{%- if m.role != 'tool' or loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
        + ASK
    ),
    # A system message of its own where the client has none.
    "own system": ChatTemplate(
        "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\nYou help.<|im_end|>\n' }}{%- endif %}"
        + LOOP.replace("BODY", "{{- m.content | trim }}" + CALLS)
        + ASK
    ),
    # The system text and the tools are part of the first question; there are no other control tokens than ends of answers.
    "first question": ChatTemplate(
        "{%- set rules = messages[0].content if messages[0].role == 'system' else '' %}{%- set ns = namespace(first=true) %}"
        "{%- for m in messages %}{%- if m.role == 'user' or m.role == 'tool' %}{{- ' [INST] ' }}{%- if ns.first %}"
        "{{- rules }}{%- if tools %}{{- tools | tojson }}{%- endif %}{%- set ns.first = false %}{%- endif %}"
        "{{- m.content + ' [/INST]' }}{%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim }}"
        + CALLS
        + "{{- '<|endoftext|>' }}{%- endif %}{%- endfor %}"
    ),
    # A number counts answers across the loop: it is no neighbourhood.
    "counted": ChatTemplate(
        "{%- set ns = namespace(n=0) %}"
        + LOOP.replace(
            "BODY", "{%- if m.role == 'assistant' %}{%- set ns.n = ns.n + 1 %}{{- ns.n }}{%- endif %}{{- m.content }}"
        )
        + ASK
    ),
}
# What was found about each: with reasoning or without it, with a question behind the place or only results.
LOCAL = {
    "last question": {(False, False): True, (False, True): True, (True, False): True, (True, True): False},
    "late tools": {(False, False): True, (False, True): False, (True, False): True, (True, True): False},
    "numbered": dict.fromkeys([(False, False), (False, True), (True, False), (True, True)], False),
}
WORDS = ["a", "", "word\n", "\n\nx ", "<|im_end|>", "<think>", "ünï", "b" * 40, "{}", "</tool_call>"]
words = st.sampled_from(WORDS)
SPECS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}}
    for name in ("bash", "read")
]


def answer(dice, number):
    calls = [
        {
            "id": f"c{number}.{n}",
            "type": "function",
            "function": {"name": "bash", "arguments": json.dumps({"n": dice.choice([1, 1.0, True, "x"]), "b": 1})},
        }
        for n in range(dice.choice([0, 1, 1, 2]))
    ]
    message = {"role": "assistant", "content": dice.choice(WORDS)}
    if dice.random() < 0.4:
        message["reasoning_content"] = dice.choice(["hm", "so\nthen", "<|im_end|>"])
    return {**message, "tool_calls": calls} if calls else message


def reply(dice, said):
    out = [{"role": "tool", "tool_call_id": c["id"], "content": dice.choice(WORDS)} for c in said.get("tool_calls", ())]
    if not out or dice.random() < 0.3:
        out.append({"role": "user", "content": dice.choice(WORDS)})
    return out


def change(dice, talk, operation):
    """The next request's messages."""
    talk = json.loads(json.dumps(talk))
    if operation == "edit":
        one = dice.choice(talk)
        one["content"] = dice.choice(WORDS)
    elif operation == "retype" and (calls := [c for m in talk for c in m.get("tool_calls", ())]):
        function = dice.choice(calls)["function"]
        given = json.loads(function["arguments"])
        function["arguments"] = json.dumps({"b": 1, "n": given["n"]})
    elif operation == "rewind":
        starts = [i + 1 for i, m in enumerate(talk) if m["role"] == "user"]
        talk = talk[: dice.choice(starts)]
    elif operation == "compact":
        head = [m for m in talk[:1] if m["role"] == "system"]
        talk = [*head, {"role": "user", "content": "Summary so far."}, *talk[-2:]]
    elif operation == "forget":
        for message in talk:
            message.pop("reasoning_content", None)
    return talk


class Pair:
    """Both builders, fed alike."""

    def __init__(self, template):
        self.ends = PromptBuilder(TOKENIZER, template, whole_chars_max=0)
        self.whole = PromptBuilder(TOKENIZER, template, whole_chars_max=NEVER)

    def ask(self, talk, tools=()):
        made = [
            b.conversation(from_chat(json.loads(json.dumps(talk)), tools, readings=b.readings))
            for b in (self.ends, self.whole)
        ]
        assert made[0].raw == made[1].raw
        assert made[0].tokens.tolist() == made[1].tokens.tolist()
        assert made[0].text == made[1].text
        assert made[0].encoded.chars.tolist() == made[1].encoded.chars.tolist()
        assert made[0].encoded.ends.tolist() == made[1].encoded.ends.tolist()
        assert made[0].spliced == made[1].spliced
        self.made = made
        return made[0]

    def generated(self, message, ids):
        for builder, prompt in zip((self.ends, self.whole), self.made, strict=True):
            builder.remember_answer(prompt, message, ids)


OPERATIONS = ["go on"] * 6 + ["edit", "retype", "rewind", "compact", "forget", "tools", "answer"]


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), operations=st.lists(st.sampled_from(OPERATIONS), min_size=4, max_size=12))
def test_ends_are_rendered_as_the_whole_is(name, seed, operations):
    dice, pair = random.Random(seed), Pair(TEMPLATES[name])
    talk = [{"role": "system", "content": "rules"}] if seed % 2 else []
    talk.append({"role": "user", "content": "question"})
    tools = SPECS[: seed % 3]
    for number, operation in enumerate(operations):
        pair.ask(talk, tools)
        if operation in ("go on", "answer"):
            said = answer(dice, number)
            if operation == "answer":
                text = said["content"].strip() + "".join(str(c["function"]) for c in said.get("tool_calls", ()))
                ids = [5 + b for b in f"<think>{said.get('reasoning_content', '')}</think>{text}".encode()]
                pair.generated(canonical(said), ids)
            talk = [*talk, said, *reply(dice, said)]
        elif operation == "tools":
            tools = SPECS[: dice.randrange(3)]
        else:
            talk = change(dice, talk, operation)
    pair.ask(talk, tools)


def canonical(said):
    return from_chat([said]).messages[0]


def grown(steps, dice):
    talk = [{"role": "system", "content": "rules"}, {"role": "user", "content": "question"}]
    for number in range(steps):
        call = {"id": f"c{number}", "type": "function", "function": {"name": "bash", "arguments": '{"a": "b"}'}}
        talk.append({"role": "assistant", "content": dice.choice(["a", "b"]), "tool_calls": [call]})
        talk.append({"role": "tool", "tool_call_id": f"c{number}", "content": f"result {number} " * 10})
        yield list(talk)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_growing_conversation_is_rendered_at_its_end_alone(name):
    pair, taken = Pair(TEMPLATES[name]), []
    for talk in grown(40, random.Random(1)):
        prompt = pair.ask(talk, SPECS)
        taken.append(prompt.kept)
    whole = sum(kept == 0 for kept in taken)
    if name in ("numbered", "counted"):
        assert whole == 40
    else:
        # The first ones, and each time that it has doubled: there the whole is compared with what its end gave.
        assert whole <= 9
        assert taken[-1] > 0.9 * len(prompt.raw)
        assert pair.ends.readings.items_reused > 1000


@pytest.mark.parametrize("name", LOCAL)
def test_what_a_template_looks_at_is_found_out(name):
    renderer = PromptBuilder(TOKENIZER, TEMPLATES[name]).renderer
    for reasoning in (False, True):
        renderer._is_local(reasoning, True)
    assert renderer.local == LOCAL[name]


def test_a_template_that_passes_and_then_fails_is_rendered_whole_from_then_on(caplog):
    """It counts its messages from the thirtieth on, which no small conversation shows."""
    source = LOOP.replace(
        "BODY", "{{- m.content }}{%- if messages | length > 30 %}{{- messages | length }}{%- endif %}"
    )
    ends, whole = (PromptBuilder(TOKENIZER, ChatTemplate(source + ASK), whole_chars_max=n) for n in (0, NEVER))
    wrong = 0
    for talk in grown(70, random.Random(1)):
        made = [b.conversation(from_chat(json.loads(json.dumps(talk)), readings=b.readings)) for b in (ends, whole)]
        if made[0].raw == made[1].raw:
            continue
        wrong = len(talk)
    # Found when the conversation had doubled since it was last rendered whole.
    assert wrong < 64
    assert "rendered whole" in caplog.text
    assert not any(ends.renderer.local.values())


def messages_body(talk, marked):
    """The talk in the Messages form, with a cache mark on the last block, as agents move it."""
    body = {"model": "m", "max_tokens": 1, "system": [{"type": "text", "text": "rules"}], "messages": []}
    for index, text in enumerate(talk):
        block = {"type": "text", "text": text}
        if index == len(talk) - 1 and marked:
            block["cache_control"] = {"type": "ephemeral", "ttl": "1h"}
        body["messages"].append({"role": ("user", "assistant")[index % 2], "content": [block]})
    return json.loads(json.dumps(body))


def test_moved_cache_marks_do_not_matter_and_their_lives_are_kept():
    readings = Readings(10**6)
    read = [
        to_conversation(
            MessagesRequest.model_validate(messages_body([f"m{n}" for n in range(size)], True)), True, readings
        )
        for size in (1, 3, 5, 7)
    ]
    for before, after in itertools.pairwise(read):
        # The last message differs by its mark; everything before it is the very same object.
        same_objects = sum(a is b for a, b in zip(before.messages, after.messages, strict=False))
        assert same_objects >= len(before.messages) - 1 or len(before.messages) == 2
        assert after.links[: len(before.links)] == before.links
    assert [talk.asked_s for talk in read] == [3600.0] * 4
    assert read[-1] == to_conversation(
        MessagesRequest.model_validate(messages_body([f"m{n}" for n in range(7)], True)), True
    )
    assert to_conversation(MessagesRequest.model_validate(messages_body(["a", "b", "c"], False)), True).marked_s is None


def test_a_reference_to_a_tool_is_read_with_the_tools_of_its_request():
    readings = Readings(10**6)
    reference = {"type": "tool_reference", "tool_name": "late"}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [reference]}
    talk = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "find", "input": {}}]},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "more"},
    ]
    for description in ("one", "two"):
        tool = {"name": "late", "description": description, "input_schema": {}, "defer_loading": True}
        body = {"model": "m", "max_tokens": 1, "messages": json.loads(json.dumps(talk)), "tools": [tool]}
        read = to_conversation(MessagesRequest.model_validate(body), True, readings)
        assert f'"description": "{description}"' in read.messages[2]["content"]


@pytest.mark.parametrize(
    ("before", "after"), [({"n": 1}, {"n": 1.0}), ({"n": 1}, {"n": True}), ({"a": 1, "b": 2}, {"b": 2, "a": 1})]
)
def test_arguments_that_compare_equal_and_render_otherwise_are_read_anew(before, after):
    readings = Readings(10**6)
    for arguments in (before, after):
        call = {"type": "tool_use", "id": "a", "name": "find", "input": arguments}
        talk = [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": "x"},
        ]
        body = MessagesRequest.model_validate({"model": "m", "max_tokens": 1, "messages": talk})
        (read,) = to_conversation(body, True, readings).messages[1]["tool_calls"]
        assert json.dumps(read["function"]["arguments"]) == json.dumps(arguments)


def test_an_answer_in_several_items_is_read_anew_as_long_as_it_may_go_on():
    items = [
        {"type": "message", "role": "user", "content": "go"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": "I look."},
        {"type": "function_call", "call_id": "a", "name": "find", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "x"},
        {"type": "message", "role": "assistant", "content": "done"},
        {"type": "message", "role": "user", "content": "more"},
    ]
    readings = Readings(10**6)
    for stored in (0, 2, 4):
        for size in range(max(1, stored), len(items) + 1):
            body = ResponsesRequest.model_validate({"model": "m", "input": json.loads(json.dumps(items[stored:size]))})
            history = tuple(json.loads(json.dumps(items[:stored])))
            assert from_responses(body, history, True, readings) == from_responses(body, history, True)


def test_tenants_share_no_reading():
    readings, talk = Readings(10**6), [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]
    one = from_chat(talk, readings=readings, scope="one")
    two = from_chat(talk, readings=readings, scope="two")
    assert readings.items_reused == 2  # each its own beginning, none behind it
    assert not any(a is b for a, b in zip(one.messages, two.messages, strict=True))


def test_readings_are_bounded():
    readings = Readings(20_000)
    for number in range(60):
        from_chat([{"role": "user", "content": f"{number}" * 200}] * 3, readings=readings)
        assert readings.bytes <= 20_000
    for number in range(30):
        from_chat([{"role": "user", "content": "x"}, {"role": "user", "content": f"{number}"}], readings=readings)
    assert 0 < readings.bytes <= 20_000


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ([1], [True]),
        ({"a": [0]}, {"a": [False]}),
    ],
)
def test_what_renders_otherwise_is_not_the_same(a, b):
    assert a == b
    assert not same(a, b)
    assert same(a, json.loads(json.dumps(a)))


THOUGHT = "Let me see.\nYes."


@pytest.mark.parametrize(
    ("name", "follow", "comes_back"),
    [
        ("scripted", "result", True),  # reasoning stays
        ("scripted", "question", True),
        ("last question", "result", True),  # it stays as long as only tools answer
        ("last question", "question", False),  # the template leaves it out behind the next question
        ("opened", "result", False),  # the template never shows it
    ],
)
def test_an_answer_with_reasoning_comes_back_as_its_ids_where_the_template_shows_it(name, follow, comes_back):
    builder, asked = PromptBuilder(TOKENIZER, TEMPLATES[name]), [{"role": "user", "content": "go"}]
    prompt = builder.chat(asked, SPECS)
    opened = "" if name == "opened" else "<think>\n"
    call = '<tool_call>\n{"name":"bash","arguments":{"a":"b"}}\n</tool_call>'
    written = f"{opened}{THOUGHT}\n</think>\n\nI look.\n{call}"
    ids = [TOKENIZER.encode(char)[0] for char in written]  # one a byte: as no encoder would have it
    said = {"role": "assistant", "content": "I look.", "reasoning_content": THOUGHT}
    said["tool_calls"] = [{"id": "1", "type": "function", "function": {"name": "bash", "arguments": '{"a": "b"}'}}]
    builder.remember_answer(prompt, canonical(said), ids)
    behind = {"role": "tool", "tool_call_id": "1", "content": "x"}
    extra = [{"role": "user", "content": "why?"}] if follow == "question" else []
    after = builder.chat([*asked, said, behind, *extra], SPECS)
    ours = [*prompt.tokens.tolist(), *ids]
    assert (after.spliced, after.tokens.tolist()[: len(ours)] == ours) == (int(comes_back), comes_back)
    # Where it does not come back, all of the prompt but what the template itself opened is still the beginning.
    common = prompt.raw.removesuffix("<think>\n")
    assert after.raw.startswith(common)
    known = len(TOKENIZER.encode(common))
    assert after.tokens.tolist()[:known] == prompt.tokens.tolist()[:known]
    # A client that sends other reasoning, or none, gets what it sent.
    for other in ({**said, "reasoning_content": "No."}, {k: v for k, v in said.items() if k != "reasoning_content"}):
        assert builder.chat([*asked, other, behind], SPECS).spliced == 0
