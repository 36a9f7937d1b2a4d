"""What a byte-level BPE tokenizer is made of, read from a GGUF header or from ``tokenizer.json``.

Owns no state. A ``Vocabulary`` holds the facts (tokens as bytes, merges, added tokens, split pattern); ``tokenizer.py``
turns them into an encoder. ``exact_ranks`` says whether tiktoken's merge rule (lowest rank first) provably follows the
vocabulary's own merge list; where it does not, the ``tokenizers`` library must encode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tenuto_server.errors import ModelError
from tenuto_server.model.config import UnsupportedModelError

# The published split patterns. Both libraries that evaluate them (tiktoken and tokenizers) understand this syntax.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# GPT-2 after a split of single digits, as one pass: a digit ends the preceding run of spaces like the end of text does.
DIGITS_GPT2_PATTERN = (
    r"\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"  # no \p{N} inside words
)
_LLAMA3_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
LLAMA3_PATTERN = _LLAMA3_HEAD + r"\p{N}{1,3}" + _LLAMA3_TAIL
QWEN2_PATTERN = _LLAMA3_HEAD + r"\p{N}" + _LLAMA3_TAIL

_GGUF_PATTERNS = {
    "smollm": DIGITS_GPT2_PATTERN,
    "starcoder": DIGITS_GPT2_PATTERN,
    "refact": DIGITS_GPT2_PATTERN,
    "command-r": DIGITS_GPT2_PATTERN,
    "gpt-2": GPT2_PATTERN,
    "llama-bpe": LLAMA3_PATTERN,
    "llama3": LLAMA3_PATTERN,
    "qwen2": QWEN2_PATTERN,
}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where printable, else the next free code point from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(b): b for b in printable}
    for number, byte in enumerate(b for b in range(256) if b not in set(printable)):
        alphabet[chr(256 + number)] = byte
    return alphabet


BYTE_OF_CHAR = _byte_alphabet()
CHAR_OF_BYTE = {byte: char for char, byte in BYTE_OF_CHAR.items()}
# For str.translate: decoding a token through latin-1 is far quicker than a lookup per character.
_TO_LATIN1 = {ord(char): byte for char, byte in BYTE_OF_CHAR.items()}


def token_to_bytes(token: str) -> bytes:
    """The bytes that a byte-level token string stands for; ``ValueError`` if it is not one."""
    try:
        return token.translate(_TO_LATIN1).encode("latin-1")
    except UnicodeEncodeError:
        raise ValueError(f"{token!r} is not a byte-level token") from None


@dataclass(frozen=True)
class Vocabulary:
    """``tokens``: byte-level string -> id, without added tokens. ``added``: text matched before BPE -> id; those in
    ``special`` are control tokens. ``nfc``: text is NFC-normalised first. ``ignore_merges``: a piece that is a token as a
    whole is taken as it stands, reachable by merges or not."""

    tokens: dict[str, int]
    merges: list[tuple[str, str]]
    added: dict[str, int]
    special: frozenset[int]
    pattern: str
    nfc: bool = False
    ignore_merges: bool = False
    bos_id: int | None = None
    add_bos: bool = False

    @property
    def size(self) -> int:
        """One more than the highest id."""
        return 1 + max(max(self.tokens.values(), default=-1), max(self.added.values(), default=-1))

    def exact_ranks(self) -> bool:
        """True if ids rise along the merge list, each merge makes a token of its own and each longer token has a merge:
        then "lowest id first" is the merge order. Also false where one added token begins another, because tiktoken
        does not promise to match the longest."""
        last = -1
        for left, right in self.merges:
            token_id = self.tokens.get(left + right)
            if token_id is None or token_id <= last:
                return False
            last = token_id
        if not self.ignore_merges and sum(len(token) > 1 for token in self.tokens) != len(self.merges):
            return False
        ordered = sorted(self.added)
        return not any(longer.startswith(shorter) for shorter, longer in pairwise(ordered))


def vocabulary_from_gguf(metadata: Mapping[str, Any]) -> Vocabulary:
    """Read ``tokenizer.ggml.*``. Only byte-level BPE (``gpt2``) with a known pre-tokenizer is supported."""
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "missing")
    if model != "gpt2":
        raise UnsupportedModelError(
            f"GGUF tokenizer {model!r} is not supported (only byte-level BPE, 'gpt2'); a safetensors folder with tokenizer.json is"
        )
    if pre not in _GGUF_PATTERNS:
        raise UnsupportedModelError(f"GGUF pre-tokenizer {pre!r} is not supported (known: {', '.join(_GGUF_PATTERNS)})")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    control, user_defined, unused = 3, 4, 5
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    return Vocabulary(
        tokens={t: i for i, t in enumerate(tokens) if types[i] not in (control, user_defined, unused)},
        merges=[_split_merge(merge) for merge in metadata["tokenizer.ggml.merges"]],
        added={t: i for i, t in enumerate(tokens) if types[i] in (control, user_defined)},
        special=frozenset(i for i, kind in enumerate(types) if kind == control),
        pattern=_GGUF_PATTERNS[pre],
        nfc=pre == "qwen2",
        ignore_merges=pre in ("llama-bpe", "llama3"),
        bos_id=None if bos is None else int(bos),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", pre in ("llama-bpe", "llama3"))),
    )


def _split_merge(merge: str | list[str]) -> tuple[str, str]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right


def vocabulary_from_tokenizer_json(raw: Mapping[str, Any]) -> Vocabulary | None:
    """Read a parsed ``tokenizer.json``; ``None`` if it is not a byte-level BPE that this module expresses exactly."""
    model = raw.get("model") or {}
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        return None
    if any(model.get(option) for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")):
        return None
    pattern = _pattern_of(raw.get("pre_tokenizer"))
    normalizer = raw.get("normalizer")
    if pattern is None or (normalizer and normalizer.get("type") != "NFC"):
        return None
    added_tokens = raw.get("added_tokens") or []
    if any(token.get(option) for token in added_tokens for option in ("lstrip", "rstrip", "single_word")):
        return None
    if normalizer and any(token.get("normalized") and not token["content"].isascii() for token in added_tokens):
        return None
    added = {token["content"]: int(token["id"]) for token in added_tokens}
    try:
        tokens = {token: int(index) for token, index in model["vocab"].items() if token not in added}
        merges = [_split_merge(merge) for merge in model["merges"]]
        for token in tokens:
            token_to_bytes(token)
    except ValueError:
        return None
    if model.get("unk_token") and not BYTE_OF_CHAR.keys() <= tokens.keys():
        return None  # bytes without a token become the unknown token there
    bos = _template_bos(raw.get("post_processor"))
    return Vocabulary(
        tokens=tokens,
        merges=merges,
        added=added,
        special=frozenset(int(token["id"]) for token in added_tokens if token.get("special")),
        pattern=pattern,
        nfc=normalizer is not None,
        ignore_merges=bool(model.get("ignore_merges")),
        bos_id=added.get(bos) if bos else None,
        add_bos=bos is not None,
    )


def _pattern_of(pre_tokenizer: Any) -> str | None:
    """The single split pattern that equals this chain of pre-tokenizers, or None."""
    if not pre_tokenizer:
        return None
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    byte_level = steps[-1]
    if byte_level.get("type") != "ByteLevel" or byte_level.get("add_prefix_space"):
        return None
    regex = byte_level.get("use_regex", True)
    if len(steps) == 1:
        return GPT2_PATTERN if regex else None
    first = steps[0]
    if len(steps) != 2:
        return None
    if first.get("type") == "Digits" and first.get("individual_digits") and regex:
        return DIGITS_GPT2_PATTERN
    isolated = first.get("behavior") == "Isolated" and not first.get("invert")
    if first.get("type") == "Split" and isolated and not regex and "Regex" in first.get("pattern", {}):
        return str(first["pattern"]["Regex"])
    return None


def _template_bos(post_processor: Any) -> str | None:
    """The token that the post-processor puts before a single text, if any."""
    if not post_processor:
        return None
    steps = post_processor["processors"] if post_processor.get("type") == "Sequence" else [post_processor]
    for step in steps:
        single = step.get("single") or []
        if step.get("type") == "TemplateProcessing" and single and "SpecialToken" in single[0]:
            return str(single[0]["SpecialToken"]["id"])
    return None


def require_complete(vocabulary: Vocabulary) -> Vocabulary:
    """The vocabulary itself; ``ModelError`` if a merge names a token that does not exist."""
    for left, right in vocabulary.merges:
        if left + right not in vocabulary.tokens:
            raise ModelError(f"tokenizer merge {left!r} {right!r} makes no token of the vocabulary")
    return vocabulary
