"""Who had to leave the device, ranked: against a plain list that is looked through every time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto_server.engine.fallen import Fallen

MOST = 5
CALLS = st.lists(
    st.tuples(st.sampled_from(("fell", "rated", "forget")), st.integers(0, 8), st.integers(0, 4)), max_size=200
)


@settings(deadline=None, max_examples=200)
@given(CALLS)
def test_the_best_is_what_a_scan_finds(calls: list[tuple[str, int, int]]) -> None:
    fallen = Fallen(MOST)
    plain: list[tuple[int, float]] = []  # in the order of falling
    for what, handle, rate in calls:
        if what == "fell":
            fallen.fell(handle, float(rate))
            plain = [*(entry for entry in plain if entry[0] != handle), (handle, float(rate))][-MOST:]
        elif what == "rated":
            fallen.rated(handle, float(rate))
            plain = [(other, float(rate) if other == handle else before) for other, before in plain]
        else:
            fallen.forget(handle)
            plain = [entry for entry in plain if entry[0] != handle]
        assert fallen.best() == max(plain, key=lambda entry: entry[1], default=(None, 0.0))[0]
        assert len(fallen) == len(plain)
        assert all(handle in fallen for handle, _ in plain)


def test_what_is_stale_is_dropped() -> None:
    """A session whose rate changes all the time does not make the list grow."""
    fallen = Fallen(MOST)
    fallen.fell(1, 0.0)
    for rate in range(10_000):
        fallen.rated(1, float(rate))
    assert len(fallen._ranked) < 200
    assert fallen.best() == 1
