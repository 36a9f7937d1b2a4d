"""The price that room has cost lately, from hand-made evictions."""

from __future__ import annotations

from tenuto_server.cache.clearing import RECORDS_MAX, WINDOW_S, Clearing

SECOND = 10**9


def test_nothing_taken_costs_nothing():
    assert Clearing().level(5 * SECOND) == 0.0


def test_the_level_is_reached_by_what_was_taken_not_by_an_upset():
    clearing = Clearing()
    for index in range(1, 101):
        clearing.note(index * SECOND, float(index), 10)
    clearing.note(101 * SECOND, 1e9, 5)
    # Of 1005 blocks 50 may lie above: the upset and the 40 dearest others, 97 to 100; half of those at 96 would be too many.
    assert clearing.level(101 * SECOND) == 96.0


def test_blocks_count_not_victims():
    clearing = Clearing()
    for _ in range(50):
        clearing.note(0, 9.0, 1)
    clearing.note(0, 2.0, 5000)
    assert clearing.level(0) == 2.0


def test_what_is_long_ago_is_forgotten():
    clearing = Clearing()
    clearing.note(0, 7.0, 1)
    clearing.note(100 * SECOND, 3.0, 1)
    assert clearing.level(100 * SECOND) == 7.0
    assert clearing.level(int((WINDOW_S + 1) * SECOND)) == 3.0
    assert clearing.level(int((WINDOW_S + 200) * SECOND)) == 0.0


def test_what_nobody_wants_has_no_price():
    clearing = Clearing()
    clearing.note(0, -1e12, 100)
    assert clearing.level(0) == 0.0


def test_the_record_is_bounded():
    clearing = Clearing()
    for at in range(3 * RECORDS_MAX):
        clearing.note(at, float(at), 1)
    assert len(clearing._taken) == RECORDS_MAX
