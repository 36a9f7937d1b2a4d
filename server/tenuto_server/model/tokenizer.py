"""Text to token ids and back.

``Tokenizer`` is immutable after construction and safe to share between threads; ``IncrementalDecoder`` owns the undecoded
tail of one stream. Two encoders stand behind the same class of methods: ``BpeTokenizer`` (tiktoken, for byte-level BPE
whose ids follow its merges) and ``LibraryTokenizer`` (the ``tokenizers`` library, for everything else).
"""

from __future__ import annotations

import codecs
import json
import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tiktoken

from tenuto_server.errors import ModelError
from tenuto_server.model.vocabulary import (
    BYTE_OF_CHAR,
    Vocabulary,
    require_complete,
    token_to_bytes,
    vocabulary_from_gguf,
    vocabulary_from_tokenizer_json,
)

_CUT = 200_000  # characters; see BpeTokenizer.encode


class Tokenizer(ABC):
    """``vocab_size``: one more than the highest id. ``special_ids``: control tokens, never part of visible text.
    ``eos_ids``: ids that end a generation. ``add_bos``: whether plain text starts with ``bos_id`` (``encode`` never adds it:
    chat templates write their own)."""

    vocab_size: int
    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]
    bos_id: int | None
    add_bos: bool

    @abstractmethod
    def encode(self, text: str, allow_special: bool = True) -> list[int]:
        """Token ids of ``text``. With ``allow_special`` the text of a control token becomes that token; without, it is
        encoded like any other text (what user input deserves). Never raises for any ``str``."""

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for; ``b""`` for an id outside the vocabulary."""

    @abstractmethod
    def token_id(self, text: str) -> int | None:
        """The id of an added (special or user-defined) token, by its text."""

    def encode_ordinary(self, text: str) -> list[int]:
        """``encode`` with control tokens treated as plain text."""
        return self.encode(text, allow_special=False)

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        special = self.special_ids if skip_special else ()
        return b"".join(self.token_bytes(i) for i in ids if i not in special).decode("utf-8", "replace")

    def incremental(self, skip_special: bool = True, shown: frozenset[int] = frozenset()) -> IncrementalDecoder:
        """A decoder for one stream of generated ids. ``shown``: control tokens that it does not skip."""
        return IncrementalDecoder(self, skip_special, shown)


class IncrementalDecoder:
    """Feeds on ids, yields text as soon as it is complete UTF-8. Cost is linear in the bytes seen."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, shown: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids - shown if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, *ids: int) -> str:
        """Text that became complete with these ids (possibly empty)."""
        skip, bytes_of = self._skip, self._tokenizer.token_bytes
        return self._utf8.decode(b"".join([bytes_of(i) for i in ids if i not in skip]))

    def finish(self) -> str:
        """What is left: U+FFFD for an unfinished character. The decoder is fresh afterwards."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


class BpeTokenizer(Tokenizer):
    """Byte-level BPE through tiktoken. The vocabulary must satisfy ``Vocabulary.exact_ranks``."""

    def __init__(self, vocabulary: Vocabulary, eos_ids: tuple[int, ...] = ()) -> None:
        self.vocab_size = vocabulary.size
        self.special_ids = vocabulary.special
        self.eos_ids, self.bos_id, self.add_bos = eos_ids, vocabulary.bos_id, vocabulary.add_bos
        self._added = vocabulary.added
        self._user_defined = {text for text, index in vocabulary.added.items() if index not in vocabulary.special}
        self._nfc = vocabulary.nfc
        ranks = {token_to_bytes(token): index for token, index in vocabulary.tokens.items()}
        # tiktoken insists on all 256 single bytes; the ones a vocabulary lacks (control characters, mostly) get ids beyond
        # it. The reference removes such bytes before it merges, so that their neighbours meet: see encode.
        missing = [bytes([b]) for b in range(256) if bytes([b]) not in ranks]
        ranks.update({byte: self.vocab_size + n for n, byte in enumerate(missing)})
        self._lacks_bytes = bool(missing)
        self._vocabulary = vocabulary
        self._library: LibraryTokenizer | None = None
        self._encoding = tiktoken.Encoding(
            "model", pat_str=vocabulary.pattern, mergeable_ranks=ranks, special_tokens=vocabulary.added
        )
        self._bytes = [b""] * self.vocab_size
        for token, index in vocabulary.tokens.items():
            self._bytes[index] = token_to_bytes(token)
        for text, index in vocabulary.added.items():
            self._bytes[index] = text.encode()
        self._split = re.compile("(" + "|".join(map(re.escape, self._added)) + ")") if self._added else None

    def encode(self, text: str, allow_special: bool = True) -> list[int]:
        allowed = self._added.keys() if allow_special else self._user_defined
        if self._nfc and not unicodedata.is_normalized("NFC", text):
            text = self._normalize(text)
        try:
            ids = self._encoding.encode(text, allowed_special=set(allowed), disallowed_special=())
        except ValueError:
            # The pattern's backtracking overflows on a run of a million spaces. Cutting the text changes tokens only
            # where a cut falls into such a run.
            pieces = (text[i : i + _CUT] for i in range(0, len(text), _CUT))
            ids = [
                i for p in pieces for i in self._encoding.encode(p, allowed_special=set(allowed), disallowed_special=())
            ]
        if self._lacks_bytes and ids and max(ids) >= self.vocab_size:
            self._library = self._library or LibraryTokenizer(serialize(self._vocabulary))
            return self._library.encode(text, allow_special)
        return ids

    def _normalize(self, text: str) -> str:
        # Added tokens are cut out first: a combining mark after one must not fuse with its last character.
        pieces = self._split.split(text) if self._split else [text]
        return "".join(p if p in self._added else unicodedata.normalize("NFC", p) for p in pieces)

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_id(self, text: str) -> int | None:
        return self._added.get(text)


class LibraryTokenizer(Tokenizer):
    """Any tokenizer that the ``tokenizers`` library can run (``serialized``: the text of a tokenizer.json)."""

    def __init__(self, serialized: str, eos_ids: tuple[int, ...] = (), bos: str | None = None) -> None:
        import tokenizers

        # Whether control tokens are recognised is a property of the object there, so there are two objects.
        self._with_special = tokenizers.Tokenizer.from_str(serialized)
        self._plain = tokenizers.Tokenizer.from_str(serialized)
        self._plain.encode_special_tokens = True
        raw = json.loads(serialized)
        added = self._with_special.get_added_tokens_decoder()
        self.vocab_size = 1 + max(self._with_special.get_vocab(with_added_tokens=True).values())
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self._added = {token.content: index for index, token in added.items()}
        self.eos_ids, self.add_bos = eos_ids, bos is not None
        self.bos_id = self._added.get(bos) if bos else None
        byte_level = '"ByteLevel"' in json.dumps([raw.get("decoder"), raw.get("pre_tokenizer")])
        self._bytes = [b""] * self.vocab_size
        for token, index in self._with_special.get_vocab(with_added_tokens=True).items():
            self._bytes[index] = token.encode() if token in self._added else _piece_bytes(token, byte_level)

    def encode(self, text: str, allow_special: bool = True) -> list[int]:
        # The library takes valid Unicode only; a lone surrogate (half of a cut escape) becomes U+FFFD.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        backend = self._with_special if allow_special else self._plain
        return list(backend.encode(text, add_special_tokens=False).ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_id(self, text: str) -> int | None:
        return self._added.get(text)

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        return str(self._with_special.decode(list(ids), skip_special_tokens=skip_special))


def _piece_bytes(token: str, byte_level: bool) -> bytes:
    if byte_level and all(char in BYTE_OF_CHAR for char in token):
        return token_to_bytes(token)
    if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()


def tokenizer_from_gguf(metadata: Mapping[str, Any], eos_ids: tuple[int, ...] = ()) -> Tokenizer:
    """Build from ``tokenizer.ggml.*``; ``UnsupportedModelError`` if it is not byte-level BPE with a known pattern."""
    vocabulary = require_complete(vocabulary_from_gguf(metadata))
    if vocabulary.exact_ranks():
        return BpeTokenizer(vocabulary, eos_ids)
    bos = next((text for text, index in vocabulary.added.items() if index == vocabulary.bos_id), None)
    return LibraryTokenizer(serialize(vocabulary), eos_ids, bos if vocabulary.add_bos else None)


def tokenizer_from_json(path: Path, eos_ids: tuple[int, ...] = (), bos: str | None = None) -> Tokenizer:
    """Build from ``tokenizer.json``. ``bos``: the token that plain text must start with, where the caller knows it
    (tokenizer_config.json); otherwise the file's own post-processor decides."""
    try:
        text = path.read_text(encoding="utf-8")
        raw = json.loads(text)
        vocabulary = vocabulary_from_tokenizer_json(raw)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot read {path.name}: {error}") from None
    if vocabulary is None or not vocabulary.exact_ranks():
        return LibraryTokenizer(text, eos_ids, bos)
    tokenizer = BpeTokenizer(vocabulary, eos_ids)
    if bos is not None:
        tokenizer.bos_id, tokenizer.add_bos = tokenizer.token_id(bos), True
    return tokenizer


def serialize(vocabulary: Vocabulary) -> str:
    """The vocabulary as a ``tokenizer.json``, for programs that read only that."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE(vocabulary.tokens, vocabulary.merges, ignore_merges=vocabulary.ignore_merges))
    split = pre_tokenizers.Split(Regex(vocabulary.pattern), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    if vocabulary.nfc:
        backend.normalizer = normalizers.NFC()
    by_id = sorted(vocabulary.added.items(), key=lambda item: item[1])
    raw = json.loads(backend.to_str())
    # Written by hand because the library numbers added tokens itself, after the vocabulary.
    raw["added_tokens"] = [
        {
            "id": index,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": index in vocabulary.special,
        }
        for text, index in by_id
    ]
    raw["model"]["vocab"].update(by_id)
    return json.dumps(raw, ensure_ascii=False)
