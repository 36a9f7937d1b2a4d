"""The engine's promises one by one: where tokens come from and why, aborts, preemption, tenants, chains, restarts, faults."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

from tenuto_server.engine.events import CancelTurn, DiskRecovered, Sampling, StopTurn, SubmitTurn, TierFailed
from tenuto_server.engine.plan import Transfer
from tenuto_server.runtime.null import Fault
from tenuto_server.sim.world import Turn, World

RNG = random.Random(5)


def words(kit: SimpleNamespace, count: int) -> list[int]:
    return [RNG.randrange(kit.vocab) for _ in range(count)]


def ask(world: World, name: str | None, prompt: list[int], count: int = 2, tenant: str = "t", **more: object) -> Turn:
    request = f"{name}-{len(world.turns)}"
    turn = SubmitTurn(request, tenant, np.array(prompt, np.int32), Sampling(count), session=name, **more)  # type: ignore[arg-type]
    record = world.submit(turn)
    world.run()
    return record


def report(turn: Turn) -> tuple[dict[str, int], dict[str, int]]:
    assert turn.done is not None
    return dict(turn.done.report.cached), dict(turn.done.report.recomputed)


# ---- where tokens come from ----


def test_labels(kit: SimpleNamespace) -> None:
    """Cold, then cached, then a mutation; every prompt token has one source, and the place of the change is told."""
    world = kit.world("tenuto", device=200)
    prompt = words(kit, 50)
    first = ask(world, "s", prompt)
    assert report(first) == ({}, {"cold": 50})
    context = [*prompt, *first.tokens]
    second = ask(world, "s", [*context, *words(kit, 10)])
    # The last sampled token has no KV yet: of 52 tokens 51 are cached, the 11 others are new.
    assert report(second) == ({"device": 51}, {"cold": 11})
    changed = [*context[:20], *words(kit, 60)]
    changed[20] = (context[20] + 1) % kit.vocab
    third = ask(world, "s", changed)
    cached, lost = report(third)
    assert cached == {"device": 20}
    assert lost == {"mutation": 63 - 20, "cold": 80 - 63}
    assert third.done is not None
    assert third.done.report.divergence is not None
    assert (third.done.report.divergence.token, third.done.report.divergence.tokens_lost) == (20, 43)


def test_identical_prompt_computes_one_token(kit: SimpleNamespace) -> None:
    world = kit.world("tenuto", device=200)
    prompt = words(kit, 64)
    ask(world, "a", prompt)
    again = ask(world, "b", prompt)
    assert report(again) == ({"device": 63}, {"cold": 1})


def test_the_safeguard_hears_of_every_turn(kit: SimpleNamespace) -> None:
    """A session's first turn is what plain LRU would find at the second."""
    world = kit.world("tenuto", device=200)
    guard = world.engine.core.safeguard
    prompt = words(kit, 50)
    first = ask(world, "s", prompt)
    assert list(guard.shadowed) == [world.engine.core.sessions.find("t", "s").handle]
    ask(world, "s", [*prompt, *first.tokens, *words(kit, 10)])
    assert guard.lead == pytest.approx(
        1 / 51
    )  # of 51 the shadow holds the prompt, the cache the answer's first token too


def test_lost_to_pressure_says_capacity(kit: SimpleNamespace) -> None:
    world = kit.world("lru", device=40, host=0, disk=0)
    prompt = words(kit, 80)
    first = ask(world, "a", prompt)
    ask(world, "b", words(kit, 130))
    back = ask(world, "a", [*prompt, *first.tokens, *words(kit, 4)])
    cached, lost = report(back)
    assert lost["capacity"] > 0
    assert sum(cached.values()) + sum(lost.values()) == 86


def test_restored_from_host_then_disk(kit: SimpleNamespace) -> None:
    """Pushed to the host, then to disk, it comes back by copies, not by computing."""
    world = kit.world("lru", device=60, host=40, disk=400)
    prompt = words(kit, 100)
    first = ask(world, "a", prompt)
    for index in range(4):
        ask(world, f"b{index}", words(kit, 150))
    computed = world.machine.tokens_computed
    back = ask(world, "a", [*prompt, *first.tokens, *words(kit, 3)])
    cached, lost = report(back)
    assert cached.get("host", 0) + cached.get("disk", 0) >= 96, (cached, lost)
    assert world.machine.tokens_computed - computed <= 15


def test_split_restore_computes_the_front(kit: SimpleNamespace) -> None:
    """Where loading is about as slow as computing, both happen at once and the turn starts earlier than by either."""
    world = kit.world("tenuto", device=120, host=200, disk=0, step_tokens=16)
    prompt = words(kit, 200)
    first = ask(world, "a", prompt)
    ask(world, "b", words(kit, 400))
    start = world.now_s
    back = ask(world, "a", [*prompt, *first.tokens, *words(kit, 2)])
    metrics = world.engine.metrics()
    assert back.done is not None
    assert back.first_token_ns is not None
    assert metrics.get("restores_total", 0) > 0
    took = back.first_token_ns / 1e9 - start
    load_only = 200 / kit.block * 64 / 2e4
    compute_only = 200e-3
    assert metrics.get("split_restores_total", 0) > 0
    assert took < 1.3 * min(load_only, compute_only)


# ---- leaving at any moment ----


@pytest.mark.parametrize("policy", ["lru", "tenuto"])
def test_abort_in_any_phase_leaves_nothing_behind(kit: SimpleNamespace, policy: str) -> None:
    """S5: cancel at every instant of a turn that restores, prefills and decodes; pools and pins return to their baseline."""
    rng = random.Random(17)
    world = kit.world(policy, device=60, host=60, disk=60)
    prompt = [rng.randrange(kit.vocab) for _ in range(90)]
    first = ask(world, "a", prompt, 3)
    context = [*prompt, *first.tokens]
    cache = world.engine.core.cache
    for index in range(150):
        ask(world, "b", [rng.randrange(kit.vocab) for _ in range(120)])
        request = f"abort-{index}"
        turn = SubmitTurn(request, "t", np.array([*context, 1, 2, 3], np.int32), Sampling(6), session="a")
        world.submit(turn)
        world.at(world.now_s + index * 0.002, CancelTurn(request))
        world.run()
        record = world.turns[request]
        assert record.done is not None
        assert record.tokens == kit.reference([*context, 1, 2, 3], len(record.tokens))
        assert not cache.tables
        assert not cache.private_blocks
        assert not cache.tiers.pinned_device_blocks
        assert not cache.tiers.moves


def test_stop_keeps_what_was_asked(kit: SimpleNamespace) -> None:
    world = kit.world("tenuto", device=100)
    turn = SubmitTurn("r-0", "t", np.array(words(kit, 9), np.int32), Sampling(50), session="s")
    record = world.submit(turn)
    world.at(0.06, StopTurn("r-0", 2))
    world.run()
    assert record.done is not None
    assert (record.done.reason, record.done.completion_tokens) == ("stop", 2)


def test_stop_ids_end_a_turn_and_are_not_handed_out(kit: SimpleNamespace) -> None:
    world = kit.world("lru", device=100)
    prompt = words(kit, 9)
    expected = kit.reference(prompt, 8)
    stop = expected[3]
    sampling = Sampling(8, stop_ids=frozenset({stop}))
    record = world.submit(SubmitTurn("r-0", "t", np.array(prompt, np.int32), sampling))
    world.run()
    assert record.tokens == expected[: expected.index(stop)]
    assert record.done is not None
    assert record.done.reason == "stop"


# ---- memory ----


def test_preemption_recomputes_and_changes_no_token(kit: SimpleNamespace) -> None:
    """Two turns generate far beyond what was reserved for them: one is preempted, both answers are right."""
    world = kit.world("tenuto", device=40, host=0, disk=0, running=4)
    prompts = [words(kit, 30), words(kit, 30)]
    turns = [
        world.submit(SubmitTurn(f"r-{i}", "t", np.array(p, np.int32), Sampling(90), session=f"s{i}"))
        for i, p in enumerate(prompts)
    ]
    world.run()
    assert world.engine.metrics()["preemptions_total"] >= 1
    for turn, prompt in zip(turns, prompts, strict=True):
        assert turn.tokens == kit.reference(prompt, 90)


def test_a_turn_that_outgrows_the_device_ends_by_length(kit: SimpleNamespace) -> None:
    """Nothing can be preempted for it: it ends with what it has, and the next turn is served."""
    world = kit.world("tenuto", device=20, host=0, disk=0)
    prompt = words(kit, 40)
    record = world.submit(SubmitTurn("r-0", "t", np.array(prompt, np.int32), Sampling(500), session="s"))
    world.run()
    assert record.done is not None
    assert record.done.reason == "length"
    assert 30 <= len(record.tokens) <= 41
    assert record.tokens == kit.reference(prompt, len(record.tokens))
    assert ask(world, "t", words(kit, 30)).done is not None


def test_late_loads_leave_no_block_owned_twice(kit: SimpleNamespace) -> None:
    """Blocks computed while their load hung are handed over once it ends: a running turn owns only what it must."""
    slow = {"armed": False}

    def fault(transfer: Transfer) -> Fault | None:
        return Fault("delay") if slow["armed"] and transfer.dst == "device" else None

    world = kit.world("lru", fault, device=90, host=200, disk=0, step_tokens=16)
    prompt = words(kit, 120)
    first = ask(world, "a", prompt)
    ask(world, "b", words(kit, 330))
    slow["armed"] = True
    back = [*prompt, *first.tokens, *words(kit, 2)]
    turn = world.submit(SubmitTurn("back-0", "t", np.array(back, np.int32), Sampling(150), session="a"))
    world.run(until_s=world.now_s + 1.2)
    assert world.engine.metrics()["restores_late_total"] >= 1
    slow["armed"] = False
    world.machine.complete()
    world.collect(world.machine.take_events())
    leaked = []

    def watch() -> None:
        for table in world.engine.core.cache.tables:
            own = np.flatnonzero(table.private[: min(table.front // kit.block, table.path_blocks)])
            leaked.append(len(own))

    world._after_step = watch
    world.run()
    assert turn.tokens == kit.reference(back, 150)
    assert leaked
    assert leaked[-1] == 0


def test_too_long_is_refused_with_both_numbers(kit: SimpleNamespace) -> None:
    world = kit.world("tenuto", device=40)
    record = ask(world, "s", words(kit, 200))
    assert record.rejected is not None
    assert record.rejected.code == "too_long"
    assert "200" in record.rejected.message
    assert "152" in record.rejected.message  # (40 - 2) blocks of 4 tokens


def test_waiting_room_is_bounded(kit: SimpleNamespace) -> None:
    world = kit.world("tenuto", waiting_max=3, running=1)
    records = [
        world.submit(SubmitTurn(f"r-{i}", "t", np.array(words(kit, 20), np.int32), Sampling(4), session=f"s{i}"))
        for i in range(8)
    ]
    world.run()
    refused = [r for r in records if r.rejected is not None]
    assert refused
    assert all("waiting_max is 3" in r.rejected.message for r in refused if r.rejected)
    assert all(r.ended for r in records)


def test_a_waiting_turn_keeps_its_prefix(kit: SimpleNamespace) -> None:
    """What a queued turn needs comes back sooner than anything that pauses: it is the last to go, not the first."""
    world = kit.world("tenuto", device=60, host=0, disk=0, running=1)
    prompt = words(kit, 80)
    first = ask(world, "a", prompt)
    for index in range(2):
        ask(world, f"idle{index}", words(kit, 40))
    long = SubmitTurn("long-0", "t", np.array(words(kit, 20), np.int32), Sampling(60), session="long")
    world.submit(long)
    back = [*prompt, *first.tokens, *words(kit, 4)]
    turn = world.submit(SubmitTurn("back-0", "t", np.array(back, np.int32), Sampling(2), session="a"), in_s=0.05)
    world.run()
    cached, lost = report(turn)
    assert cached == {"device": 81}
    assert "capacity" not in lost
    assert turn.done is not None
    assert turn.done.report.queue_wait_s > 0


# ---- who is who ----


def test_tenants_share_nothing(kit: SimpleNamespace) -> None:
    """S13: the same prompt, session id and salt under another tenant finds nothing and sees no session."""
    world = kit.world("tenuto", device=200)
    prompt = words(kit, 60)
    ask(world, "s", prompt, tenant="a")
    other = ask(world, "s", prompt, tenant="b")
    assert report(other) == ({}, {"cold": 60})
    salted = ask(world, "s2", prompt, tenant="a", salt="x")
    assert report(salted) == ({}, {"cold": 60})
    same = ask(world, "s3", prompt, tenant="a", salt="x")
    assert report(same)[0] == {"device": 59}


def test_unnamed_turns_form_a_chain(kit: SimpleNamespace) -> None:
    world = kit.world("tenuto", device=400)
    one, two = words(kit, 30), words(kit, 33)
    first, other = ask(world, None, one), ask(world, None, two)
    second = ask(world, None, [*one, *first.tokens, *words(kit, 5)])
    third = ask(world, None, [*one, *first.tokens, 1, 2])
    names = [turn.done.report.session for turn in (first, other, second, third) if turn.done]
    assert names[0] == names[2] != names[1]
    assert names[3] not in names[:3], "the chain has moved on: this is another conversation on its prefix"
    named = ask(world, "mine", [*two, *other.tokens, 4])
    assert named.done is not None
    assert named.done.report.session == "mine"


def test_overlapping_turns_of_one_session(kit: SimpleNamespace) -> None:
    world = kit.world("tenuto", device=200)
    prompt = words(kit, 40)
    turns = [
        world.submit(SubmitTurn(f"r-{i}", "t", np.array([*prompt, i], np.int32), Sampling(3 + i), session="s"))
        for i in range(3)
    ]
    world.run()
    for index, turn in enumerate(turns):
        assert turn.tokens == kit.reference([*prompt, index], 3 + index)
    session = world.engine.core.sessions.find("t", "s")
    assert session is not None
    assert (session.active, session.turns, session.state) == (0, 3, "paused")


def test_sessions_per_tenant_are_bounded(kit: SimpleNamespace) -> None:
    world = kit.world("tenuto", device=200, sessions_per_tenant_max=3)
    for index in range(6):
        ask(world, f"s{index}", words(kit, 10))
    assert [s.id for s in world.engine.core.sessions.of_tenant("t")] == ["s3", "s4", "s5"]
    assert set(world.engine.core.cache.tips) == {s.handle for s in world.engine.core.sessions.of_tenant("t")}


# ---- the world's failures ----


def test_restart_finds_its_blocks_on_disk(kit: SimpleNamespace) -> None:
    """What a former life left on disk is used; what belongs to another tenant is not."""
    first = kit.world("lru", device=60, host=0, disk=200)
    prompt = words(kit, 100)
    answer = ask(first, "a", prompt, 4)
    for index in range(3):
        ask(first, f"b{index}", words(kit, 150))
    cache = first.engine.core.cache
    slots, hashes = [], []
    for node in cache.tree.nodes():
        if node.slots[2] is not None and not node.fill:
            slots += node.slots[2].tolist()
            hashes += [node.hashes[i : i + 16] for i in range(0, len(node.hashes), 16)]
    assert slots
    second = kit.world("lru", device=60, host=0, disk=200)
    second.machine._tiers["disk"] = first.machine._tiers["disk"]
    second.machine._content = first.machine._content
    second.at(0.0, DiskRecovered(tuple(hashes), tuple(slots)))
    foreign = ask(second, "a", prompt, 4, tenant="other")
    assert report(foreign) == ({}, {"cold": 100})
    back = ask(second, "a", prompt, 4)
    cached, _ = report(back)
    assert cached["disk"] >= 64
    assert back.tokens == answer.tokens
    assert not second.machine.wrong


def test_a_tier_that_fails_is_left_alone(kit: SimpleNamespace) -> None:
    world = kit.world("lru", device=60, host=0, disk=200)
    world.at(0.0, TierFailed("disk", False, "read-only"))
    for index in range(4):
        prompt = words(kit, 120)
        turn = ask(world, f"s{index}", prompt)
        assert turn.tokens == kit.reference(prompt, 2)
    assert not world.machine.transfers
    assert world.engine.metrics()["tier_writable"]["disk"] == 0.0
    world.at(world.now_s, TierFailed("disk", True))
    ask(world, "s9", words(kit, 120))
    assert world.machine.transfers


@pytest.mark.parametrize("position", [0, 5, -1])
@pytest.mark.parametrize("kind", ["fail", "corrupt", "never"])
def test_a_restore_that_fails_turns_into_compute(kit: SimpleNamespace, kind: str, position: int) -> None:
    """S2: at the first, a middle and the last block; the answer is right and the failure is counted."""
    broken: list[int] = []

    def fault(transfer: Transfer) -> Fault | None:
        if transfer.dst == "device" and armed:
            broken.append(transfer.id)
            return Fault(kind, (position,))  # type: ignore[arg-type]
        return None

    armed = False
    world = kit.world("lru", fault, device=60, host=200, disk=0)
    prompt = words(kit, 120)
    first = ask(world, "a", prompt)
    ask(world, "b", words(kit, 200))
    armed = True
    back = [*prompt, *first.tokens, *words(kit, 2)]
    turn = ask(world, "a", back)
    assert broken
    assert turn.tokens == kit.reference(back, 2)
    metrics = world.engine.metrics()
    if kind == "corrupt":
        assert metrics["corrupt_blocks_total"]["host"] == len(broken)
    if kind == "fail":
        assert metrics["transfers_failed_total"]["host>device"] == len(broken)
    if kind == "never":
        assert metrics["restores_late_total"] >= 1


def test_a_long_unattended_prompt_lets_an_attended_one_by(kit: SimpleNamespace) -> None:
    """The batch prompt takes seven steps of 24 tokens; the other arrives after the first of them and waits for one at most."""
    firsts = {}
    for attended in (None, False):
        world = kit.world("tenuto", device=200)
        long, short = np.arange(160, dtype=np.int32) % kit.vocab, np.arange(8, dtype=np.int32) + 3
        batch = world.submit(SubmitTurn("b", "t", long, Sampling(4), session="b", attended=attended))
        watched = world.submit(SubmitTurn("w", "t", short, Sampling(4), session="w"), in_s=0.01)
        world.run()
        assert batch.tokens == kit.reference(long.tolist(), 4)
        assert watched.tokens == kit.reference(short.tolist(), 4)
        assert watched.first_token_ns is not None
        firsts[attended] = watched.first_token_ns - watched.submitted_ns
    step_ns = 25e6  # 24 tokens and a millisecond
    assert firsts[None] > 5 * step_ns
    assert firsts[False] <= 2 * step_ns
