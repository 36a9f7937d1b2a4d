"""Shares of a tier: what is counted against a recount, and who is over by the rule as it is written."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tenuto_server.cache.shares import SLACK, Shares

CAPACITY = (100, 60)
STEPS = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 4), st.integers(-30, 30)), max_size=60)


@given(STEPS)
def test_who_is_over_is_told_once_and_truly(steps: list[tuple[int, int, int]]) -> None:
    told: Counter[int] = Counter()
    shares = Shares(CAPACITY, lambda owner: told.update([owner]))
    held: list[Counter[int]] = [Counter(), Counter()]
    for tier, owner, blocks in steps:
        blocks = max(-held[tier][owner], min(blocks, CAPACITY[tier] - held[tier].total()))
        before, calls = {o: shares.over(o) for o in range(1, 5)}, Counter(told)
        held[tier][owner] += blocks
        shares.add(tier, owner, blocks)
        for at in (0, 1):
            having = {o: n for o, n in held[at].items() if n}
            assert shares.used[at] == having
            for o in range(1, 5):
                over = bool(shares.over(o) >> at & 1)
                fair = CAPACITY[at] / max(1, len(having))
                if len(having) < 2 or having.get(o, 0) <= fair:
                    assert not over
                elif having[o] > fair * (1 + SLACK):
                    assert over
        for o in range(1, 5):
            assert (told[o] > calls[o]) == (shares.over(o) != before[o])


def test_one_owner_alone_may_have_all() -> None:
    shares = Shares((10,), lambda owner: None)
    shares.add(0, 7, 10)
    assert shares.over(7) == 0
    shares.add(0, 7, -1)
    shares.add(0, 8, 1)
    assert (shares.over(7), shares.over(8)) == (1, 0)
    shares.add(0, 8, -1)
    assert shares.over(7) == 0
