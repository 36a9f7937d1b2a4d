"""The oracle: hand-made cases, and no policy beats it."""

from __future__ import annotations

import pytest

from tenuto_server.sim.oracle import Use, play, uses
from tenuto_server.sim.study import Setup, simulate
from tenuto_server.sim.traces import Trace
from tenuto_server.sim.workload import Workload, steady


def use(time: float, line: int, prompt: int, reusable: int, next_s: float | None, kept: int) -> Use:
    return Use(time, line, prompt, reusable, next_s, kept, True, "tool", False, "main")


def misses(requests: list[Use], capacity: int, *, resident: bool = True) -> list[int]:
    out: list[int] = []
    play(requests, capacity, lambda u, found: out.append(u.reusable - found), resident=resident)
    return out


def test_the_furthest_next_use_goes_first() -> None:
    # A returns at 10, B at 5; 10 blocks hold A's 6 and 4 of B's 6, or B's 6 and 4 of A's: A, back later, loses 2.
    requests = [
        use(0, 1, 6, 0, 10, 6),
        use(1, 2, 6, 0, 5, 6),
        use(5, 2, 6, 6, None, 0),
        use(10, 1, 6, 6, None, 0),
    ]
    assert misses(requests, 10) == [0, 0, 0, 2]


def test_what_the_next_prompt_does_not_contain_takes_no_room() -> None:
    # B keeps only 2 of its 8 blocks (it is compacted) and never returns after that: A stays whole.
    requests = [
        use(0, 1, 4, 0, 10, 4),
        use(1, 2, 6, 0, 5, 2),
        use(5, 2, 6, 2, None, 0),
        use(10, 1, 4, 4, None, 0),
    ]
    assert misses(requests, 10) == [0, 0, 0, 0]


def test_a_prompt_must_be_on_the_device_while_it_is_served() -> None:
    # While B's 8 blocks are served only 2 of A's 6 can stay; a machine that need not hold them would keep all of A's.
    requests = [use(0, 1, 6, 0, 10, 6), use(1, 2, 8, 0, None, 0), use(10, 1, 6, 6, None, 0)]
    assert misses(requests, 10) == [0, 0, 4]
    assert misses(requests, 10, resident=False) == [0, 0, 0]


def test_a_prompt_larger_than_memory_finds_nothing() -> None:
    requests = [use(0, 1, 12, 0, 3, 12), use(3, 1, 12, 12, None, 0)]
    assert misses(requests, 10) == [0, 12]


@pytest.mark.parametrize("frac", [0.15, 0.25, 0.4, 0.8])
def test_no_policy_beats_it(synthetic: Trace, frac: float) -> None:
    # Without warm-up: it misses the least of all, what comes before the window counted, so within one a policy can be lucky.
    whole = steady(synthetic, 30.0, 5, window_s=7200.0, warm_up_s=0.0)
    best = simulate(synthetic, Setup("oracle", frac, 5), whole)
    policies = ("lru", "ttl:60", "class-ttl", "tenuto:none", "tenuto:r2=1+end+compaction")
    for name in policies:
        row = simulate(synthetic, Setup(name, frac, 5), whole)
        assert row["reusable_tokens"] == best["reusable_tokens"]
        assert row["turns"] == best["turns"]
        assert row["missed_tokens"] >= best["missed_tokens"], name
    assert best["missed_tokens"] >= best["missed_tokens_unbound"]


@pytest.mark.parametrize(
    "name", ["continuum", "continuum-released", "infercept", "tokencake", "kvflow", "mori", "gdsf"]
)
def test_published_policies_run_by_name(synthetic: Trace, small: Workload, name: str) -> None:
    """None beats the oracle, and none is so bad that it cannot have been meant: costs are in plausible seconds."""
    best, plain = (simulate(synthetic, Setup(policy, 0.4, 5), small)["missed_tokens"] for policy in ("oracle", "lru"))
    assert best <= simulate(synthetic, Setup(name, 0.4, 5), small)["missed_tokens"] < 2 * plain


def test_uses_are_what_the_harness_sends(synthetic: Trace, small: Workload) -> None:
    counted = [u for u in uses(small, 64) if u.counts]
    row = simulate(synthetic, Setup("lru", 0.5, 5), small)
    assert row["turns"] == len(counted)
    assert row["prompt_tokens"] == 64 * sum(u.prompt for u in counted)
