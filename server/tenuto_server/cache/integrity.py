"""Every invariant of the cache in one place. Run after every step in tests and simulation; raises ``InvariantBroken``."""

from __future__ import annotations

import numpy as np

from tenuto_server.cache.extent import DEVICE, TIERS, Extent
from tenuto_server.cache.identity import HASH_BYTES, chain
from tenuto_server.cache.manager import CacheManager
from tenuto_server.cache.tree import path_to, root_of
from tenuto_server.errors import InvariantBroken


def _demand(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantBroken(message)


def check(cache: CacheManager, *, deep: bool = False) -> None:
    """Raises at the first broken invariant. ``deep``: recompute every chained hash that is known too."""
    nodes = list(cache.tree.nodes())
    _check_slots(cache, nodes)
    _check_tree(cache, nodes, deep)
    _check_references(cache, nodes)


def _check_slots(cache: CacheManager, nodes: list[Extent]) -> None:
    """Per tier: free + resident + in flight + private = capacity, and no slot in two places."""
    for tier, name in enumerate(TIERS):
        pool = cache.tiers.pools[tier]
        parts = [pool.free_slots()]
        parts += [slots for node in nodes if (slots := node.slots[tier]) is not None]
        parts += [move.dst_slots for move in cache.tiers.moves.values() if move.dst == tier]
        if tier == DEVICE:
            parts += [table.blocks[table.private] for table in cache.tables]
        if name == "disk":
            parts.append(np.fromiter(cache.tiers.recovered.values(), np.int32, len(cache.tiers.recovered)))
        everything = np.concatenate(parts)
        _demand(len(everything) == pool.capacity, f"{name}: {len(everything)} slots accounted of {pool.capacity}")
        _demand(len(np.unique(everything)) == pool.capacity, f"{name}: a slot is in two places")
        held: dict[int, int] = {}
        for node in nodes:
            if node.slots[tier] is not None:
                held[node.owner] = held.get(node.owner, 0) + node.blocks
        for move in cache.tiers.moves.values():
            if move.dst == tier:
                held[move.pieces[0].owner] = held.get(move.pieces[0].owner, 0) + move.blocks
        for table in cache.tables if tier == DEVICE else ():
            if table.owned:
                held[table.root.owner] = held.get(table.root.owner, 0) + table.owned
        _demand(held == cache.tiers.shares.used[tier], f"{name}: what each tenant holds is miscounted")
    private = sum(table.owned for table in cache.tables)
    _demand(all(table.owned == table.private.sum() for table in cache.tables), "a table miscounts what it owns")
    _demand(private == cache.private_blocks, f"private blocks: counted {cache.private_blocks}, held {private}")
    pinned = sum(node.blocks for node in nodes if node.pins and node.slots[DEVICE] is not None)
    _demand(pinned == cache.tiers.pinned_device_blocks, "pinned device blocks are miscounted")


def _check_tree(cache: CacheManager, nodes: list[Extent], deep: bool) -> None:
    size, tombstones = cache.block_tokens, 0
    for node in nodes:
        parent = node.parent
        assert parent is not None
        _demand(node.owner == parent.owner, "an extent belongs to another tenant than its parent")
        _demand(node.start == parent.end, "an extent does not begin where its parent ends")
        known = node.known_hashes
        _demand(known is None or len(known) == node.blocks * HASH_BYTES, "hashes and blocks differ in number")
        _demand(known is None or parent.known_hashes is not None, "hashes are known below unknown ones")
        if node.fill:
            _demand(node in parent.tails and not node.children and not node.tails, "a tail has descendants")
            _demand(0 < node.fill < size and len(node.tokens) == node.fill, "a tail has the wrong length")
        else:
            _demand(parent.children.get(node.tokens[:size].tobytes()) is node, "a child is filed under a wrong key")
            _demand(len(node.tokens) == node.blocks * size, "tokens and blocks differ in number")
        for slots in node.slots:
            _demand(slots is None or len(slots) == node.blocks, "slots and blocks differ in number")
        if node.tombstone:
            tombstones += node.blocks
            _demand(node.lost is not None, "a tombstone without a label")
        else:
            _demand(node.lost is None, "a label on something that was not lost")
        if deep and known is not None:
            _demand(chain(parent.last_hash, node.tokens, size) == node.hashes, "a chained hash is wrong")
    _demand(tombstones == cache.tree.tombstone_blocks, "tombstones are miscounted")


def _check_references(cache: CacheManager, nodes: list[Extent]) -> None:
    """Pins = running references; users and rates = sessions at or below; moves name live pieces; tips are mutual."""
    pins: dict[int, int] = {}
    for table in cache.tables:
        for end in (table.tip, table.cow):
            for node in path_to(end) if end is not None else ():
                pins[id(node)] = pins.get(id(node), 0) + 1
        _demand(table.tip.end == table.path_blocks, "a table's path does not end where it says")
        _demand(root_of(table.tip) is table.root, "a table's path hangs from another root")
    users: dict[int, int] = {}
    rates: dict[int, int] = {}
    for session, tip in cache.tips.items():
        _demand(session in tip.extent.tips, "a session's tip does not know it")
        for node in path_to(tip.extent):
            users[id(node)] = users.get(id(node), 0) + 1
            rates[id(node)] = rates.get(id(node), 0) + tip.rate
    for node in nodes:
        _demand(node.pins == pins.get(id(node), 0), f"pins: {node.pins}, references: {pins.get(id(node), 0)}")
        _demand(node.users == users.get(id(node), 0), "users are miscounted")
        _demand(node.rate == rates.get(id(node), 0), "rates do not add up")
        for move in node.moves:
            _demand(cache.tiers.moves.get(move.id) is move and node in move.pieces, "a copy is not what it seems")
            _demand(node.slots[move.src] is not None, "the source of a copy in flight is gone")
    for move in cache.tiers.moves.values():
        _demand(sum(piece.blocks for piece in move.pieces) == move.blocks, "a copy's pieces do not add up")
        _demand(all(move in piece.moves for piece in move.pieces), "a piece does not know its copy")
