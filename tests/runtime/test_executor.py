"""TorchExecutor on the toy model: batches, draws, copies, and KV that is bit-equal wherever it has been."""

import threading

import numpy as np
import pytest
import torch

from tenuto_server.engine.events import Sampling
from tenuto_server.engine.plan import ForwardPlan, ForwardRow, Transfer
from tenuto_server.errors import InvariantBroken
from tenuto_server.model.load import load_model
from tenuto_server.runtime.batch import BatchBuilder
from tenuto_server.runtime.disk import DiskTier
from tenuto_server.runtime.executor import TorchExecutor

SIZE = 16
GREEDY = Sampling(max_tokens=64)
PROMPT = np.random.default_rng(3).integers(0, 256, 100).astype(np.int32)


@pytest.fixture(scope="module")
def models():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the toy is too small to share, and other processes may hold the other core
    yield {dtype: load_model("toy", dtype=dtype, invariant=True) for dtype in ("fp32", "bf16")}
    torch.set_num_threads(threads)


@pytest.fixture
def executor(models, tmp_path, request):
    transformer = models[getattr(request, "param", "fp32")].transformer
    size = transformer.kv_layout(SIZE).block_bytes
    disk = DiskTier(tmp_path, "cd" * 16, block_bytes=size, slots=32)
    executor = TorchExecutor(transformer, device_blocks=64, host_blocks=32, block_tokens=SIZE, disk=disk)
    yield executor
    executor.close()


def row(tokens, blocks, start=0, end=None, *, sample=True, sampling=GREEDY, draw=0, seq=1) -> ForwardRow:
    end = len(tokens) if end is None else end
    return ForwardRow(seq, start, tokens[start:end], np.array(blocks, np.int32), sample, sampling, draw)


def decode(executor, tokens, blocks, start, count, *, seq=1, sampling=GREEDY) -> list[int]:
    """Prefill from ``start`` and draw ``count`` tokens, one forward each."""
    known = [int(token) for token in tokens]
    first = start
    for draw in range(count):
        part = row(np.array(known, np.int32), blocks, first, seq=seq, sampling=sampling, draw=draw)
        ((owner, token),) = executor.run(ForwardPlan(draw, (part,))).sampled
        assert owner == seq
        first, known = len(known), [*known, token]
    return known[len(tokens) :]


def move(executor, src, dst, src_slots, dst_slots) -> None:
    done, events = threading.Event(), []
    executor.set_sink(lambda event: (events.append(event), done.set()))
    hashes = b"".join(bytes([number]) * 16 for number in range(len(src_slots)))
    executor.submit(Transfer(1, src, dst, np.array(src_slots, np.int32), np.array(dst_slots, np.int32), hashes))
    assert done.wait(10)
    assert (events[0].ok, events[0].bad) == (True, ())


@pytest.mark.parametrize("executor", ["fp32", "bf16"], indirect=True)
@pytest.mark.parametrize("way", [["host"], ["disk"], ["host", "disk", "host"]])
def test_moved_kv_is_bit_equal_and_gives_the_same_tokens(executor, way):
    blocks = [9, 3, 17, 4, 5, 40, 41, 60]
    expected = decode(executor, PROMPT, blocks, 0, 20)
    pool = executor.store.device_pool
    kept = pool[blocks[:6]].clone()
    tiers, slots = ["device", *way], [blocks[:6], [5, 6, 7, 20, 1, 0], [31, 30, 2, 3, 4, 9], [11, 10, 12, 13, 14, 15]]
    for at in range(len(way)):
        move(executor, tiers[at], tiers[at + 1], slots[at], slots[at + 1])
    pool.fill_(float("nan"))
    again = [20, 22, 21, 50, 51, 52, 53, 54]
    move(executor, tiers[-1], "device", slots[len(way)], again[:6])
    assert torch.equal(pool[again[:6]], kept)
    pool[again[6:]] = 0
    assert decode(executor, PROMPT, again, 96, 20) == expected


def test_rows_chunks_and_holes_give_the_same_tokens(executor):
    blocks = [1, 2, 3, 4, 5, 6, 7, 8]
    expected = decode(executor, PROMPT, blocks, 0, 8)
    pool = executor.store.device_pool
    pool[[2, 3, 5]] = 0
    rows = (
        row(PROMPT, blocks, 96),
        row(PROMPT, blocks, 64, 80, sample=False),
        row(PROMPT, blocks, 16, 48, sample=False),
    )
    done = executor.run(ForwardPlan(7, rows))
    assert (done.step, done.failed, done.sampled) == (7, None, ((1, expected[0]),))
    assert decode(executor, PROMPT, blocks, 99, 8) == expected
    pool.zero_()
    for first, last in ((0, 40), (40, 41), (41, 90)):
        assert executor.run(ForwardPlan(0, (row(PROMPT, blocks, first, last, sample=False),))).sampled == ()
    assert decode(executor, PROMPT, blocks, 90, 8) == expected


def test_sequences_in_one_batch_do_not_mix(executor):
    prompts = [np.roll(PROMPT, shift)[: 100 - 7 * shift] for shift in range(4)]
    tables = [list(range(8 * index, 8 * index + 8)) for index in range(4)]
    alone = [decode(executor, prompt, table, 0, 1)[0] for prompt, table in zip(prompts, tables, strict=True)]
    executor.store.device_pool.zero_()
    rows = tuple(row(prompts[i], tables[i], seq=i, sample=i != 2) for i in range(4))
    assert executor.run(ForwardPlan(0, rows)).sampled == tuple((i, alone[i]) for i in (0, 1, 3))


def test_sampled_tokens_depend_on_seed_and_draw_not_on_the_batch(executor):
    warm = Sampling(8, temperature=2.0, seed=11)
    blocks = [1, 2, 3, 4, 5, 6, 7, 8]
    first = decode(executor, PROMPT, blocks, 0, 8, sampling=warm)
    assert decode(executor, PROMPT, blocks, 0, 8, sampling=warm) == first
    assert decode(executor, PROMPT, blocks, 0, 8, sampling=Sampling(8, temperature=2.0, seed=12)) != first
    other = row(PROMPT[:30], [20, 21], seq=2, sampling=Sampling(8, temperature=1.5, top_p=0.9, seed=5))
    both = executor.run(ForwardPlan(0, (other, row(PROMPT, blocks, 90, sampling=warm)))).sampled
    assert both[1] == (1, first[0])


def test_copies_come_before_the_rows(executor):
    blocks = [1, 2, 3, 4, 5, 6, 7]
    expected = decode(executor, PROMPT, blocks, 0, 1)
    copied = [1, 2, 3, 4, 5, 6, 30]
    done = executor.run(ForwardPlan(0, (row(PROMPT, copied, 99),), copies=((7, 30),)))
    assert done.sampled == ((1, expected[0]),)
    assert executor.run(ForwardPlan(0, (), copies=((7, 31),))).sampled == ()
    assert torch.equal(executor.store.device_pool[31], executor.store.device_pool[7])


def test_a_plan_that_contradicts_itself_is_our_bug(executor):
    for wrong in (row(PROMPT, [1, 2, 3]), row(PROMPT, [1, 2, 3, 4, 5, 6, 64]), row(PROMPT, [1], 3, 3)):
        with pytest.raises(InvariantBroken):
            executor.run(ForwardPlan(0, (wrong,)))


def test_batches_match_their_definition_and_buffers_are_reused():
    rng = np.random.default_rng(0)
    builder = BatchBuilder(4, 1000, torch.device("cpu"))
    for _ in range(30):
        rows = []
        for seq in range(rng.integers(1, 6)):
            start, count = int(rng.integers(0, 40)), int(rng.integers(1, 30))
            blocks = rng.choice(1000, (start + count + 3) // 4 + int(rng.integers(0, 3)), replace=False)
            tokens = rng.integers(0, 99, count).astype(np.int32)
            rows.append(ForwardRow(seq, start, tokens, blocks.astype(np.int32), bool(rng.integers(2)), GREEDY))
        batch = builder.build(ForwardPlan(0, tuple(rows)))
        slots, positions, last, at = [], [], [], 0
        for item in rows:
            where = range(item.start, item.start + len(item.tokens))
            positions += where
            slots += [int(item.blocks[p // 4]) * 4 + p % 4 for p in where]
            at += len(where)
            last += [at - 1] if item.sample else []
        assert batch.tokens.tolist() == [int(t) for item in rows for t in item.tokens]
        assert (batch.positions.tolist(), batch.slots.tolist()) == (positions, slots)
        assert batch.logits_index.tolist() == last
        assert batch.rows.context_len == tuple(item.start + len(item.tokens) for item in rows)
        for table, item in zip(batch.rows.block_tables.tolist(), rows, strict=True):
            assert table[: len(item.blocks)] == item.blocks.tolist()
            assert not any(table[len(item.blocks) :])


def test_health_and_recovery(models, tmp_path):
    transformer = models["fp32"].transformer
    size = transformer.kv_layout(SIZE).block_bytes
    with pytest.raises(ValueError, match="bytes"):
        TorchExecutor(
            transformer, device_blocks=8, disk=DiskTier(tmp_path / "x", "cd" * 16, block_bytes=size + 1, slots=8)
        )
    for found in (0, 2):
        disk = DiskTier(tmp_path, "cd" * 16, block_bytes=size, slots=8)
        executor = TorchExecutor(transformer, device_blocks=8, host_blocks=4, block_tokens=SIZE, disk=disk)
        assert sorted(executor.recovered().slots) == list(range(found))
        executor.run(ForwardPlan(0, (row(PROMPT[:20], [0, 1]),)))
        move(executor, "device", "disk", [0, 1], [0, 1])
        health = executor.health()
        assert (health["tokens"], health["disk"]["blocks"], health["disk"]["writable"]) == (20, 2, True)
        assert health["paths"]["device_disk"]["bytes"] == 2 * size
        executor.close()
