import pytest

from tenuto_server.clock import ManualClock, monotonic_ns, to_ns, to_s


def test_a_manual_clock_moves_only_when_told_and_never_back():
    clock = ManualClock(5)
    assert (clock(), clock()) == (5, 5)
    assert clock.advance(1.5) == 1_500_000_005 == clock()
    with pytest.raises(ValueError, match="go back"):
        clock.advance(-1)
    assert clock() == 1_500_000_005


def test_conversions_and_the_real_clock():
    assert (to_ns(0.25), to_s(250_000_000)) == (250_000_000, 0.25)
    assert monotonic_ns() <= monotonic_ns()
