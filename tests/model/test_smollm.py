"""The bundled model against transformers' LlamaForCausalLM on the same weights, and against itself on every path.

The reference model is built from tensors that the gguf package dequantises, with llama.cpp's row order undone here by hand,
so that nothing of our reader stands on both sides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from tenuto_kernels.linear import takes_quantized
from tenuto_server.model.load import LoadedModel, load_model

pytestmark = pytest.mark.model

PROMPTS = [
    "Write a Python function that returns the n-th Fibonacci number.",
    "What is the capital of France?",
    "List three uses of a hash table.",
    "Explain recursion to a child.",
    "Translate 'good morning' to Spanish.",
    "def quicksort(items):",
    "Summarise: a cache keeps what is used often close at hand.",
    "Which is larger, 17 * 3 or 49?",
    "Write a haiku about the sea.",
    "How do I reverse a string in JavaScript?",
]
NEW_TOKENS = 128


@pytest.fixture(scope="module")
def reference(gguf_path: Path) -> Any:
    reader = gguf.GGUFReader(gguf_path)
    tensors = {
        t.name: torch.from_numpy(np.array(gguf.quants.dequantize(t.data, t.tensor_type), dtype=np.float32))
        for t in reader.tensors
    }
    names = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    state = {
        "model.embed_tokens.weight": tensors["token_embd.weight"],
        "lm_head.weight": tensors["token_embd.weight"],
        "model.norm.weight": tensors["output_norm.weight"],
    }
    for layer in range(30):
        for stored, name in names.items():
            weight = tensors[f"blk.{layer}.{stored}.weight"]
            if stored in ("attn_q", "attn_k"):
                rows = [h * 64 + 2 * i + half for h in range(len(weight) // 64) for half in (0, 1) for i in range(32)]
                weight = weight[rows]
            state[f"model.layers.{layer}.{name}.weight"] = weight
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.load_state_dict(state)
    return model.eval()


@torch.no_grad()
def reference_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


@pytest.fixture(scope="module")
def document(smollm_fp32: LoadedModel) -> list[int]:
    """400 tokens of code: this file."""
    return smollm_fp32.tokenizer.encode(Path(__file__).read_text(encoding="utf-8"))[:400]


def test_logits_equal_transformers(
    smollm_fp32: LoadedModel, reference: Any, document: list[int], paged_runner: Any, record_property: Any
) -> None:
    expected = reference_logits(reference, document)
    ours = paged_runner(smollm_fp32.transformer)((0, 0, document), all_logits=True)
    error = (ours - expected).abs().max().item()
    record_property("max_abs_error", error)
    print(f"max abs logit error {error:.2e} over a range of {expected.max() - expected.min():.1f}")
    assert error < 1e-3
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))


@pytest.mark.slow
def test_greedy_text_equals_transformers(smollm_fp32: LoadedModel, reference: Any, paged_runner: Any) -> None:
    """Our greedy tokens, then one pass of the reference over them: if its best token is ours after every prefix, then
    its own greedy decoding gives the same text."""
    prompts = [
        smollm_fp32.tokenizer.encode(smollm_fp32.chat.render([{"role": "user", "content": text}])) for text in PROMPTS
    ]
    run = paged_runner(smollm_fp32.transformer, 256, sequences=len(prompts))
    last = run(*((i, 0, prompt) for i, prompt in enumerate(prompts))).argmax(-1).tolist()
    sequences = [[*prompt, token] for prompt, token in zip(prompts, last, strict=True)]
    for _ in range(NEW_TOKENS - 1):
        last = run(*((i, len(s) - 1, s[-1:]) for i, s in enumerate(sequences))).argmax(-1).tolist()
        for sequence, token in zip(sequences, last, strict=True):
            sequence.append(token)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        best = reference_logits(reference, sequence[:-1]).argmax(-1).tolist()
        assert sequence[len(prompt) :] == best[len(prompt) - 1 :]
    text = smollm_fp32.tokenizer.decode(sequences[1][len(prompts[1]) :])
    assert "Paris" in text


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_chunked_prefill_equals_one_shot(
    dtype: str, document: list[int], paged_runner: Any, request: pytest.FixtureRequest
) -> None:
    model: LoadedModel = request.getfixturevalue(f"smollm_{dtype}")
    one_shot = paged_runner(model.transformer)((0, 0, document))
    for cuts in ((256,), (1, 17, 300), (399,)):
        run = paged_runner(model.transformer)
        start = 0
        for stop in (*cuts, len(document)):
            logits = run((0, start, document[start:stop]))
            start = stop
        # Only the order of sums differs, within one chunk's matrix products; bf16 rounds KV, which can tip a rounding.
        tolerance = 1e-3 if dtype == "fp32" else 0.5
        assert (logits - one_shot).abs().max() < tolerance
        assert logits.argmax() == one_shot.argmax()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_invariant_mode_is_bit_exact_on_every_path(dtype: Any, document: list[int], paged_runner: Any) -> None:
    model = load_model("smollm2-135m", dtype=dtype, invariant=True)
    tokens, other = document[:150], document[200:300]
    expected = paged_runner(model.transformer, 160)((0, 0, tokens), all_logits=True)
    run = paged_runner(model.transformer, 160, sequences=2)
    run((0, 0, tokens[:70]), (1, 0, other[:33]))  # chunked, beside another sequence
    mixed = run((1, 33, other[33:]), (0, 70, tokens[70:140]), all_logits=True)[-70:]
    assert torch.equal(mixed, expected[70:140])
    for at in range(140, 150):  # decoded beside another sequence
        logits = run((0, at, tokens[at : at + 1]), (1, 100 + at - 140, [5]))
        assert torch.equal(logits[0], expected[at])


def test_bf16_agrees_with_fp32(
    smollm_fp32: LoadedModel, smollm_bf16: LoadedModel, document: list[int], paged_runner: Any
) -> None:
    exact = paged_runner(smollm_fp32.transformer)((0, 0, document), all_logits=True).log_softmax(-1)
    rounded = paged_runner(smollm_bf16.transformer)((0, 0, document), all_logits=True).log_softmax(-1)
    divergence = (exact.exp() * (exact - rounded)).sum(-1)
    assert divergence.mean() < 5e-3
    assert (rounded.argmax(-1) == exact.argmax(-1)).float().mean() > 0.94


@pytest.mark.parametrize(
    ("form", "perplexity", "agreement"), [("dense", 0.005, 0.95), ("stored", 0.005, 0.95), ("int4", 0.005, 0.95)]
)
def test_every_form_of_the_weights_keeps_the_quality(
    smollm_fp32: LoadedModel, document: list[int], paged_runner: Any, form: Any, perplexity: float, agreement: float
) -> None:
    """Against the same model in fp32: perplexity within half a per cent, nearly always the same best token."""
    model = load_model("smollm2-135m", weights=form)
    assert model.transformer.weights_form == form or not takes_quantized()
    targets = torch.tensor(document[1:])
    losses, best = [], []
    for each in (smollm_fp32, model):
        logits = paged_runner(each.transformer)((0, 0, document[:-1]), all_logits=True)
        losses.append(torch.nn.functional.cross_entropy(logits, targets))
        best.append(logits.argmax(-1))
    assert abs((losses[1] - losses[0]).exp() - 1) < perplexity
    assert (best[0] == best[1]).float().mean() > agreement


@pytest.mark.skipif(not takes_quantized(), reason="quantised weights are not read as they are here")
def test_stored_weights_compute_what_their_dense_fp32_form_computes(document: list[int], paged_runner: Any) -> None:
    stored = load_model("smollm2-135m", dtype="fp32", weights="stored")
    dense = load_model("smollm2-135m", dtype="fp32", weights="dense")
    expected = paged_runner(dense.transformer)((0, 0, document[:200]), all_logits=True)
    assert torch.equal(paged_runner(stored.transformer)((0, 0, document[:200]), all_logits=True), expected)
