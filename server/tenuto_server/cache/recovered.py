"""What an earlier process left on disk, brought into the tree when a prompt reaches it. No state; driven by ``CacheManager``."""

from __future__ import annotations

from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from tenuto_server.cache.extent import Extent
from tenuto_server.cache.identity import HASH_BYTES, chain
from tenuto_server.cache.residency import Residency
from tenuto_server.cache.tree import PrefixTree


def adopt_recovered(tree: PrefixTree, tiers: Residency, root: Extent, tokens: NDArray[np.int32]) -> None:
    """Hangs the blocks of a prompt that a restart found on disk into the tree. Those missing before and between them
    become known as lost: what comes after is worth having without them."""
    size, recovered = tree.block_tokens, tiers.recovered
    match = tree.match(root, tokens)
    node, at = root, match.blocks
    if match.path:
        node = tree.cut(match.path[-1], match.last_blocks)
        tiers.touch(match.path[-1])
    hashes = chain(node.last_hash, tokens[at * size : len(tokens) // size * size], size)
    found = [recovered.pop(hashes[i : i + HASH_BYTES], -1) for i in range(0, len(hashes), HASH_BYTES)]
    while found and found[-1] < 0:
        found.pop()
    for there, run in groupby(found, key=lambda slot: slot >= 0):
        slots = list(run)
        node = tree.add(node, tokens[at * size : (at + len(slots)) * size])
        at += len(slots)
        if there:
            tiers.adopt_disk(node, slots)
        else:
            node.lost = "capacity"
            tree.bury(node)
