"""The openai client against the real model in a real process; its text is that of transformers on the same weights.

Nothing of ours is in the reference: the gguf package reads and dequantises the file, llama.cpp's row order is undone here by
hand, the tokenizers library encodes, and transformers' Llama decodes greedily.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import openai
import pytest
import tokenizers
import torch
import transformers

from tenuto_server.errors import ModelError
from tenuto_server.model.load import resolve_model

pytestmark = pytest.mark.model

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
QUESTIONS = ["What is the capital of France?", "Which is larger, 17 * 3 or 49? Say why."]
COUNT = 16


@pytest.fixture(scope="module")
def bundled() -> Path:
    try:
        path = resolve_model("smollm2-135m").path
    except ModelError as missing:
        pytest.skip(str(missing))
    assert path is not None
    return path


def library_tokenizer(reader: Any) -> tokenizers.Tokenizer:
    """The file's vocabulary in the tokenizers library: byte-level BPE after single digits, as SmolLM2's own file says."""
    tokens, merges = (reader.fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    pairs = [tuple(merge.split(" ")) for merge in merges]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({token: n for n, token in enumerate(tokens)}, pairs))
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, byte_level])
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return made


def library_model(reader: Any) -> Any:
    """The file's weights in transformers' Llama, fp32."""
    parts = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
        "attn_output": "self_attn.o_proj",
        **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
    }
    state = {}
    for tensor in reader.tensors:
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        weight = torch.from_numpy(np.array(data, dtype=np.float32))
        if tensor.name.startswith("blk."):
            _, layer, part, _ = tensor.name.split(".")
            if part in ("attn_q", "attn_k"):  # pairs of rotated rows lie side by side there, and half a head apart here
                weight = weight.view(-1, 32, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
            state[f"model.layers.{layer}.{parts[part]}.weight"] = weight
        elif tensor.name == "token_embd.weight":
            state["model.embed_tokens.weight"] = state["lm_head.weight"] = weight
        else:
            assert tensor.name == "output_norm.weight"
            state["model.norm.weight"] = weight
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
    return model.train(False)


@pytest.fixture(scope="module")
def reference(bundled: Path) -> Iterator[Callable[[str, int], tuple[list[int], str, bool]]]:
    """For a prompt's text: its tokens, the greedy answer's text, and whether that ended by itself."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the server computes on the other core
    reader = gguf.GGUFReader(bundled)
    tokenizer, model = library_tokenizer(reader), library_model(reader)
    end = tokenizer.token_to_id("<|im_end|>")

    @torch.no_grad()
    def answer(prompt: str, count: int) -> tuple[list[int], str, bool]:
        ids = tokenizer.encode(prompt).ids
        plan = {"max_new_tokens": count, "do_sample": False, "eos_token_id": end, "pad_token_id": end}
        out = model.generate(torch.tensor([ids]), **plan)[0, len(ids) :].tolist()
        ended = out[-1] == end
        return ids, tokenizer.decode(out[:-1] if ended else out), ended

    yield answer
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, server_class: Any, bundled: Path) -> Iterator[openai.OpenAI]:
    options = (
        "--model",
        "smollm2-135m",
        "--dtype",
        "fp32",
        "--device-bytes",
        "128MiB",
        "--host-bytes",
        "0",
        "--threads",
        "1",
    )
    server = server_class(tmp_path_factory.mktemp("real"), *options)
    try:
        server.ready()
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
            yield made
        server.at_rest()
        assert server.stop() == 0
    finally:
        if server.process.poll() is None:
            server.kill()


def rendered(question: str) -> str:
    """The conversation as the model's own template has it, written out by hand."""
    head = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
    return f"{head}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("question", QUESTIONS)
def test_text_equals_transformers(client: openai.OpenAI, reference: Any, question: str) -> None:
    ids, text, ended = reference(rendered(question), COUNT)
    whole = client.chat.completions.create(
        model="smollm2-135m", messages=[{"role": "user", "content": question}], temperature=0, max_tokens=COUNT
    )
    assert whole.choices[0].message.content == text
    assert whole.choices[0].finish_reason == ("stop" if ended else "length")
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(ids)
    assert whole.usage.total_tokens == len(ids) + whole.usage.completion_tokens
    chunks = list(
        client.chat.completions.create(
            model="smollm2-135m",
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=COUNT,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), whole.usage.completion_tokens)
    details = usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens == len(ids) - 1, "the same prompt a second time: all but its last token"


def test_completions_and_stop(client: openai.OpenAI, reference: Any) -> None:
    prompt = "def add(left, right):\n    return"
    ids, text, _ = reference(prompt, COUNT)
    whole = client.completions.create(model="smollm2-135m", prompt=prompt, temperature=0, max_tokens=COUNT)
    assert whole.choices[0].text == text
    by_ids = client.completions.create(model="smollm2-135m", prompt=ids, temperature=0, max_tokens=COUNT)
    assert by_ids.choices[0].text == text
    stop = text[len(text) // 2 : len(text) // 2 + 4]
    cut = client.completions.create(model="smollm2-135m", prompt=prompt, temperature=0, max_tokens=COUNT, stop=[stop])
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage is not None
    assert cut.usage.completion_tokens < COUNT


def test_seeds(client: openai.OpenAI) -> None:
    """The same seed, the same text; another seed, another; and the model that is served is listed. The first answer finds
    nothing in the cache and the others do, which without ``--invariant`` is another rounding, so it is not compared."""
    texts = [
        client.completions.create(
            model="smollm2-135m", prompt="Once upon a time", temperature=1.5, max_tokens=12, seed=seed
        )
        .choices[0]
        .text
        for seed in (5, 5, 5, 6)
    ]
    assert texts[1] == texts[2] != texts[3]
    assert [model.id for model in client.models.list()] == ["smollm2-135m"]
