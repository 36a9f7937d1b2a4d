"""NullExecutor: its tokens against the one-position-at-a-time definition, and its sensitivity to every wrong block."""

import numpy as np
import pytest

from tenuto_server.engine.events import Sampling, TransferDone
from tenuto_server.engine.plan import ForwardPlan, ForwardRow, Transfer
from tenuto_server.runtime.null import Fault, NullExecutor, reference_token

GREEDY = Sampling(max_tokens=8)
SIZE = 4


def tokens_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, count).astype(np.int32)


def row(tokens, blocks, start=0, end=None, *, sample=True, sampling=GREEDY, draw=0, seq=1) -> ForwardRow:
    end = len(tokens) if end is None else end
    return ForwardRow(seq, start, tokens[start:end], np.array(blocks, np.int32), sample, sampling, draw)


def move(number, src, dst, src_slots, dst_slots, hashes) -> Transfer:
    return Transfer(number, src, dst, np.array(src_slots, np.int32), np.array(dst_slots, np.int32), b"".join(hashes))


def hashes_of(count: int) -> list[bytes]:
    return [bytes([i + 1]) * 16 for i in range(count)]


def run(executor, *rows, copies=()):
    return executor.run(ForwardPlan(0, rows, copies)).sampled


def test_every_way_to_cut_a_prompt_gives_the_reference_token():
    tokens = tokens_of(19)
    expected = ((1, reference_token(tokens)),)
    executor = NullExecutor(block_tokens=SIZE)
    blocks = [70, 3, 5, 200, 1]
    assert run(executor, row(tokens, blocks)) == expected
    for cut in range(1, 19):
        executor = NullExecutor(block_tokens=SIZE)
        run(executor, row(tokens, blocks, 0, cut, sample=False))
        assert run(executor, row(tokens, blocks, cut)) == expected
    both = NullExecutor(block_tokens=SIZE)
    assert run(both, row(tokens, blocks, 7), row(tokens, blocks, 0, 7, sample=False)) == expected


@pytest.mark.parametrize("wrong", [0, 1, 2, 3])
def test_any_wrong_block_changes_the_token(wrong):
    tokens = tokens_of(18)
    executor = NullExecutor(block_tokens=SIZE)
    run(executor, row(tokens, [0, 1, 2, 3, 4]))
    run(executor, row(tokens_of(18, seed=9), [10, 11, 12, 13, 14]))
    blocks = [0, 1, 2, 3, 4]
    assert run(executor, row(tokens, blocks, 17)) == ((1, reference_token(tokens)),)
    blocks[wrong] += 10
    assert run(executor, row(tokens, blocks, 17)) != ((1, reference_token(tokens)),)


def test_store_and_restore_through_all_tiers_keeps_the_tokens():
    tokens = tokens_of(17)
    executor = NullExecutor(block_tokens=SIZE)
    run(executor, row(tokens, [0, 1, 2, 3, 4]))
    names = hashes_of(4)
    executor.submit(move(1, "device", "host", [0, 1, 2, 3], [9, 8, 7, 6], names))
    executor.submit(move(2, "host", "disk", [9, 8, 7, 6], [0, 1, 2, 3], names))
    executor.submit(move(3, "disk", "device", [0, 1, 2, 3], [20, 21, 22, 23], names))
    assert executor.take_events() == [TransferDone(n, ok=True) for n in (1, 2, 3)]
    assert executor.holds("disk", 2) == names[2]
    assert executor.holds("host", 0) is None
    assert run(executor, row(tokens, [20, 21, 22, 23, 30], 16)) == ((1, reference_token(tokens)),)
    assert executor.wrong == []


def test_a_slot_that_holds_another_block_is_noticed():
    executor = NullExecutor(block_tokens=SIZE)
    run(executor, row(tokens_of(8), [0, 1]))
    first, second = hashes_of(2)
    executor.submit(move(1, "device", "host", [0], [0], [first]))
    executor.submit(move(2, "host", "device", [0], [5], [second]))
    executor.submit(move(3, "host", "device", [1], [5], [first]))
    executor.submit(move(4, "device", "host", [1], [3], [first]))
    assert executor.take_events()[1:3] == [TransferDone(n, ok=False, bad=(0,)) for n in (2, 3)]
    assert len(executor.wrong) == 3


def test_faults():
    tokens, names = tokens_of(13), hashes_of(3)
    faults = {2: Fault("corrupt", (0, -1)), 3: Fault("fail"), 4: Fault("delay"), 5: Fault("never")}
    executor = NullExecutor(block_tokens=SIZE, fault=lambda transfer: faults.get(transfer.id))
    run(executor, row(tokens, [0, 1, 2, 3]))
    executor.submit(move(1, "device", "host", [0, 1, 2], [0, 1, 2], names))
    for number in (2, 3, 4, 5):
        executor.submit(move(number, "host", "device", [0, 1, 2], [10 * number + i for i in range(3)], names))
    _, corrupt, failed = executor.take_events()
    assert (corrupt.ok, corrupt.bad) == (True, (0, 2))
    assert not failed.ok
    assert run(executor, row(tokens, [0, 21, 2, 40], 12)) == ((1, reference_token(tokens)),)
    assert run(executor, row(tokens, [20, 21, 2, 40], 12)) != ((1, reference_token(tokens)),)
    assert executor.complete() == 1
    assert executor.take_events() == [TransferDone(4, ok=True)]
    executor.close()
    assert [(e.transfer, e.ok) for e in executor.take_events()] == [(5, False)]
    executor.flip("host", 1)
    executor.submit(move(6, "host", "device", [0, 1, 2], [60, 61, 62], names))
    assert executor.take_events() == [TransferDone(6, ok=True, bad=(1,))]
    assert executor.wrong == []


def test_copies_come_first_and_seeds_matter():
    tokens = tokens_of(6)
    executor = NullExecutor(block_tokens=SIZE, vocab=100, tokens_low=50)
    run(executor, row(tokens, [0, 1], 0, 5, sample=False))
    assert run(executor, row(tokens, [0, 2], 5), copies=((1, 2),)) == (
        (1, reference_token(tokens, vocab=100, tokens_low=50)),
    )
    drawn = {
        run(executor, row(tokens, [0, 2], 5, sampling=Sampling(4, temperature=1.0, seed=seed), draw=draw))[0][1]
        for seed in range(8)
        for draw in range(8)
    }
    assert len(drawn) > 20
    assert all(50 <= token < 100 for token in drawn)
