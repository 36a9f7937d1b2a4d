"""Traffic between the tiers: what is waited for, what is computed meanwhile, what is copied early, what fills vacant room."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

from tenuto.wire import AgentCompaction, AgentEnd, AgentPause, AnyAction, Envelope, Forecast, Shared
from tenuto_server.engine.events import HintBatch, Sampling, SubmitTurn
from tenuto_server.engine.plan import Transfer
from tenuto_server.sim.world import Turn, World

RNG = random.Random(11)


def words(kit: SimpleNamespace, count: int) -> list[int]:
    return [RNG.randrange(kit.vocab) for _ in range(count)]


def submit(world: World, name: str, prompt: list[int], count: int = 2) -> Turn:
    request = f"{name}-{len(world.turns)}"
    return world.submit(SubmitTurn(request, "t", np.array(prompt, np.int32), Sampling(count), session=name))


def ask(world: World, name: str, prompt: list[int], count: int = 2) -> list[int]:
    """One turn to its end; the context that it leaves."""
    turn = submit(world, name, prompt, count)
    world.run()
    return [*prompt, *turn.tokens]


def hint(world: World, *actions: AnyAction) -> None:
    world.at(world.now_s, HintBatch(f"h{world.steps}", "t", Envelope.of(actions)))
    world.run()


def on_device(world: World, name: str) -> int:
    session = world.engine.core.sessions.find("t", name)
    assert session is not None
    return world.engine.core.cache.resident_tokens(session.handle).get("device", 0)


def one_link(world: World, bytes_per_s: float) -> None:
    """All copies to the device wait for each other, and report what the link took for each."""
    free = [0.0]

    def copy_s(transfer: Transfer) -> float:
        return len(transfer.src_slots) * 64 / bytes_per_s

    def transfer_s(transfer: Transfer) -> float:
        if transfer.dst != "device":
            return 1e-4
        free[0] = max(free[0], world.now_s) + copy_s(transfer)
        return free[0] - world.now_s

    world._transfer_s, world._copy_s = transfer_s, copy_s


def test_who_waits_in_a_queue_that_moves_is_not_late(kit: SimpleNamespace) -> None:
    """Four contexts come back over one link at once: the last load ends long after the second that one alone may take."""
    world = kit.world("lru", device=330, host=400, disk=0, running=8)
    contexts = {name: ask(world, name, words(kit, 300)) for name in "abcd"}
    for name in "wxyz":
        ask(world, name, words(kit, 300))
    assert sum(on_device(world, name) for name in "abcd") < 100
    one_link(world, 1e4)
    began = world.now_s
    back = [submit(world, name, [*context, *words(kit, 2)]) for name, context in contexts.items()]
    world.run()
    took = max(turn.first_token_ns or 0 for turn in back) / 1e9 - began
    assert took > 1.5
    figures = world.engine.metrics()
    assert figures.get("restores_late_total", 0) == 0
    assert figures.get("computed_instead_of_loaded_total", 0) == 0


def test_a_front_is_computed_only_while_nobody_else_needs_the_machine(kit: SimpleNamespace) -> None:
    def splits(others: int) -> float:
        world = kit.world("tenuto", device=220, host=300, disk=0, step_tokens=16, running=8)
        context = ask(world, "a", words(kit, 200))
        ask(world, "b", words(kit, 800))
        for index in range(others):
            submit(world, f"o{index}", words(kit, 40), 40)
        submit(world, "a", [*context, *words(kit, 2)])
        world.run()
        return float(world.engine.metrics().get("split_restores_total", 0))  # type: ignore[arg-type]

    assert splits(0) == 1
    assert splits(4) == 0


def test_copies_made_early_stay(kit: SimpleNamespace) -> None:
    """Where the host is full of only copies, none is made early in the room that is kept free there, to make way again."""
    world = kit.world("tenuto", device=60, host=200, disk=400)
    for name in "abcdefghijkl":
        ask(world, name, words(kit, 110))
        hint(world, AgentPause(session=name, kind="human", forecast=Forecast(p50_s=300.0, p90_s=900.0)))
    world.run(until_s=world.now_s + 5.0)
    before = len(world.machine.transfers)
    for step in range(300):
        world.at(world.now_s + 1.0 * step, None)
    world.run()
    early = [t for t in world.machine.transfers[before:] if t.src == "device" and not t.urgent]
    assert sum(len(t.src_slots) for t in early) <= 16


@pytest.mark.parametrize("how", ["end", "compaction"])
def test_what_had_to_leave_comes_back_when_room_is_vacant(kit: SimpleNamespace, how: str) -> None:
    world = kit.world("tenuto", device=60, host=200, disk=0)
    ask(world, "a", words(kit, 120))
    hint(world, AgentPause(session="a", kind="tool", forecast=Forecast(p50_s=60.0, p90_s=90.0)))
    ask(world, "b", words(kit, 200))
    hint(world, AgentPause(session="b", kind="tool", forecast=Forecast(p50_s=30.0, p90_s=40.0)))
    away = on_device(world, "a")
    assert away <= 40
    if how == "end":
        hint(world, AgentEnd(session="b"))
    else:
        kept = Shared(tokens=20)
        hint(world, AgentCompaction(session="b", phase="commit", keep=kept))
    world.run(until_s=world.now_s + 2.0)
    assert on_device(world, "a") >= away + 60
    assert world.engine.metrics()["refills_total"] > 0
    assert not world.engine.core.cache.tiers.moves


def test_vacant_room_is_not_filled_with_what_nobody_wants(kit: SimpleNamespace) -> None:
    world = kit.world("tenuto", device=60, host=200, disk=0)
    for name in "ab":
        ask(world, name, words(kit, 150))
        hint(world, AgentEnd(session=name))
    moved = len([t for t in world.machine.transfers if t.dst == "device"])
    ask(world, "c", words(kit, 100))
    hint(world, AgentEnd(session="c"))
    world.run(until_s=world.now_s + 2.0)
    assert len([t for t in world.machine.transfers if t.dst == "device"]) == moved
