"""The fields of generation requests: types, ranges, and what is refused because it would change the tokens.

Holds no state. Unknown fields are accepted and ignored; a known field that this server cannot honour is refused by name.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tenuto_server.api.errors import bad_request, invalid, unsupported
from tenuto_server.engine.events import Sampling

STOPS_MAX = 4
STOP_CHARS_MAX = 1024
_SEED_MASK = (1 << 63) - 1

Model = TypeVar("Model", bound="GenerationRequest")
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]


class StreamOptions(BaseModel):
    """``include_usage``: one more chunk, without choices, carries the usage."""

    model_config = ConfigDict(extra="ignore", strict=True)
    include_usage: bool | None = None


class GenerationRequest(BaseModel):
    """What chat and plain completions have in common. Types are strict: a number in quotes is not a number."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] | None = None
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 31)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None

    n: int | None = None
    min_p: FiniteFloat | None = None
    frequency_penalty: FiniteFloat | None = None
    presence_penalty: FiniteFloat | None = None
    repetition_penalty: FiniteFloat | None = None
    logit_bias: dict[str, Any] | None = None

    session_id: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    metadata: dict[str, Any] | None = None
    kv_hints: Any = None

    def refuse_unsupported(self) -> None:
        """400 naming the first field that asks for something else than this server does."""
        if self.n not in (None, 1):
            raise unsupported("n", "only 1 is supported")
        for name, neutral in (
            ("frequency_penalty", 0.0),
            ("presence_penalty", 0.0),
            ("repetition_penalty", 1.0),
            ("min_p", 0.0),
        ):
            if getattr(self, name) not in (None, neutral):
                raise unsupported(name, f"only {neutral:g} is supported")
        if self.logit_bias:
            raise unsupported("logit_bias", "not supported")

    def stops(self) -> tuple[str, ...]:
        """The stop strings. Raises 400 for too many, empty or overlong ones."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return check_stops(stops, STOPS_MAX, "stop")

    def limit(self) -> int | None:
        """The number of tokens that the client allows, if it says so."""
        return self.max_tokens

    def sampling(self, max_tokens: int, eos_ids: tuple[int, ...]) -> Sampling:
        """How to draw. Without ``temperature`` it is 1, the default of this interface; without ``seed``, a random one."""
        top_k = self.top_k if self.top_k is not None and self.top_k > 0 else 0
        return Sampling(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else float(self.temperature),
            top_p=1.0 if self.top_p is None else float(self.top_p),
            top_k=top_k,
            seed=(secrets.randbits(63) if self.seed is None else self.seed) & _SEED_MASK,
            stop_ids=frozenset(() if self.ignore_eos else eos_ids) | frozenset(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
        )


class ChatRequest(GenerationRequest):
    """``POST /v1/chat/completions``. Messages and tools are checked where they are rendered (``prompt``)."""

    messages: Annotated[list[Any], Field(min_length=1)]
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def limit(self) -> int | None:
        """``max_completion_tokens`` before its older name."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def refuse_unsupported(self) -> None:
        """See ``GenerationRequest``."""
        super().refuse_unsupported()
        if self.logprobs or self.top_logprobs:
            raise unsupported("logprobs" if self.logprobs else "top_logprobs", "not supported")
        if self.modalities and self.modalities != ["text"]:
            raise unsupported("modalities", "only text is supported")
        reserved = {"messages", "tools", "add_generation_prompt"} & set(self.chat_template_kwargs or ())
        if reserved:
            raise bad_request(f"chat_template_kwargs: may not set {min(reserved)}", "chat_template_kwargs")

    def response_schema(self) -> dict[str, Any] | None:
        """The JSON schema that the answer must follow; None: any text. Raises 400 naming the field."""
        wanted, where = self.response_format or {}, "response_format"
        kind = wanted.get("type", "text")
        if kind == "text":
            return None
        if kind == "json_object":
            return {"type": "object"}
        if kind != "json_schema":
            raise unsupported(f"{where}.type", "expected text, json_object or json_schema")
        inner = wanted.get("json_schema")
        if not isinstance(inner, dict):
            raise bad_request(f"{where}.json_schema: expected an object", f"{where}.json_schema")
        schema = inner.get("schema", {"type": "object"})
        if not isinstance(schema, dict):
            raise bad_request(f"{where}.json_schema.schema: expected an object", f"{where}.json_schema.schema")
        return schema


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``. ``prompt``: text or token ids (or a list with one of them)."""

    prompt: str | list[Any]
    suffix: str | None = None
    echo: bool | None = None
    best_of: int | None = None
    logprobs: int | None = None

    def refuse_unsupported(self) -> None:
        """See ``GenerationRequest``."""
        super().refuse_unsupported()
        if self.best_of not in (None, 1):
            raise unsupported("best_of", "only 1 is supported")
        for name in ("suffix", "echo"):
            if getattr(self, name):
                raise unsupported(name, "not supported")
        if self.logprobs is not None:
            raise unsupported("logprobs", "not supported")

    def one_prompt(self) -> str | list[int]:
        """The prompt. Raises 400 for a batch of several, or for anything else than text and ids."""
        prompt: Any = self.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return prompt
        if prompt and all(isinstance(item, (str, list)) for item in prompt):
            raise unsupported("prompt", "one prompt per request")
        if not prompt or not all(type(item) is int for item in prompt):
            raise bad_request("prompt: expected text or a non-empty array of token ids", "prompt")
        return list(prompt)


def check_stops(stops: tuple[str, ...], most: int, field: str) -> tuple[str, ...]:
    """The stop strings themselves. Raises 400 for too many, empty or overlong ones."""
    if len(stops) > most:
        raise bad_request(f"{field}: {len(stops)} strings exceed the limit of {most}", field)
    for stop in stops:
        if not 1 <= len(stop) <= STOP_CHARS_MAX:
            raise bad_request(f"{field}: each string must have 1 to {STOP_CHARS_MAX} characters", field)
    return stops


def parse(model: type[Model], body: dict[str, Any]) -> Model:
    """A validated request. Raises 400 naming the field."""
    try:
        request = model.model_validate(body)
    except ValidationError as error:
        raise invalid(error) from None
    except RecursionError:
        raise bad_request("body: nested too deeply", "body", "invalid_json") from None
    request.refuse_unsupported()
    return request
