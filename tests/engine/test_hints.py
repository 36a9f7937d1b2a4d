"""Hints: receipts, limits, staleness, and that they do what they say to leases, rates and tiers."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

from tenuto.wire import (
    AgentCompaction,
    AgentEnd,
    AgentFork,
    AgentJoin,
    AgentKeepalive,
    AgentPause,
    AgentPauseUpdate,
    AgentResumeSoon,
    AgentSession,
    AnyAction,
    Envelope,
    EnvelopeAction,
    Forecast,
    KvDemote,
    KvPrefetch,
    KvRelease,
    KvRetain,
    Receipt,
    SessionView,
    Shared,
    Target,
)
from tenuto_server.engine.events import HintBatch, PauseInferred, QuerySessions, Sampling, SubmitTurn
from tenuto_server.engine.plan import HintsDone, SessionsOut
from tenuto_server.sim.world import Turn, World

RNG = random.Random(9)


def ask(world: World, name: str, prompt: list[int], count: int = 2, **more: object) -> Turn:
    turn = SubmitTurn(
        f"{name}-{len(world.turns)}", "t", np.array(prompt, np.int32), Sampling(count), session=name, **more
    )  # type: ignore[arg-type]
    record = world.submit(turn)
    world.run()
    return record


def hint(world: World, *actions: AnyAction | Envelope, tenant: str = "t") -> tuple[Receipt, ...]:
    envelope = actions[0] if isinstance(actions[0], Envelope) else Envelope.of(actions)  # type: ignore[arg-type]
    ticket = f"ticket-{len(world.outputs)}-{world.steps}"
    world.at(world.now_s, HintBatch(ticket, tenant, envelope))
    world.run()
    return next(o.receipts for o in reversed(world.outputs) if isinstance(o, HintsDone) and o.ticket == ticket)


def view(world: World, name: str, tenant: str = "t") -> SessionView | None:
    ticket = f"view-{len(world.outputs)}-{world.steps}"
    world.at(world.now_s, QuerySessions(ticket, tenant, name))
    world.run()
    views = next(o.views for o in reversed(world.outputs) if isinstance(o, SessionsOut) and o.ticket == ticket)
    return views[0] if views else None


def words(kit: SimpleNamespace, count: int) -> list[int]:
    return [RNG.randrange(kit.vocab) for _ in range(count)]


def rate(world: World, name: str) -> float:
    session = world.engine.core.sessions.find("t", name)
    assert session is not None
    assert session.retention is not None
    return session.retention.rate


def test_a_pause_earns_a_lease(kit: SimpleNamespace) -> None:
    world = kit.world("tenuto", device=200)
    ask(world, "s", words(kit, 40))
    (receipt,) = hint(
        world, AgentPause(session="s", seq=1, kind="tool", tool="bash", forecast=Forecast(p50_s=5, p90_s=9))
    )
    assert receipt.outcome == "accepted"
    assert receipt.lease is not None
    assert receipt.lease.until_s > 5
    assert receipt.lease.tokens == 41  # 40 of the prompt and the first of the two generated tokens have KV
    seen = view(world, "s")
    assert seen is not None
    assert (seen.state, seen.pause_kind, seen.resident) == ("paused", "tool", {"device": 41})
    assert seen.forecast == Forecast(p50_s=5, p90_s=9)


@pytest.mark.parametrize("seq", [0, 3])
def test_late_and_duplicate_hints_are_harmless(kit: SimpleNamespace, seq: int) -> None:
    world = kit.world("tenuto", device=200)
    ask(world, "s", words(kit, 20))
    pause = AgentPause(session="s", seq=3, kind="tool")
    assert hint(world, pause)[0].outcome == "accepted"
    again = hint(world, AgentPause(session="s", seq=seq, kind="human"))[0]
    assert (again.outcome == "rejected") == (seq == 3)
    if seq == 3:
        assert again.reason.startswith("stale")
    # A hint about a pause that is long over does not touch the present one.
    world.at(world.now_s + 1, None)
    world.run()
    old = hint(world, AgentPause(session="s", seq=9, kind="human", at_s=500.0))[0]
    assert old.outcome == "rejected"


def test_unknown_and_foreign_sessions_look_alike(kit: SimpleNamespace) -> None:
    world = kit.world("tenuto", device=200)
    ask(world, "s", words(kit, 20))
    action = AgentKeepalive(session="s", for_s=5)
    foreign = hint(world, action, tenant="other")[0]
    unknown = hint(world, AgentKeepalive(session="nobody", for_s=5))[0]
    assert (foreign.outcome, foreign.reason) == (unknown.outcome, unknown.reason) == ("missing", "no such session")
    assert view(world, "s", tenant="other") is None


def test_bad_and_strange_actions_get_receipts(kit: SimpleNamespace) -> None:
    world = kit.world("tenuto", device=200)
    ask(world, "s", words(kit, 20))
    envelope = Envelope(
        actions=(
            EnvelopeAction(action_id="1", action_type="agent.dance", payload={"session": "s"}),
            EnvelopeAction(action_id="2", action_type="agent.pause", payload={"session": "s", "kind": "nap"}),
            EnvelopeAction(action_id="3", action_type="agent.pause", payload={"session": "s", "kind": "tool"}),
        )
    )
    receipts = hint(world, envelope)
    assert [r.action_id for r in receipts] == ["1", "2", "3"]
    assert [r.outcome for r in receipts] == ["rejected", "rejected", "accepted"]
    assert "agent.dance" in receipts[0].reason
    assert receipts[1].reason.startswith("kind:")


def test_floods_are_limited_per_tenant_and_nothing_is_half_applied(kit: SimpleNamespace) -> None:
    world = kit.world("tenuto", device=200, hint_rate_per_s=10.0, hint_burst=20, hint_actions_max=15)
    ask(world, "s", words(kit, 20))
    flood = [AgentKeepalive(session="s", seq=i + 1, for_s=1) for i in range(12)]
    assert {r.outcome for r in hint(world, *flood)} == {"accepted"}
    over = hint(world, *[AgentKeepalive(session="s", seq=i + 100, for_s=1) for i in range(12)])
    assert {r.outcome for r in over} == {"rejected"}
    assert all(r.reason.startswith("limit: hint_rate_per_s is 10") for r in over)
    session = world.engine.core.sessions.find("t", "s")
    assert session is not None
    assert session.seq == 12
    other = hint(world, AgentSession(session="x"), tenant="other")
    assert other[0].outcome == "accepted"
    too_many = hint(world, *[AgentKeepalive(session="x", for_s=1) for _ in range(16)], tenant="other")
    assert too_many[0].reason.startswith("limit: hint_actions_max is 15")


def test_limits_clip(kit: SimpleNamespace) -> None:
    world = kit.world("tenuto", device=200, keepalive_max_s=60.0, lease_max_s=100.0)
    ask(world, "s", words(kit, 20))
    clipped = hint(world, AgentKeepalive(session="s", for_s=3600))[0]
    assert (clipped.outcome, clipped.reason) == ("clipped", "limit: keepalive_max_s is 60")
    ended = hint(world, AgentEnd(session="s", keep_s=3600))[0]
    assert (ended.outcome, ended.reason) == ("clipped", "limit: lease_max_s is 100")


def test_what_hints_do_to_the_rate(kit: SimpleNamespace) -> None:
    """Sooner is worth more; ended is worth nothing; a better forecast replaces a worse one."""
    world = kit.world("tenuto", device=200)
    for name in ("soon", "late", "gone"):
        ask(world, name, words(kit, 40))
    hint(world, AgentPause(session="soon", seq=1, kind="tool", forecast=Forecast(p50_s=2, p90_s=3)))
    hint(world, AgentPause(session="late", seq=1, kind="tool", forecast=Forecast(p50_s=900, p90_s=1500)))
    hint(world, AgentEnd(session="gone", seq=1))
    assert rate(world, "soon") > 10 * rate(world, "late") > 0
    assert rate(world, "gone") == 0.0
    before = rate(world, "late")
    hint(world, AgentPauseUpdate(session="late", seq=2, forecast=Forecast(p50_s=3, p90_s=5)))
    assert rate(world, "late") > 5 * before
    assert hint(world, AgentResumeSoon(session="late", seq=3, in_s=0.1))[0].outcome == "accepted"


def test_a_policy_that_takes_no_hints_says_so(kit: SimpleNamespace) -> None:
    world = kit.world("lru", device=200)
    ask(world, "s", words(kit, 20))
    receipt = hint(world, AgentPause(session="s", kind="tool"))[0]
    assert (receipt.outcome, receipt.reason) == ("rejected", "policy lru takes no hints")
    assert hint(world, AgentSession(session="s", agent="main", attended=False))[0].outcome == "accepted"


def test_fork_shares_and_join_lets_go(kit: SimpleNamespace) -> None:
    world = kit.world("tenuto", device=400)
    prompt = words(kit, 80)
    first = ask(world, "p", prompt)
    assert hint(world, AgentFork(session="p", seq=1, children=("c1", "c2")))[0].outcome == "accepted"
    children = [view(world, name) for name in ("c1", "c2")]
    assert all(child is not None and child.parent == "p" for child in children)
    context = [*prompt, *first.tokens]
    for name, shared in (("c1", 81), ("c2", 82)):  # the parent's last token gets its KV from the first child
        new = [0 if name == "c1" else 1, *words(kit, 8)]
        turn = ask(world, name, [*context, *new], parent="p")
        assert turn.done is not None
        assert dict(turn.done.report.cached) == {"device": shared}
    assert hint(world, AgentJoin(session="p", seq=2, child="c1"))[0].outcome == "accepted"
    assert rate(world, "c1") == 0.0
    assert rate(world, "c2") > 0.0
    assert hint(world, AgentJoin(session="c1", seq=2, child="p"))[0].outcome == "missing"


def test_compaction_lets_the_superseded_suffix_go(kit: SimpleNamespace) -> None:
    world = kit.world("tenuto", device=400)
    prompt = words(kit, 100)
    ask(world, "s", prompt)
    hint(world, AgentCompaction(session="s", seq=1, phase="begin"))
    assert (
        hint(world, AgentCompaction(session="s", seq=2, phase="commit", keep=Shared(tokens=40)))[0].outcome
        == "accepted"
    )
    seen = view(world, "s")
    assert seen is not None
    assert seen.context_tokens == 40
    assert seen.resident == {"device": 40}
    turn = ask(world, "s", [*prompt[:40], *words(kit, 10)])
    assert turn.done is not None
    assert dict(turn.done.report.cached)["device"] >= 40
    assert "mutation" not in turn.done.report.recomputed


def test_a_compaction_that_does_not_come_costs_one_context_and_a_true_one_mends_the_name(kit: SimpleNamespace) -> None:
    world = kit.world("tenuto", device=400)
    context = words(kit, 100)

    def announced() -> str:
        return hint(world, AgentCompaction(session="s", phase="commit", keep=Shared(tokens=0)))[0].outcome

    ask(world, "s", context)
    assert announced() == "accepted"
    context += words(kit, 10)
    ask(world, "s", context)  # all of it comes again
    assert announced() == "deferred"
    context += words(kit, 10)
    again = ask(world, "s", context)
    assert again.done is not None
    assert dict(again.done.report.cached)["device"] >= 110
    for left in (30, 20):  # now they are true; told four times, two of them falsely, the name is mended
        assert announced() == "deferred"
        ask(world, "s", words(kit, left))
    assert announced() == "accepted"


def test_an_announced_end_is_judged_by_a_return_or_by_an_hour_of_silence(kit: SimpleNamespace) -> None:
    world = kit.world("tenuto", device=400)
    stats = world.engine.core.knowledge
    contexts: dict[str, list[int]] = {}

    def turn(name: str, end: bool) -> float:
        contexts[name] = contexts.get(name, []) + words(kit, 40)
        prompt = np.array(contexts[name], np.int32)
        world.submit(SubmitTurn(f"{name}{len(world.turns)}", "t", prompt, Sampling(2), session=name))
        world.run(until_s=world.now_s + 1.0)
        if end:
            action = AgentEnd(session=name)
            world.at(world.now_s, HintBatch(f"end of {name}", "t", Envelope.of((action,))))
            world.run(until_s=world.now_s + 1.0)
        return stats.p_return_ended("t")

    first = [turn(name, end=True) for name in ("a", "b", "c")]
    assert first == [stats.p_return_ended("unheard")] * 3  # nobody knows yet
    world.run(until_s=1800.0)
    lied = turn("a", end=False)
    assert lied > first[0]
    world.run(until_s=3000.0)
    assert turn("d", end=False) == lied
    world.run(until_s=3700.0)
    proved = turn("d", end=False)  # the hour of "b" and "c" is over
    assert proved < lied
    assert turn("b", end=False) > proved  # after all


def test_commands(kit: SimpleNamespace) -> None:
    """kv.demote frees device blocks and keeps the bytes below; kv.prefetch brings them back; kv.release gives up."""
    world = kit.world("tenuto", device=200, host=200)
    prompt = words(kit, 80)
    first = ask(world, "s", prompt)
    used = world.engine.core.cache.used_blocks(0)
    assert hint(world, KvDemote(session="s", seq=1))[0].outcome == "accepted"
    while hint(world, KvDemote(session="s"))[0].outcome == "accepted":
        pass
    world.run(until_s=world.now_s + 5)
    seen = view(world, "s")
    assert seen is not None
    assert set(seen.resident) == {"host"}
    assert world.engine.core.cache.used_blocks(0) == used - 21
    assert hint(world, KvPrefetch(session="s", seq=2))[0].outcome == "accepted"
    world.run(until_s=world.now_s + 5)
    again = view(world, "s")
    assert again is not None
    assert again.resident == {"device": 81}
    assert hint(world, KvRetain(session="s", seq=3, duration_s=30))[0].outcome == "accepted"
    assert hint(world, KvRelease(session="x", seq=4, target=Target(session="s")))[0].outcome == "accepted"
    assert rate(world, "s") == 0.0
    turn = ask(world, "s", [*prompt, *first.tokens, 3])
    assert turn.tokens == kit.reference([*prompt, *first.tokens, 3], 2)


def test_inference_without_hints(kit: SimpleNamespace) -> None:
    """The answer's end says what the pause is; a hint that has spoken is not overruled."""
    world = kit.world("tenuto:none", device=200)
    ask(world, "s", words(kit, 20))
    world.at(world.now_s, PauseInferred("t", "s", "tool", "bash"))
    world.run()
    seen = view(world, "s")
    assert seen is not None
    assert seen.pause_kind == "tool"
    told = kit.world("tenuto", device=200)
    ask(told, "s", words(kit, 20))
    hint(told, AgentPause(session="s", kind="human"))
    told.at(told.now_s, PauseInferred("t", "s", "tool", "bash"))
    told.run()
    seen = view(told, "s")
    assert seen is not None
    assert seen.pause_kind == "human"


def test_broken_leases_are_counted_and_labelled(kit: SimpleNamespace) -> None:
    """A promise may be broken under pressure; then it is counted, and the miss says capacity."""
    world = kit.world("tenuto", device=60, host=0, disk=0)
    prompt = words(kit, 100)
    first = ask(world, "s", prompt)
    hint(world, AgentPause(session="s", seq=1, kind="human", forecast=Forecast(p50_s=300, p90_s=600)))
    held = view(world, "s")
    assert held is not None
    assert held.lease is not None
    ask(world, "big", words(kit, 200))
    assert world.engine.metrics()["leases_broken_total"] == 1
    back = ask(world, "s", [*prompt, *first.tokens, 1])
    assert back.done is not None
    assert back.done.report.recomputed["capacity"] > 0


def test_warming_ends_no_pause_and_makes_the_next_turn_warm(kit: SimpleNamespace) -> None:
    """The new prompt of a compaction is computed while the session pauses; the pause goes on and is taught once."""
    world = kit.world("tenuto", device=400)
    prompt = words(kit, 60)
    ask(world, "s", prompt)
    hint(world, AgentCompaction(session="s", seq=1, phase="commit", keep=Shared(tokens=20)))
    new = [*prompt[:20], *words(kit, 50)]
    warm = SubmitTurn("w-1", "t", np.array(new, np.int32), Sampling(0), session="s", warm=True)
    record = world.submit(warm, in_s=1.0)
    world.run()
    assert record.done is not None
    assert record.tokens == []
    seen = view(world, "s")
    assert seen is not None
    assert (seen.state, seen.turns, seen.context_tokens) == ("paused", 1, 70)
    assert seen.pause_age_s is not None
    assert seen.pause_age_s >= 1.0
    turn = ask(world, "s", [*new, 1, 2])
    assert turn.done is not None
    assert dict(turn.done.report.cached) == {"device": 70}
    assert world.engine.metrics()["pauses_total"] == {"unknown": 1.0}
