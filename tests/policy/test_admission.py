"""The order of waiting turns, and that it starves nobody."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto_server.policy import admission
from tenuto_server.policy.decision import TurnView


def turn(
    compute: int = 1000, age_s: float = 1.0, *, attended: bool = True, priority: float = 0.0, restore: int = 0
) -> TurnView:
    return TurnView(attended, priority, age_s, compute, restore)


def first(*turns: TurnView) -> int:
    return min(range(len(turns)), key=lambda i: admission.key(turns[i]))


def test_warm_returns_pass_cold_starts() -> None:
    assert first(turn(8000), turn(30)) == 1
    assert first(turn(8000), turn(30, restore=200)) == 1


def test_a_person_waiting_goes_first() -> None:
    assert first(turn(30, attended=False), turn(8000)) == 1


def test_priority_goes_before_work() -> None:
    assert first(turn(30), turn(8000, priority=1.0)) == 1
    assert first(turn(30, priority=-1.0), turn(8000)) == 1


def test_age_outweighs_work() -> None:
    assert first(turn(1000, 0.1), turn(8000, 10.0)) == 1


def test_past_its_patience_a_turn_goes_before_everything() -> None:
    old = turn(100_000, 100.0, attended=False)
    assert first(turn(1, 0.0, priority=9.0), turn(30, 5.0), old) == 2
    # Unattended turns have the longer patience.
    assert first(turn(30), turn(30, 40.0, attended=False)) == 0


turns = st.builds(
    TurnView, st.booleans(), st.floats(-1e6, 1e6), st.floats(0.0, 1e6), st.integers(0, 10**6), st.integers(0, 10**5)
)


@given(turns, turns)
def test_keys_compare(a: TurnView, b: TurnView) -> None:
    assert len(admission.key(a)) == len(admission.key(b))
    assert (admission.key(a) < admission.key(b)) or (admission.key(b) <= admission.key(a))


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 1000), st.booleans(), st.sampled_from([-4.0, 0.0, 4.0]))
def test_nothing_starves_under_a_flood_of_favoured_turns(seed: int, attended: bool, priority: float) -> None:
    """One turn a second is served while 1.3 better ones a second arrive: the victim's wait stays bounded."""
    rnd = random.Random(seed)
    waiting: list[tuple[float, TurnView]] = [(0.0, TurnView(attended, priority, 0.0, 500_000, 0))]
    patience = admission.PATIENCE_S * 2.0**-priority * (1.0 if attended else admission.UNATTENDED_PATIENCE)
    # Only what arrives within its patience can be served before it.
    limit = 1.3 * patience + 60.0
    now = 0.0
    while now < limit:
        now += 1.0
        for _ in range(2 if rnd.random() < 0.3 else 1):
            waiting.append((now, TurnView(True, 4.0, 0.0, 10, 0)))

        def aged(entry: tuple[float, TurnView], now: float = now) -> tuple[float, ...]:
            arrived, view = entry
            return admission.key(
                TurnView(view.attended, view.priority, now - arrived, view.compute_tokens, view.restore_blocks)
            )

        # The best few are enough: favoured turns are served in order of arrival among themselves.
        served = min([waiting[0], *waiting[1:4]], key=aged)
        if served is waiting[0] and served[0] == 0.0:
            return
        waiting.remove(served)
    raise AssertionError(f"still waiting after {now:.0f} s")
