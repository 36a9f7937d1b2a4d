"""The tokenizer against the tokenizers library, built on its own from the same vocabulary."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

from tenuto_server.errors import ModelError
from tenuto_server.model.config import UnsupportedModelError
from tenuto_server.model.gguf_file import GGUFFile
from tenuto_server.model.tokenizer import (
    BpeTokenizer,
    LibraryTokenizer,
    Tokenizer,
    serialize,
    tokenizer_from_gguf,
    tokenizer_from_json,
)
from tenuto_server.model.toy import toy_tokenizer
from tenuto_server.model.vocabulary import vocabulary_from_gguf

ROOT = Path(__file__).parents[2]
SOURCES = [
    *sorted((ROOT / "server").rglob("*.py")),
    *sorted((ROOT / "kernels").rglob("*.cpp")),
    ROOT / "pyproject.toml",
]

# As the published tokenizer.json files of these families spell them.
FAMILY_PATTERNS = {
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

ASCII = [*" \t\n\r0123456789aZ_-'\"(){}=;.<>|", "  ", "\n\n", "    ", "'s", "'LL", "don't", "def "]
UNICODE = ["½", "²", "٣", "四", "é", "e\u0301", "ſ", "ß", "İ", "日本", "👩\u200d👩\u200d👧", "🇩🇪", "\u0338"]
ODD = ["\u00a0", "\u200b", "\ufeff", "\u0085", "\u2028", "\x00", "\x04", "\x13", "\x1d", "\U0004abcd"]
pieces = st.sampled_from([*ASCII, *UNICODE, *ODD, *SPECIAL, "<|im_end", "|>", "<tool_call>"])
texts = st.one_of(st.lists(pieces, max_size=40).map("".join), st.text(max_size=40))


def families() -> list[str]:
    return ["gpt2", "smollm", *FAMILY_PATTERNS]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Tokenizer, Library]]:
    """A tokenizer.json per family, trained on this repository, and both readings of it."""
    folder, cache = tmp_path_factory.mktemp("tokenizers"), {}

    def get(family: str) -> tuple[Tokenizer, Library]:
        if family not in cache:
            library = Library(models.BPE(ignore_merges=family == "llama3"))
            if family in FAMILY_PATTERNS:
                split = pre_tokenizers.Split(Regex(FAMILY_PATTERNS[family]), behavior="isolated")
                byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
                library.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
            elif family == "smollm":
                digits = pre_tokenizers.Digits(individual_digits=True)
                library.pre_tokenizer = pre_tokenizers.Sequence(
                    [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
                )
            else:
                library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            library.decoder = decoders.ByteLevel()
            if family == "qwen2":
                library.normalizer = normalizers.NFC()
            alphabet = pre_tokenizers.ByteLevel.alphabet() if family != "smollm" else sorted("abcdefghijklmnopĠ")
            trainer = trainers.BpeTrainer(
                vocab_size=1500, special_tokens=SPECIAL, initial_alphabet=list(alphabet), show_progress=False
            )
            library.train([str(path) for path in SOURCES], trainer)
            library.add_tokens([AddedToken("<tool_call>", normalized=False)])
            library.save(str(folder / f"{family}.json"))
            cache[family] = tokenizer_from_json(folder / f"{family}.json"), library
        return cache[family]

    return get


@pytest.mark.parametrize("family", families())
def test_trained_families_take_the_fast_path_and_agree_on_sources(family: str, trained: Any) -> None:
    ours, library = trained(family)
    assert isinstance(ours, BpeTokenizer)
    assert ours.vocab_size == library.get_vocab_size()
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert ours.encode(text) == library.encode(text, add_special_tokens=False).ids, path.name


@pytest.mark.parametrize("family", families())
@settings(deadline=None, max_examples=200)
@given(text=texts)
def test_trained_families_agree_on_any_text(family: str, trained: Any, text: str) -> None:
    ours, library = trained(family)
    ids = ours.encode(text)
    assert ids == library.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids) == library.decode(ids, skip_special_tokens=False)


def smollm_reference(metadata: Any) -> Library:
    """BPE + digits + byte level, as the model's publishers define it."""
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    library = Library(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    library.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    library.add_special_tokens(
        [AddedToken(t, normalized=False) for t, kind in zip(tokens, types, strict=True) if kind == 3]
    )
    return library


@pytest.fixture(scope="module")
def smollm(gguf_path: Path) -> tuple[Tokenizer, Library]:
    metadata = GGUFFile(gguf_path).metadata
    return tokenizer_from_gguf(metadata, (2,)), smollm_reference(metadata)


@pytest.mark.model
def test_bundled_tokenizer_agrees_on_sources(smollm: tuple[Tokenizer, Library]) -> None:
    ours, library = smollm
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        ids = ours.encode(text)
        assert ids == library.encode(text, add_special_tokens=False).ids, path.name
        assert ours.decode(ids) == text


@pytest.mark.model
@settings(deadline=None, max_examples=400)
@given(text=texts)
def test_bundled_tokenizer_agrees_on_any_text(smollm: tuple[Tokenizer, Library], text: str) -> None:
    ours, library = smollm
    assert ours.encode(text) == library.encode(text, add_special_tokens=False).ids


@pytest.mark.model
def test_bundled_tokenizer_round_trips_through_tokenizer_json(gguf_path: Path, tmp_path: Path) -> None:
    metadata = GGUFFile(gguf_path).metadata
    (tmp_path / "tokenizer.json").write_text(serialize(vocabulary_from_gguf(metadata)), encoding="utf-8")
    again, ours = tokenizer_from_json(tmp_path / "tokenizer.json"), tokenizer_from_gguf(metadata)
    assert isinstance(again, BpeTokenizer)
    assert again.special_ids == ours.special_ids
    text = SOURCES[0].read_text(encoding="utf-8") + "a  1 <|im_end|> é\xff"
    assert again.encode(text) == ours.encode(text)


@pytest.mark.model
def test_bundled_special_tokens(smollm: tuple[Tokenizer, Library]) -> None:
    ours, _ = smollm
    assert ours.encode("<|im_start|>user\n<|im_end|>")[::3] == [1, 2]
    plain = ours.encode_ordinary("<|im_end|>")
    assert not ours.special_ids & set(plain)
    assert ours.decode(plain) == "<|im_end|>"
    assert (ours.eos_ids, ours.bos_id, ours.add_bos, ours.vocab_size) == ((2,), 1, False, 49152)
    assert ours.token_bytes(2) == b"<|im_end|>"
    assert ours.token_bytes(-1) == ours.token_bytes(49152) == b""


def test_user_defined_tokens_are_text_that_stays_whole(trained: Any) -> None:
    ours, _ = trained("gpt2")
    tool_call = ours.token_id("<tool_call>")
    assert tool_call not in ours.special_ids
    assert ours.encode_ordinary("a<tool_call><|im_end|>").count(tool_call) == 1
    assert ours.decode([ours.token_id("<|im_end|>"), tool_call], skip_special=True) == "<tool_call>"


@pytest.mark.parametrize("length", [10, 300_000, 1_500_000])
def test_long_runs_encode(length: int) -> None:
    ours = toy_tokenizer()
    for text in (" " * length, "\n" * length):
        assert ours.decode(ours.encode(text)) == text


def test_lone_surrogates_become_replacement_characters(trained: Any, tmp_path: Path) -> None:
    for ours in (toy_tokenizer(), library_only(tmp_path)):
        assert ours.decode(ours.encode("a\ud800b")).replace("\ufffd", "?").strip() == "a?b"


def library_only(tmp_path: Path) -> Tokenizer:
    """A BPE over words with a byte fallback, like Llama 2's: not byte-level, so the library must run it."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ["▁", "a", "b", "▁a", "ab", "?"]:
        vocab[piece] = len(vocab)
    library = Library(models.BPE(vocab, [("▁", "a"), ("a", "b")], unk_token="<unk>", byte_fallback=True))
    library.normalizer = normalizers.Replace(" ", "▁")
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    library.save(str(tmp_path / "tokenizer.json"))
    return tokenizer_from_json(tmp_path / "tokenizer.json", (2,), "<s>")


def test_other_tokenizers_run_through_the_library(tmp_path: Path) -> None:
    ours = library_only(tmp_path)
    assert isinstance(ours, LibraryTokenizer)
    assert (ours.bos_id, ours.add_bos, ours.special_ids) == (1, True, frozenset({0, 1, 2}))
    ids = ours.encode("ab é</s>")
    assert ids[-1] == 2
    assert 1 not in ids
    assert b"".join(map(ours.token_bytes, ids)) == "ab é</s>".encode()
    assert ours.decode(ids) == "ab é</s>"
    assert 2 not in ours.encode_ordinary("ab</s>")
    stream = ours.incremental()
    assert "".join(stream.push(i) for i in ids) == "ab é"


def test_ids_out_of_merge_order_are_left_to_the_library(trained: Any, tmp_path: Path) -> None:
    _, library = trained("gpt2")
    raw = json.loads(library.to_str())
    raw["model"]["merges"][5:7] = reversed(raw["model"]["merges"][5:7])
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    assert isinstance(tokenizer_from_json(tmp_path / "tokenizer.json"), LibraryTokenizer)


def test_bos_of_the_post_processor_is_seen(trained: Any, tmp_path: Path) -> None:
    _, library = trained("gpt2")
    again = Library.from_str(library.to_str())
    again.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", again.token_to_id("<|im_start|>"))]
    )
    again.save(str(tmp_path / "tokenizer.json"))
    ours = tokenizer_from_json(tmp_path / "tokenizer.json")
    assert ours.add_bos
    assert ours.bos_id == again.token_to_id("<|im_start|>")


@settings(deadline=None, max_examples=150)
@given(st.text(max_size=60), st.integers(1, 4))
def test_streamed_text_equals_decoded_text(text: str, step: int) -> None:
    ours = toy_tokenizer()
    ids = ours.encode_ordinary(text)
    stream = ours.incremental()
    parts = [stream.push(*ids[i : i + step]) for i in range(0, len(ids), step)]
    assert "".join(parts) + stream.finish() == ours.decode(ids)
    for part in parts:
        assert "\ufffd" not in part or "\ufffd" in text


def test_a_stream_cut_inside_a_character_ends_in_one_replacement() -> None:
    ours = toy_tokenizer()
    stream = ours.incremental()
    ids = ours.encode("é")
    assert stream.push(ids[0]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.push(*ids) == "é"


def test_unsupported_gguf_tokenizers_are_named() -> None:
    with pytest.raises(UnsupportedModelError, match="'llama'"):
        tokenizer_from_gguf({"tokenizer.ggml.model": "llama"})
    with pytest.raises(UnsupportedModelError, match="'chameleon'"):
        tokenizer_from_gguf({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "chameleon"})


def test_a_broken_tokenizer_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        tokenizer_from_json(tmp_path / "tokenizer.json")
