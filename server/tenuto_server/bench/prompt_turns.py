"""``python -m tenuto_server.bench.prompt_turns``: what a turn costs before it reaches the engine, as its conversation grows.

One conversation of tool calls and file excerpts, sent again and again in the Messages form with one more step; every answer in
it was generated here. Two servers' worth of state get the same requests in turn: one that compares what it knows, and one that
remembers nothing but ids and renders the whole conversation each time. Printed per size, in CPU milliseconds (the median of
several turns): reading the JSON, and all the rest until the prompt is there (messages, cache marks, template, ids, outline).
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

from tenuto_server.api.clues import read_clues
from tenuto_server.api.limits import read_value
from tenuto_server.api.messages_request import MessagesRequest, to_conversation
from tenuto_server.api.outline import Outline, compare
from tenuto_server.api.prompt import Prompt, PromptBuilder
from tenuto_server.api.readings import Readings
from tenuto_server.api.retain import marked_ttl_s, retain_s
from tenuto_server.api.schema import parse
from tenuto_server.model.chat import ChatTemplate
from tenuto_server.model.gguf_file import GGUFFile
from tenuto_server.model.load import resolve_model
from tenuto_server.model.tokenizer import Tokenizer, tokenizer_from_gguf

STEPS = (20, 80, 160, 320, 640)
_TURNS = 7
_EXCERPT = 5000
_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>\n' }}{{ call.function | tojson }}{{ '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Side:
    """One server's memory of the conversation. ``compares``: it takes up what it knows."""

    def __init__(self, tokenizer: Tokenizer, compares: bool) -> None:
        whole = {} if compares else {"whole_chars_max": 1 << 40}
        self.builder = PromptBuilder(tokenizer, ChatTemplate(_TEMPLATE), **whole)
        self._readings = self.builder.readings if compares else Readings(0)
        self._outline: Outline | None = None

    def turn(self, raw: bytes) -> tuple[Prompt, float, float]:
        """The prompt of a request's body, and milliseconds for reading its JSON and for the rest."""
        began = time.process_time()
        value: dict[str, Any] = read_value(raw)
        read = time.process_time()
        body = parse(MessagesRequest, value)
        talk = to_conversation(body, True, self._readings)
        prompt = self.builder.conversation(talk)
        read_clues({}, value, talk, False)
        retain_s(value, talk)
        marked_ttl_s(value, talk)
        outline = Outline.of("m", talk, prompt.digests, prompt.tool_digests, len(prompt.tokens))
        if self._outline is not None:
            compare(self._outline, outline)
        self._outline = outline
        return prompt, 1e3 * (read - began), 1e3 * (time.process_time() - read)


class Talk:
    """The conversation: ``step`` appends an answer that was generated here and its result."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        self._source, self._tokenizer, self._dice = source, tokenizer, random.Random(1)
        tools = [{"name": f"tool_{n}", "description": source[n : n + 2000], "input_schema": {}} for n in range(20)]
        self._base = {"model": "m", "max_tokens": 1, "tools": tools, "system": source[:20_000]}
        self._messages: list[dict[str, Any]] = [{"role": "user", "content": "Fix it."}]
        self.steps = 0

    def step(self, sides: list[Side], prompts: list[Prompt]) -> None:
        """One more."""
        number, start = self.steps, self._dice.randrange(len(self._source) - _EXCERPT)
        command = {"command": f"sed -n {number}p a.py"}
        said = f'Step {number}.\n<tool_call>\n{{"name": "Bash", "arguments": {json.dumps(command)}}}\n</tool_call>'
        call = {"function": {"name": "Bash", "arguments": command}}
        message = {"role": "assistant", "content": f"Step {number}.", "tool_calls": [call]}
        for side, prompt in zip(sides, prompts, strict=True):
            side.builder.remember_answer(prompt, message, self._tokenizer.encode_ordinary(said))
        use = {"type": "tool_use", "id": f"toolu_{number}", "name": "Bash", "input": command}
        text = [{"type": "text", "text": self._source[start : start + _EXCERPT]}]
        result = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": text}
        self._messages += [
            {"role": "assistant", "content": [{"type": "text", "text": f"Step {number}."}, use]},
            {"role": "user", "content": [result]},
        ]
        self.steps += 1

    def body(self) -> bytes:
        """The request, with the cache mark on its last block, where agents put it."""
        last = self._messages[-1]
        content = last["content"]
        marked = content
        if isinstance(content, list):
            marked = [*content[:-1], {**content[-1], "cache_control": {"type": "ephemeral"}}]
        messages = [*self._messages[:-1], {**last, "content": marked}]
        return json.dumps({**self._base, "messages": messages}, ensure_ascii=False).encode()


def main() -> int:
    """Prints one row for each size."""
    folder = Path(__file__).parents[1]
    source = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("engine/*.py")))
    path = resolve_model("smollm2-135m").path
    assert path is not None, "the bundled vocabulary is missing"
    tokenizer = tokenizer_from_gguf(GGUFFile(path).metadata)
    sides, talk = [Side(tokenizer, True), Side(tokenizer, False)], Talk(source, tokenizer)
    print(
        "| tokens | of them new | body MB | reading JSON | the rest | ms per MB | the rest, all rendered | ms per MB |"
    )
    print("|---|---|---|---|---|---|---|---|")
    prompts = [side.turn(talk.body())[0] for side in sides]
    for steps in STEPS:
        rows: list[tuple[float, ...]] = []
        while talk.steps < steps + _TURNS:
            talk.step(sides, prompts)
            raw = talk.body()
            (one, json_ms, rest_ms), (two, _, whole_ms) = (side.turn(raw) for side in sides)
            assert one.raw == two.raw
            assert one.tokens.tolist() == two.tokens.tolist()
            prompts = [one, two]
            if talk.steps > steps:
                rows.append((len(one.tokens), len(one.tokens) - one.reused, len(raw) / 1e6, json_ms, rest_ms, whole_ms))
        tokens, new, size, json_ms, rest_ms, whole_ms = (median(column) for column in zip(*rows, strict=True))
        per = f"{rest_ms:.2f} | {(json_ms + rest_ms) / size:.1f} | {whole_ms:.1f} | {(json_ms + whole_ms) / size:.1f}"
        print(f"| {tokens:,.0f} | {new:,.0f} | {size:.2f} | {json_ms:.2f} | {per} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
