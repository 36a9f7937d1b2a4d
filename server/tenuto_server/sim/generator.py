"""Sessions from published distributions, for those who have no trace: seeded, as many as are asked for. Pure.

Every number is of the KVCT corpus (410 coding-agent sessions, labels corrected) unless said otherwise: two clocks (tools in
seconds, people in minutes, both with heavy tails), tool steps per user turn, sizes, prefixes that break, compactions (TraceLab:
about 153K to 39K), subagents.
"""

from __future__ import annotations

from bisect import bisect_left
from math import exp, log
from random import Random

from tenuto_server.sim.traces import Child, PauseClass, Request, Session, Trace, service_s

# (seconds, share of the pauses that end and are no longer)
_PAUSES: dict[PauseClass, tuple[tuple[float, float], ...]] = {
    "tool": (
        (1, 0.0), (2, 0.012), (5, 0.255), (10, 0.553), (17.2, 0.709), (30, 0.809), (60, 0.874), (120, 0.924),
        (300, 0.968), (600, 0.984), (900, 0.992), (1800, 0.996), (37_400, 1.0),
    ),
    "human": (
        (1, 0.0), (2, 0.020), (5, 0.106), (10, 0.154), (17.2, 0.179), (30, 0.207), (60, 0.281), (120, 0.399),
        (300, 0.609), (600, 0.726), (900, 0.784), (1800, 0.878), (3600, 0.949), (36_200, 0.990), (77_600, 1.0),
    ),
}  # fmt: skip
# (tool steps in a user turn, share of turns that have no more)
_STEPS = ((0.5, 0.21), (1, 0.25), (5, 0.50), (18, 0.75), (40, 0.90), (56, 0.95), (91, 0.99), (150, 1.0))
# Lognormal sizes in tokens: (median, log-sd from the 90th percentile).
_GROWTH: dict[PauseClass, tuple[float, float]] = {"tool": (725, 1.28), "human": (606, 1.11)}
_OUT: dict[PauseClass, tuple[float, float]] = {"tool": (216, 1.13), "human": (430, 0.59)}
_FIRST = (23_800.0, 0.9)
_HEAD = 15_000
_P_NEVER_AFTER_TURN = 0.133
# Prefix broken: (share of steps, share of the prefix that is lost at the median).
_BROKEN: dict[PauseClass, tuple[float, float]] = {"tool": (0.016, 0.86), "human": (0.162, 0.85)}
_COMPACT_AT, _COMPACT_TO = (153_000.0, 0.25), (39_000.0, 0.4)
_P_SUBAGENTS = 17 / 683
_SUBAGENTS, _SUBAGENT_STEPS, _SUBAGENT_FIRST = 63 / 17, 11, 10_900
_REQUESTS_MAX = 600


def generate(sessions: int, seed: int) -> Trace:
    """So many sessions; the same seed gives the same ones."""
    made = tuple(_session(f"g{i}", Random(f"{seed}/session/{i}")) for i in range(sessions))
    return Trace(f"synthetic:{sessions}:{seed}", "synthetic", made)


def _session(name: str, rng: Random) -> Session:
    requests: list[Request] = []
    prompt = shared = 0
    limit = _size(rng, _COMPACT_AT)
    before: PauseClass = "human"
    first = max(_HEAD + 500, _size(rng, _FIRST))
    while len(requests) < _REQUESTS_MAX:
        for left in range(_between(rng, _STEPS), -1, -1):
            if not requests:
                prompt = first
            else:
                prompt, shared = _next_prompt(rng, before, prompt, limit)
            kind: PauseClass = "tool" if left else "human"
            out = _size(rng, _OUT[kind])
            requests.append(Request(prompt, out, shared, kind, _pause(rng, kind), service_s(out)))
            before = kind
        if rng.random() < _P_NEVER_AFTER_TURN:
            break
    last = requests[-1]
    requests[-1] = Request(last.prompt, last.out, last.shared, last.pause, None, last.service_s)
    return Session(name, tuple(requests), _HEAD, children=_children(name, len(requests), rng))


def _next_prompt(rng: Random, before: PauseClass, prompt: int, limit: int) -> tuple[int, int]:
    """(tokens of the next prompt, of which shared with the last one)."""
    if prompt > limit:
        return max(_HEAD + 500, min(prompt // 2, _size(rng, _COMPACT_TO))), _HEAD
    share, lost = _BROKEN[before]
    shared = prompt
    if rng.random() < share:
        # Uniform around the median loss: from a little to nearly all, the head at least stays.
        shared = max(min(_HEAD, prompt), int(prompt * (1.0 - lost * rng.uniform(0.7, 1.16))))
    return prompt + _size(rng, _GROWTH[before]), shared


def _children(name: str, requests: int, rng: Random) -> tuple[Child, ...]:
    if rng.random() >= _P_SUBAGENTS:
        return ()
    children = []
    for i in range(1 + int(rng.expovariate(1.0 / (_SUBAGENTS - 1.0)))):
        rows: list[Request] = []
        prompt = _SUBAGENT_FIRST
        steps = max(1, int(rng.lognormvariate(log(_SUBAGENT_STEPS), 0.6)))
        for step in range(steps):
            out = _size(rng, _OUT["tool"])
            pause_s = _pause(rng, "tool") if step + 1 < steps else None
            rows.append(Request(prompt, out, rows[-1].prompt if rows else 0, "tool", pause_s, service_s(out)))
            prompt += 5 * _size(rng, _GROWTH["tool"])
        children.append(Child(rng.randint(1, requests), Session(f"{name}/{i}", tuple(rows), thread="subagent")))
    return tuple(children)


def _size(rng: Random, scale: tuple[float, float]) -> int:
    median, sd = scale
    return max(1, int(rng.lognormvariate(log(median), sd)))


def _between(rng: Random, points: tuple[tuple[float, float], ...]) -> int:
    """A whole number drawn from a distribution given by points, linear between them."""
    u = rng.random()
    i = bisect_left([share for _, share in points], u)
    if i == 0:
        return 0
    (low, p_low), (high, p_high) = points[i - 1], points[i]
    return round(low + (high - low) * (u - p_low) / (p_high - p_low))


def _pause(rng: Random, kind: PauseClass) -> float:
    """A length in seconds, linear in log time between the published points."""
    points, u = _PAUSES[kind], rng.random()
    i = max(1, bisect_left([share for _, share in points], u))
    (low, p_low), (high, p_high) = points[i - 1], points[i]
    return exp(log(low) + (log(high) - log(low)) * (u - p_low) / (p_high - p_low))
