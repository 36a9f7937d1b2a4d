"""A model that answers from a script, with everything around it real: tokenizer, template, KV blocks, tiers, engine.

A double for tests of agents and clients: it takes prompts of 256K tokens at once and calls tools as it is told. Its KV cache
is what it reads: keys hold token ids, values hold positions, and before every answer the whole context is gathered from the
row's blocks, as attention would. A block that is stale, missing or in the wrong place is an error, not another answer.

``ScriptedModel`` owns the script and a bounded memory of answers under way; the same context always gives the same token.
"""

from __future__ import annotations

import hashlib
import json
import time
from bisect import bisect_right
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tenuto_kernels.layout import KEY, VALUE, KVLayout
from tenuto_server.model.chat import ChatTemplate
from tenuto_server.model.config import ModelConfig
from tenuto_server.model.script import Said, Script, read_script
from tenuto_server.model.tokenizer import Tokenizer
from tenuto_server.model.toy import TURN_END, TURN_START
from tenuto_server.model.transformer import ForwardBatch, Transformer

WINDOW_TOKENS = 262_144
_ANSWERS_MAX = 256
_SURE = 1000.0
# Under a grammar that its script did not foresee, the model ends what is open as soon as it may.
_CLOSERS = {'"': 120.0, "}": 100.0, "]": 80.0, "0": 60.0, "{": 40.0, ":": 30.0, ",": 30.0}
_CALL_WEIGHT = 20.0  # rather a call than reasoning, where either may begin

Ids = NDArray[np.int64]

TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages and messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\nThese functions can be called:\\n<tools>\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- '</tools>\\n\\nA call is JSON in tags:\\n<tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages and messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' and loop.first %}{%- continue %}{%- endif %}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
{{- raise_exception('unknown role: ' + message.role) }}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
{%- if message.content is string %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": ' + call.function.name | tojson + ', "arguments": ' + call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


class ScriptedModel(Transformer):
    """The script in the place of a network. ``tokenizer`` must know ``<|im_start|>`` and ``<|im_end|>``."""

    def __init__(self, script: Script, tokenizer: Tokenizer, device: torch.device | str = "cpu") -> None:
        start, end = tokenizer.token_id(TURN_START), tokenizer.token_id(TURN_END)
        assert start is not None
        assert end is not None
        self.config = scripted_config(tokenizer)
        self.dtype, self.device, self.invariant = torch.float32, torch.device(device), True
        self.weights_form = "dense"
        self._script, self._tokenizer = script, tokenizer
        self._start, self._end = start, end
        self._header = [start, *tokenizer.encode_ordinary("assistant\n")]
        self._answers: OrderedDict[tuple[int, int], tuple[list[int], bool]] = OrderedDict()
        self._closing = torch.zeros(self.config.vocab_size, device=self.device)
        self._closing[tokenizer.encode_ordinary("<tool_call>")] = _CALL_WEIGHT
        for text, weight in _CLOSERS.items():
            self._closing[tokenizer.encode_ordinary(text)[0]] = weight

    @property
    def kind(self) -> str:
        """See ``Transformer``."""
        return "scripted"

    @property
    def linear_kind(self) -> str:
        """There are none."""
        return "none"

    def kv_layout(self, block_size: int) -> KVLayout:
        """One layer and one head; fp32 holds every token id and position exactly."""
        return KVLayout(1, 1, self.config.head_dim, block_size, self.dtype)

    def forward(self, batch: ForwardBatch, pool: Tensor) -> Tensor:
        """Stores ids and positions as KV; logits fp32 [S, vocab] that leave no doubt. Raises ``RuntimeError`` for KV that
        is not that of the context."""
        size = pool.shape[4]
        block, offset = batch.slots // size, batch.slots % size
        pool[block, 0, KEY, 0, offset, 0] = batch.tokens.to(pool.dtype)
        pool[block, 0, VALUE, 0, offset, 0] = batch.positions.to(pool.dtype)
        if self._script.prefill_tokens_per_s is not None:
            time.sleep(batch.rows.num_tokens / self._script.prefill_tokens_per_s)
        logits = torch.zeros((len(batch.logits_index), self.config.vocab_size), device=self.device)
        contexts: dict[int, Ids] = {}
        for at, index in enumerate(batch.logits_index.tolist()):
            row = bisect_right(batch.rows.query_start, index) - 1
            if row not in contexts:
                contexts[row] = self._context(batch, pool, row)
            # A row may be asked for a token after each of its last ones: what comes later is not context.
            token = self._next(contexts[row][: int(batch.positions[index]) + 1])
            # A grammar may forbid what the script says, from the first token on: then the closers decide.
            logits[at] = self._closing
            logits[at, self._end if token is None else token] = _SURE
        return logits

    def _context(self, batch: ForwardBatch, pool: Tensor, row: int) -> Ids:
        """The token ids of a row's whole context, as its blocks hold them."""
        length, size = batch.rows.context_len[row], pool.shape[4]
        blocks = batch.rows.block_tables[row, : -(-length // size)].long()
        ids, positions = (
            pool[blocks, 0, part, 0, :, 0].flatten()[:length].to(torch.int64).cpu().numpy() for part in (KEY, VALUE)
        )
        wrong = np.flatnonzero(positions != np.arange(length))
        if len(wrong):
            raise RuntimeError(f"the KV at position {int(wrong[0])} of {length} is that of {int(positions[wrong[0]])}")
        return ids

    def _next(self, ids: Ids) -> int | None:
        """The token that follows; None where what was generated is not what the script says."""
        turns = np.flatnonzero(ids == self._start)
        begin = int(turns[-1]) if len(turns) else 0
        generated = ids[begin + len(self._header) :].tolist()
        key = (begin, hash(ids[:begin].tobytes()))
        if (known := self._answers.get(key)) is None:
            known = self._answers[key] = self._answer(ids, turns)
            if len(self._answers) > _ANSWERS_MAX:
                self._answers.popitem(last=False)
        answer, endless = known
        at = len(generated)
        if endless and answer and at >= len(answer):
            return answer[at % len(answer)]
        if ids[begin : begin + len(self._header)].tolist() != self._header or generated != answer[:at]:
            return None
        return answer[at] if at < len(answer) else self._end

    def _answer(self, ids: Ids, turns: NDArray[np.intp]) -> tuple[list[int], bool]:
        """The script's answer to the conversation before the last turn marker, as ids, and whether it repeats."""
        role, text, step = "user", "", 0
        for number in range(len(turns) - 2, -1, -1):
            role, text = self._message(ids, turns, number)
            if role in ("user", "tool"):
                break
        for number in range(len(turns) - 2, -1, -1):
            speaker, _ = self._message(ids, turns, number)
            if speaker == "user":
                break
            step += speaker == "assistant"
        if not len(turns):  # a plain completion
            text = self._tokenizer.decode(ids.tolist())
        offered = self._tools(ids, turns) if len(turns) else frozenset()
        answer = self._script.answer(Said(role, text, step, offered))
        return self._tokenizer.encode_ordinary(answer.text), answer.endless

    def _message(self, ids: Ids, turns: NDArray[np.intp], number: int) -> tuple[str, str]:
        """Role and text of one message of the prompt."""
        stop = int(turns[number + 1]) if number + 1 < len(turns) else len(ids)
        body = ids[int(turns[number]) + 1 : stop]
        ends = np.flatnonzero(body == self._end)
        whole = self._tokenizer.decode(body[: int(ends[0]) if len(ends) else len(body)].tolist())
        role, _, text = whole.partition("\n")
        return role, text

    def _tools(self, ids: Ids, turns: NDArray[np.intp]) -> frozenset[str]:
        _, text = self._message(ids, turns, 0)
        section = text.rpartition("<tools>\n")[2].partition("\n</tools>")[0]
        names: set[str] = set()
        for line in section.splitlines():
            try:
                tool: Any = json.loads(line)
            except ValueError:
                continue
            if isinstance(tool, dict) and isinstance(tool.get("function"), dict):
                names.add(str(tool["function"].get("name")))
        return frozenset(names)


def scripted_config(tokenizer: Tokenizer) -> ModelConfig:
    """The shape that the rest of the server sees: a window of 256K tokens, 128 bytes of KV a token."""
    return ModelConfig(
        architecture="scripted",
        num_layers=1,
        hidden_size=16,
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=16,
        vocab_size=tokenizer.vocab_size,
        max_position=WINDOW_TOKENS,
        rope_theta=10_000.0,
        rms_eps=1e-5,
        eos_ids=tokenizer.eos_ids,
        bos_id=tokenizer.bos_id,
    )


def scripted_chat() -> ChatTemplate:
    """Turns between control tokens, tools and calls as JSON in tags, reasoning kept in the history."""
    return ChatTemplate(TEMPLATE, {"eos_token": TURN_END})


def scripted_model(
    path: Path | None, tokenizer: Tokenizer, device: torch.device | str
) -> tuple[ScriptedModel, ChatTemplate, str]:
    """The model of a script file (None: the default script), its template, and the digest of its "weights": KV depends on
    the tokens alone, so that blocks outlive a change of the script."""
    model = ScriptedModel(read_script(path), tokenizer, device)
    digest = hashlib.blake2b(f"scripted-1 {tokenizer.vocab_size}".encode(), digest_size=32).hexdigest()
    return model, scripted_chat(), digest
