"""A tiny random model with a tokenizer and a chat template of its own, as a double for the real thing.

Owns no state; everything follows from a seed. It loads in milliseconds, needs no file, and takes every path a real model
takes (GQA, RoPE, paged KV, special tokens, tool-aware template). Its weights are scaled so that attention is sharp and the
top logit leads clearly: the next token depends visibly on the KV cache, which is what tests of a cache need. Its text is
noise.
"""

from __future__ import annotations

import hashlib
import math

import torch

from tenuto_server.model.chat import ChatTemplate
from tenuto_server.model.config import ModelConfig
from tenuto_server.model.tokenizer import BpeTokenizer
from tenuto_server.model.vocabulary import CHAR_OF_BYTE, GPT2_PATTERN, Vocabulary

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_SPECIAL = (END_OF_TEXT, TURN_START, TURN_END)

TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages and messages[0].role == 'system' %}{{- messages[0].content + '\n' }}{%- endif %}
{{- 'Tools:\n' }}
{%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif messages and messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' and loop.first %}{%- continue %}{%- endif %}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
{{- raise_exception('unknown role: ' + message.role) }}
{%- endif %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.content is string %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""


def toy_config() -> ModelConfig:
    """3 layers, hidden 64, 4 query heads over 2 KV heads, 512 tokens, context 32,768."""
    return ModelConfig(
        architecture="llama",
        num_layers=3,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=128,
        vocab_size=512,
        max_position=32768,
        rope_theta=500000.0,
        rms_eps=1e-5,
        eos_ids=(0, 2),
        bos_id=0,
    )


def toy_vocabulary() -> Vocabulary:
    """Three special tokens, the 256 bytes, and 253 pairs: byte-level BPE like the real ones, with nothing missing."""
    vowels, consonants = "aeiou", "bcdfghjklmnpqrstvwxyz"
    pairs = [a + b for v in vowels for c in consonants for a, b in ((v, c), (c, v))]
    pairs += [" " + letter for letter in vowels + consonants]
    pairs += ["th", "st", "ch", "sh", "ll", "ss", "ee", "oo", "tt", "nd", "nt", "ng", "pl", "tr", "pr", "ck", "  "]
    space = CHAR_OF_BYTE[ord(" ")]
    merges = [(pair[0].replace(" ", space), pair[1].replace(" ", space)) for pair in pairs]
    tokens = {CHAR_OF_BYTE[byte]: len(_SPECIAL) + byte for byte in range(256)}
    tokens.update({a + b: len(_SPECIAL) + 256 + n for n, (a, b) in enumerate(merges)})
    return Vocabulary(
        tokens=tokens,
        merges=merges,
        added={text: index for index, text in enumerate(_SPECIAL)},
        special=frozenset(range(len(_SPECIAL))),
        pattern=GPT2_PATTERN,
        bos_id=0,
    )


def toy_tokenizer() -> BpeTokenizer:
    """The tokenizer of ``toy_vocabulary``."""
    return BpeTokenizer(toy_vocabulary(), eos_ids=toy_config().eos_ids)


def toy_chat() -> ChatTemplate:
    """ChatML with tools listed as JSON lines in the system turn."""
    return ChatTemplate(TEMPLATE, {"bos_token": END_OF_TEXT, "eos_token": TURN_END})


def toy_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Canonical weights in fp32 (see ``weights``): normal, with variance 1/inputs except where noted."""
    config = toy_config()
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn((rows, columns), generator=generator) * (gain / math.sqrt(columns))

    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    weights = {
        "embed": torch.randn((config.vocab_size, hidden), generator=generator),
        "norm": torch.ones(hidden),
        "head": normal(config.vocab_size, hidden, gain=4.0),  # logits with a standard deviation of 4
    }
    for index in range(config.num_layers):
        at = f"layers.{index}."
        weights[at + "attn_norm"] = torch.ones(hidden)
        weights[at + "mlp_norm"] = torch.ones(hidden)
        weights[at + "q.weight"] = normal(q_size, hidden, gain=2.0)  # scores with a standard deviation of 4
        weights[at + "k.weight"] = normal(kv_size, hidden, gain=2.0)
        weights[at + "v.weight"] = normal(kv_size, hidden, gain=2.0)
        weights[at + "o.weight"] = normal(hidden, q_size)
        weights[at + "gate.weight"] = normal(inner, hidden)
        weights[at + "up.weight"] = normal(inner, hidden)
        weights[at + "down.weight"] = normal(hidden, inner)
    return weights


def toy_digest(weights: dict[str, torch.Tensor]) -> str:
    """Hex blake2b-256 over the names and bytes of the weights."""
    root = hashlib.blake2b(digest_size=32)
    for name in sorted(weights):
        root.update(name.encode())
        root.update(weights[name].contiguous().numpy().tobytes())
    return root.hexdigest()
