"""Where victims land: on the next tier that takes them, in parts if need be; what is to be kept is not lost while there is
room below; among equals the one used longest ago goes first.

Every policy here wants everything kept (``below`` names the next tier), so that any loss is the mechanism's.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenuto_server.cache.extent import DEVICE, DISK, HOST, TIERS, Extent
from tenuto_server.cache.integrity import check
from tenuto_server.cache.manager import CacheManager
from tenuto_server.config import CacheConfig

BLOCK = 4
ROOT = b"placement-root-1"


class Site:
    """A cache, sessions that are distinct by their first token, and copies that end when told."""

    def __init__(self, device: int, host: int, disk: int, *, by: str = "rate", inflight: int = 16) -> None:
        config = CacheConfig(
            device, host, disk, BLOCK, transfer_blocks_max=8, transfers_inflight_max=inflight, extent_blocks_max=64
        )
        self.cache = CacheManager(
            config,
            priority=(lambda x, tier, leaving: x.rate) if by == "rate" else (lambda x, tier, leaving: x.last_used_s),
            below=lambda x, tier: next(
                (t for t in (HOST, DISK) if t > tier and self.cache.tiers.pools[t].capacity), None
            ),
            label=lambda x, tier: "capacity",
        )
        self.now_s = 0.0
        self.contexts: dict[int, np.ndarray] = {}

    def turn(self, session: int, blocks: int, rate: float = 1.0) -> bool:
        """A turn of a session whose context is then that many blocks; False if it found no room even with all copies
        made."""
        self.now_s += 1.0
        tokens = (np.arange(blocks * BLOCK, dtype=np.int32) + 1000 * (session + 1)).astype(np.int32)
        table, _ = self.cache.acquire(ROOT, np.append(tokens, np.int32(0)), len(tokens) + BLOCK)
        self.cache.use(table, self.now_s)
        made = self._compute(table, tokens)
        end = self.cache.release(table, tokens, self.now_s)
        self.cache.set_tip(session, end)
        self.cache.set_rate(session, rate)
        self.contexts[session] = tokens
        check(self.cache)
        return made

    def _compute(self, table, tokens) -> bool:
        for _ in range(500):
            waits = self.cache.settle(table)
            if waits is None and table.front == len(tokens):
                return True
            if waits is not None and waits.best_tier() is not None:
                if not waits.moving_to(DEVICE):
                    piece = self.cache.tiers.chunk(waits)
                    self.cache.tiers.begin_move(piece, waits.best_tier(), DEVICE, "restore", 0)
                self.complete()
                continue
            limit = len(tokens) if waits is None else min(len(tokens), waits.end * BLOCK)
            start = table.front
            if self.cache.allocate(table, limit, 0):
                table.front = limit
                self.cache.publish(table, tokens, start, limit)
            elif not self.complete():
                return False
        raise AssertionError("a turn never found its room")

    def complete(self) -> bool:
        """The oldest copy ends well; False if there was none."""
        for number in list(self.cache.tiers.moves)[:1]:
            self.cache.finish_move(number, True)
            return True
        return False

    def settle(self) -> None:
        while self.complete():
            pass

    def on(self, session: int) -> dict[str, int]:
        """Blocks of a session by the fastest tier that holds them; None counts what is lost."""
        held: dict[str, int] = {}
        for extent in self.cache.context(session):
            tier = extent.best_tier()
            name = TIERS[tier] if tier is not None else "lost"
            held[name] = held.get(name, 0) + extent.blocks
        return held

    def order(self, tier: int) -> list[tuple[int, int]]:
        """(session, start) of what leaves a tier, in the order in which it would be dropped."""
        left = []
        while (lowest := self.cache.tiers._lowest(tier)) is not None:
            extent: Extent = lowest[1]
            left.append((int(extent.tokens[0]) // 1000 - 1, extent.start))
            self.cache.tiers.drop(extent, tier)
        return left


def test_what_the_host_cannot_take_goes_to_the_disk():
    """The host tier is filled by one part of a session; the other, of equal priority, has the disk."""
    site = Site(device=28, host=5, disk=64)
    assert site.turn(0, 20)
    while not site.cache.tiers.make_room(DEVICE, 20, 0):
        assert site.complete(), "no room, and none is coming"
    held = site.on(0)
    assert held["host"] == 5
    assert held["disk"] >= 7
    assert held["device"] + held["disk"] == 15
    assert sum(site.cache.tiers.dropped_blocks.values()) == 0


@pytest.mark.parametrize("host", [0, 1, 3, 8, 9, 40])
def test_lru_loses_nothing_while_the_disk_has_room(host):
    site = Site(device=24, host=host, disk=200, by="lru")
    for number in range(8):
        assert site.turn(number, 18)
    site.settle()
    assert sum(site.cache.tiers.dropped_blocks.values()) == 0
    assert all("lost" not in site.on(number) for number in range(8))
    assert site.on(7)["device"] == 18


def test_among_equals_the_one_used_longest_ago_makes_way():
    """Equal rates: session 0 was used before 1, so what comes down displaces 0, not 1, and not itself."""
    site = Site(device=24, host=12, disk=64)
    for number in (0, 1, 2):
        assert site.turn(number, 12)
        site.settle()
    assert site.on(0) == {"host": 12}
    site.cache.tiers.make_room(DEVICE, 12, 0)  # of sessions 1 and 2, 1 goes, and the host gives up 0 for it
    for _ in range(6):
        site.settle()
        site.cache.tiers.make_room(DEVICE, 12, 0)
    assert (site.on(0), site.on(1), site.on(2)) == ({"disk": 12}, {"host": 12}, {"device": 12})


def test_the_second_copy_of_what_is_in_use_makes_way():
    """A session's turn uses its KV on the device; the copy that it left on the host is room for others all the same."""
    site = Site(device=24, host=8, disk=0)
    assert site.turn(0, 8)
    extent = site.cache.context(0)[-1]
    assert site.cache.tiers.begin_move(extent, DEVICE, HOST, "offload", 0) is not None
    site.settle()
    assert site.cache.tiers.pools[HOST].free == 0
    table, _ = site.cache.acquire(ROOT, np.append(site.contexts[0], np.int32(0)), 8 * BLOCK + BLOCK)
    assert site.cache.tiers.make_room(HOST, 8, 0)
    assert not site.cache.tiers.make_room(DEVICE, 24, 0), "what is in use itself stays"
    check(site.cache)
    assert site.on(0) == {"device": 8}
    assert sum(site.cache.tiers.dropped_blocks.values()) == 0
    site.cache.release(table, site.contexts[0], 9.0)


def test_one_more_copy_displaces_nothing_of_its_own_rank():
    site = Site(device=24, host=8, disk=0)
    assert site.turn(0, 8)
    assert site.turn(1, 8)
    move = site.cache.tiers.begin_move
    assert move(site.cache.context(0)[-1], DEVICE, HOST, "offload", 0) is not None
    site.settle()
    assert move(site.cache.context(1)[-1], DEVICE, HOST, "offload", 0) is None
    # Where the device's copy is to go, the one used longest ago makes way.
    assert move(site.cache.context(1)[-1], DEVICE, HOST, "offload", 0, drop_source=True) is not None
    site.settle()
    assert (site.on(0), site.on(1)) == ({"device": 8}, {"host": 8})


def test_equal_priorities_leave_in_order_of_last_use_deepest_first():
    site = Site(device=64, host=0, disk=0)
    for number in (2, 0, 1):
        site.turn(number, 10)
    site.turn(2, 14)
    for extent in site.cache.context(2):
        if extent.blocks > 4:
            site.cache.cut(extent, 4)
    order = site.order(DEVICE)
    assert [session for session, _ in order] == sorted((session for session, _ in order), key=[0, 1, 2].index)
    starts = [start for session, start in order if session == 2]
    assert all(a > b for a, b in pairwise(starts))


def test_a_busy_link_is_waited_for_and_a_dead_one_is_not():
    site = Site(device=40, host=0, disk=64, inflight=1)
    assert site.turn(0, 16)
    assert site.turn(1, 16)
    deepest = site.cache.tiers.chunk(site.cache.context(0)[-1])
    assert site.cache.tiers.begin_move(deepest, DEVICE, DISK, "offload", 0) is not None  # keeps its source
    assert not site.cache.tiers.make_room(DEVICE, 32, 0)
    assert site.cache.room_is_coming(0)
    assert sum(site.cache.tiers.dropped_blocks.values()) == 0
    late = site.cache.tiers.patience_ns
    assert not site.cache.room_is_coming(late)
    assert site.cache.tiers.make_room(DEVICE, 32, late)
    assert sum(site.cache.tiers.dropped_blocks.values()) > 0


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    device=st.integers(12, 40),
    host=st.integers(0, 20),
    inflight=st.integers(1, 5),
    by=st.sampled_from(["rate", "lru"]),
    turns=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 12), st.sampled_from([0.5, 1.0, 2.0]), st.booleans()), max_size=40
    ),
)
def test_with_room_on_the_disk_nothing_is_lost(device, host, inflight, by, turns):
    """Any turns, any priorities, any host size, copies ending late or at once: a disk that holds everything keeps it."""
    site = Site(device, host, 6 * 12, by=by, inflight=inflight)
    for session, blocks, rate, ends in turns:
        blocks = max(blocks, len(site.contexts.get(session, ())) // BLOCK)
        assert site.turn(session, blocks, rate), "a turn that fits the device was not served"
        if ends:
            site.settle()
    site.settle()
    check(site.cache)
    assert site.cache.tiers.dropped_blocks == {"retention": 0, "capacity": 0}
    for session, tokens in site.contexts.items():
        assert sum(count for tier, count in site.on(session).items() if tier != "lost") == len(tokens) // BLOCK
