"""``python -m tenuto_server.bench.prompt_turns``: what a turn costs before it reaches the engine, as its conversation grows.

One conversation of tool calls and file excerpts, sent again and again in the Messages form with one more step. Printed per
turn: CPU milliseconds to parse the body, to bring it into the canonical form, and to make a prompt of it, with what is
remembered and from nothing.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tenuto_server.api.conversation import Conversation
from tenuto_server.api.messages_request import MessagesRequest, to_conversation
from tenuto_server.api.prompt import PromptBuilder
from tenuto_server.api.schema import parse
from tenuto_server.model.chat import ChatTemplate
from tenuto_server.model.gguf_file import GGUFFile
from tenuto_server.model.load import resolve_model
from tenuto_server.model.tokenizer import tokenizer_from_gguf

STEPS = (0, 20, 40, 80, 160, 320)
_EXCERPT = 5000
_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>\n' }}{{ call.function | tojson }}{{ '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

Result = TypeVar("Result")


def _step(number: int, source: str, dice: random.Random) -> list[dict[str, Any]]:
    start = dice.randrange(len(source) - _EXCERPT)
    call = {"type": "tool_use", "id": f"toolu_{number}", "name": "Bash", "input": {"command": f"sed -n {number}p a.py"}}
    text = [{"type": "text", "text": source[start : start + _EXCERPT]}]
    return [
        {"role": "assistant", "content": [{"type": "text", "text": f"Step {number}."}, call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": text}]},
    ]


def _timed(action: Callable[[], Result]) -> tuple[Result, float]:
    began = time.process_time()
    result = action()
    return result, 1e3 * (time.process_time() - began)


def main() -> int:
    """Prints one row for each size."""
    folder = Path(__file__).parents[1]
    source = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("engine/*.py")))
    path = resolve_model("smollm2-135m").path
    assert path is not None, "the bundled vocabulary is missing"
    tokenizer, dice = tokenizer_from_gguf(GGUFFile(path).metadata), random.Random(1)
    tools = [{"name": f"tool_{n}", "description": source[n : n + 2000], "input_schema": {}} for n in range(20)]
    base = {"model": "m", "max_tokens": 1, "tools": tools, "system": source[:20_000]}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Fix it."}]
    builder = PromptBuilder(tokenizer, ChatTemplate(_TEMPLATE))

    def read(body: dict[str, Any]) -> Conversation:
        return to_conversation(parse(MessagesRequest, body), True)

    print("| tokens | of them new | body MB | parse | canonical | prompt | all, ms per MB | prompt from nothing |")
    print("|---|---|---|---|---|---|---|---|")
    done = 0
    for steps in STEPS:
        while done < steps:
            messages += _step(done, source, dice)
            done += 1
        builder.conversation(read({**base, "messages": messages}))
        messages += _step(done, source, dice)
        done += 1
        raw = json.dumps({**base, "messages": messages}, ensure_ascii=False).encode()
        body, parse_ms = _timed(partial(json.loads, raw))
        talk, canonical_ms = _timed(partial(read, body))
        prompt, prompt_ms = _timed(partial(builder.conversation, talk))
        empty = PromptBuilder(tokenizer, ChatTemplate(_TEMPLATE))
        _, nothing_ms = _timed(partial(empty.conversation, talk))
        size = len(raw) / 1e6
        per_mb = (parse_ms + canonical_ms + prompt_ms) / size
        new = len(prompt.tokens) - prompt.reused
        figures = f"{parse_ms:.1f} | {canonical_ms:.1f} | {prompt_ms:.1f} | {per_mb:.0f} | {nothing_ms:.0f}"
        print(f"| {len(prompt.tokens):,} | {new:,} | {size:.2f} | {figures} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
