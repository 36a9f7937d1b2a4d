"""What is measured of an engine through its API. Each measure gives one number for one endpoint; holds no state but prompts.

- ``decode``: tokens a second over all streams, from the first token of the first stream to the last token of the last. The
  prompts have been sent before, so that what is left of their prefill is what an engine's prefix cache does not cover.
- ``prefill``: prompt tokens over the time to the first token, the prompt never seen before.
- ``cold``, ``warm``: seconds to the first token of a prefix and 32 new tokens, the prefix never seen, or seen before.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tenuto_server.bench.endpoint import Answer, Endpoint, EndpointFailed
from tenuto_server.bench.prompts import Prompts

NEW_TOKENS = 32
WARM_REPEATS = 3
KINDS = ("decode", "prefill", "cold", "warm")

Prompt = list[int]


@dataclass(frozen=True)
class Measure:
    """``prepare``: what is done once per endpoint before the rounds, each a request. ``run(endpoint, round)``: one value;
    in one round every endpoint gets the same prompts. ``more_is_better``: else less is. ``tokens``: the context it needs."""

    name: str
    unit: str
    more_is_better: bool
    tokens: int
    prepare: tuple[Callable[[Endpoint], object], ...]
    run: Callable[[Endpoint, int], float]

    def ratio(self, ours: float, theirs: float) -> float:
        """How many times better ours is."""
        return ours / theirs if self.more_is_better else theirs / ours


def decode_rate(endpoint: Endpoint, prompts: Sequence[Prompt], count: int, sessions: Sequence[str] = ()) -> float:
    """Tokens a second of one greedy stream per prompt, all started at once. Raises ``EndpointFailed``."""
    answers: list[tuple[float, Answer]] = []
    failures: list[EndpointFailed] = []

    def run(prompt: Prompt, session: str | None) -> None:
        began = time.perf_counter()
        try:
            answers.append((began, endpoint.stream(prompt, count, session)))
        except EndpointFailed as error:
            failures.append(error)

    names: Sequence[str | None] = sessions or [None] * len(prompts)
    threads = [threading.Thread(target=run, args=pair) for pair in zip(prompts, names, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    first = min(began + answer.times[0] for began, answer in answers)
    last = max(began + answer.times[-1] for began, answer in answers)
    decoded = sum(answer.tokens - 1 for _, answer in answers)
    if decoded < len(prompts) or last <= first:
        raise EndpointFailed(f"{endpoint.name}: no stream came in pieces, so that decode cannot be timed")
    return decoded / (last - first)


def decode(prompts: Prompts, streams: int, context: int, count: int, known: dict[int, list[Prompt]]) -> Measure:
    """``known``: prompts of a context by its length, shared by measures with other numbers of streams."""
    mine = known.setdefault(context, [])
    fresh = [prompts.take(context) for _ in range(streams - len(mine))]
    mine.extend(fresh)
    chosen = mine[:streams]
    warm = tuple(lambda endpoint, p=prompt: endpoint.stream(p, 1) for prompt in fresh)
    return Measure(
        f"decode, {streams} stream{'s' * (streams > 1)}, {context} context",
        "tokens/s",
        True,
        context + count,
        warm,
        lambda endpoint, _: decode_rate(endpoint, chosen, count),
    )


def prefill(prompts: Prompts, context: int, rounds: int) -> Measure:
    """``rounds`` prompts of ``context`` tokens, one for each."""
    fresh = [prompts.take(context) for _ in range(rounds)]
    return Measure(
        f"prefill, {context} tokens",
        "tokens/s",
        True,
        context + 1,
        (),
        lambda endpoint, number: context / endpoint.stream(fresh[number], 1).times[0],
    )


def cold(prompts: Prompts, context: int, rounds: int) -> Measure:
    """Time to first token where nothing is cached."""
    fresh = [prompts.take(context + NEW_TOKENS) for _ in range(rounds)]
    return Measure(
        f"TTFT, {context} + {NEW_TOKENS} tokens, cold",
        "s",
        False,
        context + NEW_TOKENS + 4,
        (),
        lambda endpoint, number: endpoint.stream(fresh[number], 4).times[0],
    )


def warm(prompts: Prompts, context: int, rounds: int) -> Measure:
    """Time to first token where all but the last tokens are cached; the median of a few requests with other last tokens."""
    prefix = prompts.take(context)
    ends = [[prompts.take(NEW_TOKENS) for _ in range(WARM_REPEATS)] for _ in range(rounds)]

    def run(endpoint: Endpoint, number: int) -> float:
        return statistics.median(endpoint.stream([*prefix, *end], 4).times[0] for end in ends[number])

    return Measure(
        f"TTFT, {context} + {NEW_TOKENS} tokens, warm",
        "s",
        False,
        context + NEW_TOKENS + 4,
        (lambda endpoint: endpoint.stream(prefix, 1),),
        run,
    )
