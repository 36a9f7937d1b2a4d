"""A running server as its clients see it: streamed completions timed piece by piece, over one new connection each.

``Endpoint`` owns nothing but its address and what it found out there. The pieces are only stamped while they arrive and read
afterwards, so that the measuring side takes as little of the machine as it can.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tenuto_server.errors import TenutoServerError

TIMEOUT_S = 600.0
DEMOTE_S_MAX = 60.0


class EndpointFailed(TenutoServerError):
    """An endpoint did not answer, or not what was asked for; the message names it and says what it said."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed answer. ``times``: seconds from sending to each piece of text (to the end, if there was none).
    ``tokens``: as the endpoint counts them, else the number of pieces. ``report``: the ``tenuto`` object, if it sent one."""

    times: tuple[float, ...]
    tokens: int
    report: dict[str, Any] = field(default_factory=dict)


class Endpoint:
    """``url``: with or without ``/v1``. ``to_text``: token ids to text, for servers that take no ids as a prompt."""

    def __init__(self, name: str, url: str, to_text: Callable[[Sequence[int]], str] | None = None) -> None:
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise EndpointFailed(f"{name}: {url!r} is not an http address")
        self.name, self.url = name, f"{parts.scheme}://{parts.netloc}"
        self._make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._place, self._path = parts.netloc, parts.path.rstrip("/").removesuffix("/v1")
        self._to_text = to_text
        self.takes_ids = True
        self._model: str | None = None
        self._card: dict[str, Any] = {}

    @property
    def model(self) -> str:
        """The first model it lists."""
        if self._model is None:
            data = self.ask("GET", "/v1/models").get("data") or [{}]
            if not data[0].get("id"):
                raise EndpointFailed(f"{self.name}: /v1/models lists no model")
            self._model, self._card = str(data[0]["id"]), data[0]
        return self._model

    @property
    def context_tokens(self) -> int | None:
        """What it says a context may have."""
        return self._card.get("max_model_len") if self.model else None

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """A JSON answer. Raises ``EndpointFailed``."""
        with self._connection(path) as connection:
            raw = None if body is None else json.dumps(body)
            connection.request(method, self._path + path, raw, {"content-type": "application/json"})
            answer = connection.getresponse()
            data = answer.read()
        if answer.status != 200:
            raise EndpointFailed(f"{self.name}: {path} answered {answer.status}: {data[:300].decode(errors='replace')}")
        try:
            return json.loads(data)
        except ValueError:
            raise EndpointFailed(f"{self.name}: {path} did not answer with JSON") from None

    def probe(self) -> None:
        """Finds the model and whether prompts may be token ids. Raises ``EndpointFailed`` when neither kind works."""
        ids = self._tokens_anywhere()
        try:
            self.stream(ids, 2)
        except EndpointFailed as error:
            if self._to_text is None:
                raise
            self.takes_ids = False
            try:
                self.stream(ids, 2)
            except EndpointFailed:
                raise error from None

    @staticmethod
    def _tokens_anywhere() -> list[int]:
        return [260 + 7 * n for n in range(12)]  # in every vocabulary, the toy one included

    def about(self) -> dict[str, Any]:
        """Its model and, where it tells, its version."""
        found: dict[str, Any] = {"name": self.name, "url": self.url, "model": self.model, "prompts": "ids"}
        if not self.takes_ids:
            found["prompts"] = "text"
        for path, key in (("/version", "version"), ("/health", "health")):
            with contextlib.suppress(EndpointFailed):
                answer = self.ask("GET", path)
                found[key] = answer.get("detail", {}).get("about", answer) if isinstance(answer, dict) else answer
        return found

    def stream(self, prompt: Sequence[int], count: int, session: str | None = None, **fields: Any) -> Answer:
        """``count`` greedy tokens after ``prompt``, the end of text ignored. Raises ``EndpointFailed``."""
        text_or_ids: Any = list(prompt)
        if not self.takes_ids and self._to_text is not None:
            text_or_ids = self._to_text(prompt)
        body = {"model": self.model, "prompt": text_or_ids, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}, **fields}
        raw = json.dumps(body if session is None else {**body, "session_id": session})
        path, lines = "/v1/completions", []
        with self._connection(path) as connection:
            connection.connect()
            began = time.perf_counter()
            connection.request("POST", self._path + path, raw, {"content-type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                said = answer.read()[:300].decode(errors="replace")
                raise EndpointFailed(f"{self.name}: {path} answered {answer.status}: {said}")
            for line in answer:
                if line.startswith(b"data: {"):
                    lines.append((time.perf_counter() - began, line))
            ended = time.perf_counter() - began
        return self._read(lines, ended)

    def _read(self, lines: Sequence[tuple[float, bytes]], ended: float) -> Answer:
        times: list[float] = []
        tokens = 0
        report: dict[str, Any] = {}
        for at, line in lines:
            event = json.loads(line[6:])
            if "error" in event:
                raise EndpointFailed(f"{self.name}: the stream ended with {str(event['error'])[:300]}")
            if any(choice.get("text") for choice in event.get("choices") or ()):
                times.append(at)
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            report = event.get("tenuto", report)
        return Answer(tuple(times or (ended,)), tokens or len(times), report)

    @contextlib.contextmanager
    def _connection(self, path: str) -> Any:
        connection = self._make(self._place, timeout=TIMEOUT_S)
        try:
            yield connection
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise EndpointFailed(f"{self.name}: {self.url}{path} did not answer ({reason})") from None
        finally:
            connection.close()

    # ---- what only our own server knows ------------------------------------------------------------------------

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text."""
        tokens: list[int] = self.ask("POST", "/tokenize", {"prompt": text})["tokens"]
        return tokens

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of ids."""
        return str(self.ask("POST", "/detokenize", {"tokens": list(tokens)})["prompt"])

    def hint(self, kind: str, session: str, /, **payload: Any) -> None:
        """Sends one hint at once. Raises ``EndpointFailed`` when it is rejected."""
        action = {"action_id": "1", "action_type": kind, "payload": {"session": session, **payload}}
        receipt = self.ask("POST", "/v1/kv_hints", {"actions": [action]})["receipts"][0]
        if receipt["outcome"] == "rejected":
            raise EndpointFailed(f"{self.name}: {kind} was rejected: {receipt.get('reason')}")

    def resident(self, session: str) -> dict[str, int]:
        """Tokens of a session by tier."""
        found: dict[str, int] = self.ask("GET", f"/v1/sessions/{session}").get("resident", {})
        return found

    def demote(self, session: str, tier: str) -> None:
        """Has all blocks of a session moved off the device, to ``tier``. Raises ``EndpointFailed`` if they stay."""
        give_up = time.perf_counter() + DEMOTE_S_MAX
        while "device" in self.resident(session):
            if time.perf_counter() > give_up:
                raise EndpointFailed(f"{self.name}: the blocks of {session} would not move to {tier}")
            self.hint("kv.demote", session, tier=tier)
            time.sleep(0.05)
