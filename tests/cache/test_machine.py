"""A state machine over CacheManager: any order of turns, copies, failures and evictions keeps every invariant.

The tiers are modelled as arrays of block contents, each content being the chained hash that its tokens must have. What
is checked after every rule: the cache's own invariants, and that every slot which an extent names holds the bytes that
the extent promises, so that no sequence can ever read a wrong block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tenuto_server.cache.extent import DEVICE, DISK, HOST, TIERS, Extent
from tenuto_server.cache.identity import chain
from tenuto_server.cache.integrity import check
from tenuto_server.cache.manager import CacheManager
from tenuto_server.cache.table import BlockTable
from tenuto_server.config import CacheConfig

BLOCK = 4
ROOTS = (b"tenant-a-root-16", b"tenant-b-root-16")


class Running:
    def __init__(self, session: int, root: bytes, tokens: np.ndarray, table: BlockTable) -> None:
        self.session, self.root, self.tokens, self.table = session, root, tokens, table


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        device=st.integers(8, 40),
        host=st.integers(0, 24),
        disk=st.integers(0, 24),
        tombs=st.integers(0, 64),
        seed=st.integers(0, 9),
    )
    def start(self, device: int, host: int, disk: int, tombs: int, seed: int) -> None:
        config = CacheConfig(
            device,
            host,
            disk,
            BLOCK,
            tombstone_blocks_max=tombs,
            extent_blocks_max=16,
            transfer_blocks_max=4,
            transfers_inflight_max=4,
        )
        self.now, self.steps = 0.0, 0
        self.cache = CacheManager(
            config,
            priority=lambda x, tier, leaving: x.rate if x.rate > 0 else x.last_used_s - 1e12,
            below=lambda x, tier: next(
                (t for t in (HOST, DISK) if t > tier and self.cache.tiers.pools[t].capacity), None
            ),
            label=lambda x, tier: "capacity" if x.users else "retention",
        )
        self.content = [np.zeros((n, 16), np.uint8) for n in (device, host, disk)]
        self.running: list[Running] = []
        self.corrupt = [0, 0, 0]
        self.contexts: dict[int, tuple[bytes, np.ndarray]] = {}
        self.rng = np.random.default_rng(seed)

    # ---- contents ----

    def hashes(self, root: bytes, tokens: np.ndarray) -> np.ndarray:
        return np.frombuffer(chain(root, tokens, BLOCK), np.uint8).reshape(-1, 16)

    def write(self, run: Running, start: int, end: int) -> None:
        """What a forward does: the KV of [start, end) goes into the table's blocks; earlier slots must be right."""
        table = run.table
        full = start // BLOCK
        expect = self.hashes(run.root, run.tokens[: full * BLOCK])
        assert (self.content[DEVICE][table.blocks[:full]] == expect).all(), "a sequence would read a wrong block"
        last = -(-end // BLOCK)
        self.content[DEVICE][table.blocks[full:last]] = self.hashes(run.root, run.tokens[:end])[full:last]

    # ---- rules ----

    @rule(data=st.data(), session=st.integers(0, 5), root=st.sampled_from(ROOTS), grow=st.integers(1, 14))
    def begin(self, data: Any, session: int, root: bytes, grow: int) -> None:
        if len(self.running) >= 3 or any(run.session == session for run in self.running):
            return
        base = np.empty(0, np.int32)
        if self.contexts and data.draw(st.booleans()):
            root, base = self.contexts[data.draw(st.sampled_from(sorted(self.contexts)))]
            base = base[: data.draw(st.integers(0, len(base)))]
        tokens = np.concatenate((base, self.rng.integers(0, 3, grow))).astype(np.int32)[: 4 * 8]
        self.now += 1.0
        table, found = self.cache.acquire(root, tokens, len(tokens) + 8)
        self.cache.use(table, self.now)
        assert sum(found.cached.values()) + sum(found.lost.values()) == found.known_tokens < len(tokens)
        self.running.append(Running(session, root, tokens, table))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), budget=st.integers(1, 12))
    def compute(self, data: Any, budget: int) -> None:
        run = data.draw(st.sampled_from(self.running))
        cache, table = self.cache, run.table
        waits = cache.settle(table)
        limit = len(run.tokens)
        if waits is not None:
            tier = waits.best_tier()
            if tier not in (None, DEVICE) and data.draw(st.booleans()):
                cache.tiers.begin_move(cache.tiers.chunk(waits), tier, DEVICE, "restore", 0)
                return
            if waits is table.cow:
                if waits.moves or tier is not None:
                    return
                cache.copied(table)
            else:
                limit = min(limit, waits.end * BLOCK)
        end = min(limit, table.front + table.cow_tokens * (waits is None) + budget)
        if end <= table.front or not cache.allocate(table, end, 0):
            return
        start = table.front
        copy = cache.take_copy(table) if waits is None else None
        if copy is not None:
            start = table.front
            self.content[DEVICE][copy[1]] = self.content[DEVICE][copy[0]]
        if end > start:
            self.write(run, start, end)
            table.front = end
            if copy is not None:
                cache.copied(table)
            cache.publish(table, run.tokens, start, end)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(0, 2))
    def decode(self, data: Any, token: int) -> None:
        run = data.draw(st.sampled_from(self.running))
        if run.table.front == len(run.tokens) and len(run.tokens) < len(run.table.blocks) * BLOCK:
            run.tokens = np.append(run.tokens, np.int32(token)).astype(np.int32)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), cancel=st.booleans())
    def finish(self, data: Any, cancel: bool) -> None:
        run = data.draw(st.sampled_from(self.running))
        if not cancel and run.table.front < len(run.tokens):
            return
        self.running.remove(run)
        self.now += 1.0
        end = self.cache.release(run.table, run.tokens, self.now)
        self.cache.set_tip(run.session, end)
        self.contexts[run.session] = (run.root, run.tokens[: run.table.front])

    @precondition(lambda self: self.cache.tiers.moves)
    @rule(data=st.data(), outcome=st.sampled_from(["ok", "ok", "ok", "failed", "bad", "part"]))
    def complete(self, data: Any, outcome: str) -> None:
        move = self.cache.tiers.moves[data.draw(st.sampled_from(sorted(self.cache.tiers.moves)))]
        wrong = data.draw(st.sets(st.integers(0, move.blocks - 1), min_size=1)) if outcome in ("bad", "part") else set()
        bad = wrong if outcome == "bad" and move.src != DEVICE else set()  # what the device computed is never in doubt
        if outcome != "failed":
            self.content[move.dst][move.dst_slots] = self.content[move.src][move.src_slots]
            self.content[move.dst][move.dst_slots[sorted(wrong)]] = 255
        stands = [] if bad or move.drop_source else list(move.pieces)
        self.cache.finish_move(move.id, outcome != "failed", bad, wrong - bad)
        assert all(p.slots[move.src] is not None for p in stands if p.parent is not None), (
            "a failed copy cost its source"
        )
        counted = self.cache.tiers.corrupt_blocks
        self.corrupt[move.src] += len(bad)
        assert [counted[name] for name in TIERS] == self.corrupt

    @rule(data=st.data(), src=st.sampled_from([DEVICE, HOST, DISK]), dst=st.sampled_from([DEVICE, HOST, DISK]))
    def move(self, data: Any, src: int, dst: int) -> None:
        nodes = sorted((n for n in self.cache.tree.nodes() if n.slots[src] is not None), key=lambda n: n.order)
        if nodes and src != dst:
            extent: Extent = data.draw(st.sampled_from(nodes))
            drop = data.draw(st.booleans()) and src < dst
            self.cache.tiers.begin_move(self.cache.tiers.chunk(extent), src, dst, "offload", 0, drop_source=drop)

    @rule(session=st.integers(0, 5), rate=st.sampled_from([0.0, 0.001, 0.5, 3.0]))
    def rate(self, session: int, rate: float) -> None:
        self.cache.set_rate(session, rate)

    @rule(session=st.integers(0, 5), keep=st.integers(0, 24))
    def compact(self, session: int, keep: int) -> None:
        self.cache.shorten_tip(session, keep)

    @rule(session=st.integers(0, 5))
    def forget(self, session: int) -> None:
        self.cache.set_tip(session, None)

    @rule(tier=st.sampled_from([DEVICE, HOST, DISK]), need=st.integers(1, 40), drop=st.booleans())
    def pressure(self, tier: int, need: int, drop: bool) -> None:
        need = min(need, self.cache.tiers.pools[tier].capacity)
        self.cache.tiers.make_room(tier, need, 0, drop=drop)
        if drop and tier == DEVICE and need <= self.cache.reclaimable_device_blocks(0) and not self.cache.tiers.moves:
            assert self.cache.tiers.pools[tier].free >= need, "what is reported as reclaimable can be reclaimed at once"

    @rule()
    def prune(self) -> None:
        self.cache.prune()
        assert self.cache.tree.tombstone_blocks <= max(self.cache.config.tombstone_blocks_max, 10**9)

    # ---- what must always hold ----

    @invariant()
    def intact(self) -> None:
        if not hasattr(self, "cache"):
            return
        check(self.cache, deep=True)
        self.steps += 1
        if self.steps % 5:
            return  # asking for hashes works them out: let them wait for a while
        for node in self.cache.tree.nodes():
            want = np.frombuffer(node.hashes, np.uint8).reshape(-1, 16)
            for tier, slots in enumerate(node.slots):
                if slots is not None:
                    assert (self.content[tier][slots] == want).all(), f"an extent names wrong bytes on tier {tier}"


TestCache = CacheMachine.TestCase
TestCache.settings = settings(
    max_examples=120,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
