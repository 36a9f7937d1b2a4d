"""The GGUF reader against the gguf package: same metadata, same numbers, clear errors."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tenuto_server.errors import ModelError
from tenuto_server.model.gguf_file import GGUFFile

TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q5_0"]  # Q5_0 takes the package's own path


def write(path: Path, architecture: str = "llama") -> dict[str, np.ndarray]:
    """A small file with one tensor per type; returns what the package itself decodes them to."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("llama.rope.freq_base", 1e5)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_string("tokenizer.chat_template", "{{ 'ünïcode' }}")
    writer.add_array("tokenizer.ggml.tokens", ["a", "Ġb", ""])
    writer.add_array("tokenizer.ggml.token_type", [1, 3, 1])
    expected = {}
    values = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    for name in TYPES:
        kind = gguf.GGMLQuantizationType[name]
        data = gguf.quants.quantize(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        expected[name] = gguf.quants.dequantize(data, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def test_metadata_has_every_kind_of_value(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    metadata = GGUFFile(tmp_path / "m.gguf").metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.block_count"] == 3
    assert metadata["llama.rope.freq_base"] == 1e5
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert metadata["tokenizer.chat_template"] == "{{ 'ünïcode' }}"
    assert metadata["tokenizer.ggml.tokens"] == ["a", "Ġb", ""]
    assert metadata["tokenizer.ggml.token_type"] == [1, 3, 1]


@pytest.mark.parametrize("kind", TYPES)
def test_tensors_decode_to_the_same_bits_as_the_package(tmp_path: Path, kind: str) -> None:
    expected = write(tmp_path / "m.gguf")[kind]
    tensor = GGUFFile(tmp_path / "m.gguf").read(kind, torch.float32)
    assert tensor.shape == (6, 64)
    assert np.array_equal(tensor.numpy(), expected)


@pytest.mark.parametrize("kind", TYPES)
def test_stored_codes_mean_the_same_numbers(tmp_path: Path, kind: str) -> None:
    expected = write(tmp_path / "m.gguf")[kind]
    stored = GGUFFile(tmp_path / "m.gguf").read_quantized(kind)
    if kind not in ("Q4_0", "Q4_1", "Q8_0"):
        assert stored is None
        return
    assert stored is not None
    assert np.array_equal(stored.dense(torch.float32).numpy(), expected)


def test_bf16_is_the_rounded_fp32(tmp_path: Path) -> None:
    expected = write(tmp_path / "m.gguf")["Q4_1"]
    tensor = GGUFFile(tmp_path / "m.gguf").read("Q4_1", torch.bfloat16)
    assert torch.equal(tensor, torch.from_numpy(expected).to(torch.bfloat16))


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "cannot open"), (b"PK\x03\x04" + bytes(60), "magic"), (b"GGUF" + bytes(60), "version 0")],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=words):
        GGUFFile(path)


@pytest.mark.parametrize("keep", [0.02, 0.1, 0.5, 0.99])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "m.gguf"
    write(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(ModelError):
        GGUFFile(path)


@pytest.mark.model
def test_bundled_weights_decode_as_the_package_decodes_them(gguf_path: Path) -> None:
    ours = GGUFFile(gguf_path)
    reader = gguf.GGUFReader(gguf_path)
    assert set(ours.tensors) == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors[::37]:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(ours.read(tensor.name, torch.float32).numpy(), expected), tensor.name
