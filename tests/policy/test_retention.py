"""Retention decisions: what each kind of evidence does, leases and prefetch against the price, lies against silence."""

from __future__ import annotations

import random
from dataclasses import replace
from math import exp, inf, isfinite, log
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.wire import Forecast, PauseKind
from tenuto_server.policy import PauseStats, make_policy
from tenuto_server.policy.priors import P_INTACT
from tenuto_server.policy.retention import LEASE_MAX_S, kind_shares, progress_forecast
from tenuto_server.policy.views import PauseView, SystemView

from .conftest import SYSTEM, Known

TENUTO, NONE = make_policy("tenuto"), make_policy("tenuto:none")
EXPONENTIAL = tuple(-50.0 * log(1.0 - (i + 0.5) / 64) for i in range(64))
LONG = tuple(10.0 * q for q in EXPONENTIAL)
KNOWN = Known({"tool": EXPONENTIAL, "human": LONG})


def paused(kind: PauseKind = "tool", elapsed_s: float = 0.0, **more: object) -> PauseView:
    return PauseView("t", kind, None, elapsed_s, context_tokens=1600, turns=3)._replace(**more)  # type: ignore[arg-type]


def priced(system: SystemView, device: float = 0.0, host: float = 0.0) -> SystemView:
    """The system with full tiers at these prices."""
    prices = {"device": device, "host": host}
    tiers = tuple(
        replace(view, price=prices[view.tier], free_blocks=0) if prices.get(view.tier) else view
        for view in system.tiers
    )
    return replace(system, tiers=tiers)


def test_a_memoryless_pause_is_worth_its_hazard(system: SystemView) -> None:
    for elapsed_s in (0.0, 30.0, 100.0):
        found = NONE.retention(paused(elapsed_s=elapsed_s), KNOWN, system)
        assert found.rate == pytest.approx(P_INTACT["tool"] / 50.0, rel=0.06)


def test_a_known_pause_is_worth_one_over_the_rest(system: SystemView) -> None:
    known = Known({"tool": EXPONENTIAL}, trusts=(1.0, 0.0, 1.0))
    forecast = Forecast(p50_s=100.0, p90_s=102.0, p_return=1.0)
    for elapsed_s in (0.0, 50.0, 80.0):
        found = TENUTO.retention(paused(elapsed_s=elapsed_s, forecast=forecast), known, system)
        # Half-way to the next look, which comes when it has risen by a fifth and a cell's edge is reached.
        half_way_s = elapsed_s + 0.5 * found.valid_s
        assert found.valid_s < 0.3 * (100.0 - elapsed_s)
        assert found.rate == pytest.approx(P_INTACT["tool"] / (100.0 - half_way_s), rel=0.1)


def test_a_forecast_rises_as_the_return_nears(system: SystemView) -> None:
    pause = paused("human", forecast=Forecast(p50_s=100.0, p90_s=120.0))
    rates = [TENUTO.retention(pause._replace(elapsed_s=e), KNOWN, system).rate for e in (0.0, 30.0, 60.0, 80.0)]
    assert rates == sorted(rates)
    assert rates[-1] > 2 * rates[0]
    # Well after the stated return, only what is known without it is left.
    late = pause._replace(elapsed_s=600.0)
    assert TENUTO.retention(late, KNOWN, system).rate == pytest.approx(
        NONE.retention(late, KNOWN, system).rate, rel=0.5
    )


def test_a_forecast_counts_from_when_it_was_given(system: SystemView) -> None:
    pause = paused(elapsed_s=200.0, forecast=Forecast(p50_s=10.0, p90_s=11.0), forecast_at_s=200.0)
    early = pause._replace(forecast_at_s=0.0)
    assert TENUTO.retention(pause, KNOWN, system).rate > 2 * TENUTO.retention(early, KNOWN, system).rate


@pytest.mark.parametrize("elapsed_s", [250.0, 1000.0, 3000.0])
def test_what_outlasts_its_forecast_is_worth_what_it_would_be_without(elapsed_s: float, system: SystemView) -> None:
    """However often a client was right: four sigma and more past its forecast, the forecast was a miss."""
    known = replace(KNOWN, trusts=(1.0, 0.0, 1.0), scales=(5.2, 1.9))
    late = paused("human", elapsed_s, forecast=Forecast(p50_s=60.0, p90_s=90.0))
    assert TENUTO.retention(late, known, system).rate == pytest.approx(
        NONE.retention(late, known, system).rate, rel=0.3
    )


def test_a_lower_chance_of_return_lowers_the_index(system: SystemView) -> None:
    rates = [
        TENUTO.retention(paused(forecast=Forecast(p50_s=60.0, p90_s=90.0, p_return=p)), KNOWN, system).rate
        for p in (1.0, 0.7, 0.3, 0.0)
    ]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 1.5 * rates[-1]


def test_an_ended_session_is_worth_nothing(system: SystemView) -> None:
    found = TENUTO.retention(paused(end_keep_s=0.0), KNOWN, system)
    assert (found.rate, found.lease_s, found.prefetch_s) == (0.0, 0.0, None)
    # Whether the word was true is judged in an hour, and then never again.
    assert found.valid_s == 3600.0 - paused().elapsed_s
    assert TENUTO.retention(paused("tool", 3600.0, end_keep_s=0.0), KNOWN, system).valid_s == inf


def test_an_ended_session_is_kept_as_long_as_asked(system: SystemView) -> None:
    open_rate = TENUTO.retention(paused("human", 10.0), KNOWN, system).rate
    kept = TENUTO.retention(paused("human", 10.0, end_keep_s=60.0), KNOWN, system)
    assert 0.0 < kept.rate < open_rate
    assert kept.lease_s <= 50.0
    assert kept.valid_s <= 50.0
    assert TENUTO.retention(paused("human", 60.0, end_keep_s=60.0), KNOWN, system).rate == 0.0


def test_a_keepalive_stops_the_doubt(system: SystemView) -> None:
    known = Known({"human": LONG}, {"human": 0.6})
    silent = TENUTO.retention(paused("human", 1500.0), known, system)
    alive = TENUTO.retention(paused("human", 1500.0, alive_until_s=1500.0), known, system)
    fresh = TENUTO.retention(paused("human", 0.0), known, system)
    assert alive.rate > 2 * silent.rate
    # A memoryless pause whose doubt does not grow is worth what it was worth at its start.
    assert alive.rate == pytest.approx(fresh.rate, rel=0.12)
    assert NONE.retention(paused("human", 1500.0, alive_until_s=1500.0), known, system).rate == pytest.approx(
        silent.rate
    )


def test_an_announced_return_raises_the_index(system: SystemView) -> None:
    for elapsed_s in (20.0, 600.0):
        quiet = TENUTO.retention(paused("human", elapsed_s), KNOWN, system)
        soon = TENUTO.retention(paused("human", elapsed_s, resume_at_s=elapsed_s + 5.0), KNOWN, system)
        assert soon.rate > 10 * quiet.rate
    # And not for ever.
    overdue = TENUTO.retention(paused("human", 1200.0, resume_at_s=100.0), KNOWN, system)
    quiet = TENUTO.retention(paused("human", 1200.0), KNOWN, system)
    assert overdue.rate == pytest.approx(quiet.rate, rel=0.5)


def test_an_unknown_pause_is_what_the_session_s_pauses_were(system: SystemView) -> None:
    assert {k: p for p, k in kind_shares(paused("unknown"))} == pytest.approx({"tool": 0.951, "human": 0.049})
    counts: tuple[tuple[PauseKind, int], ...] = (("tool", 4), ("human", 14), ("unknown", 99))
    shares = {k: p for p, k in kind_shares(paused("unknown", kind_counts=counts))}
    assert shares == pytest.approx({"tool": 4.951 / 19, "human": 14.049 / 19})
    tool, mixed, human = (
        NONE.retention(pause, KNOWN, system).rate
        for pause in (paused("tool"), paused("unknown", kind_counts=counts), paused("human"))
    )
    assert human < mixed < tool


def test_without_hints_nothing_a_client_says_matters(system: SystemView) -> None:
    said = paused(
        "human",
        20.0,
        forecast=Forecast(p50_s=21.0, p90_s=22.0, p_return=1.0),
        resume_at_s=21.0,
        alive_until_s=500.0,
        end_keep_s=0.0,
    )
    assert NONE.retention(said, KNOWN, system) == NONE.retention(paused("human", 20.0), KNOWN, system)


def test_no_trust_no_effect(system: SystemView) -> None:
    deaf = replace(KNOWN, trusts=(0.0, 0.0, 1.0))
    said = paused("human", 20.0, forecast=Forecast(p50_s=21.0, p90_s=22.0, p_return=1.0))
    assert TENUTO.retention(said, deaf, system) == NONE.retention(said, KNOWN, system)


def test_a_sender_s_own_doubt_counts(system: SystemView) -> None:
    sure = paused(forecast=Forecast(p50_s=5000.0, p90_s=6000.0))
    unsure = paused(forecast=Forecast(p50_s=5000.0, p90_s=6000.0, confidence=0.0))
    assert TENUTO.retention(unsure, KNOWN, system).rate == pytest.approx(NONE.retention(unsure, KNOWN, system).rate)
    assert TENUTO.retention(sure, KNOWN, system).rate < TENUTO.retention(unsure, KNOWN, system).rate


def test_a_liar_converges_to_silence(system: SystemView) -> None:
    rnd, stats = random.Random(2), PauseStats()

    def lie() -> Forecast:
        p50 = 10.0 ** rnd.uniform(-2, 4)
        return Forecast(p50_s=p50, p90_s=1.1 * p50, p_return=1.0)

    for _ in range(40):
        stats.observe("t", "tool", None, exp(rnd.gauss(log(9.0), 1.2)), lie())
    for elapsed_s in (0.0, 5.0, 60.0, 600.0):
        said = paused(elapsed_s=elapsed_s, forecast=lie())
        assert TENUTO.retention(said, stats, system) == NONE.retention(said, stats, system)


def test_a_lease_with_room_lasts_while_a_return_is_likely(system: SystemView) -> None:
    found = NONE.retention(paused(), KNOWN, system)
    assert found.lease_tier == "device"
    # 95 % of the returns of a memoryless pause have come after 3 means.
    assert found.lease_s == pytest.approx(150.0, rel=0.1)
    assert NONE.retention(paused("human"), Known({"human": (1e5,) * 64}), system).lease_s == LEASE_MAX_S


def test_a_lease_ends_when_the_index_falls_to_the_price(system: SystemView) -> None:
    known = Known({"tool": tuple(exp(log(20.0) + 1.5 * z) for z in NORMAL_64)})
    lasts = []
    for price in (1e-9, 3e-9, 1e-8, 3e-8):
        full = priced(system, device=price)
        found = NONE.retention(paused(), known, full)
        if found.lease_tier != "device":
            break
        lasts.append(found.lease_s)
        # Just after the lease the index, in units of the price, is below it: 0.1 s to load 100 blocks from host
        # for 100 * 1000 bytes.
        after = NONE.retention(paused(elapsed_s=found.lease_s * 1.3 + 1.0), known, full)
        assert after.rate * 0.1 / 1e5 < price or found.lease_s > 0.9 * NONE.retention(paused(), known, system).lease_s
    assert len(lasts) >= 2
    assert lasts == sorted(lasts, reverse=True)


def test_below_the_device_s_price_the_lease_is_on_the_host(system: SystemView) -> None:
    found = NONE.retention(paused("human"), KNOWN, priced(system, device=1.0))
    assert found.lease_tier == "host"
    assert found.lease_s > 0.0
    nowhere = NONE.retention(
        paused("human"), KNOWN, replace(priced(system, 1.0, 1.0), tiers=priced(system, 1.0, 1.0).tiers[:2])
    )
    assert nowhere.lease_s == 0.0


def test_prefetch_leads_the_forecast_return(system: SystemView) -> None:
    pause = paused("human", forecast=Forecast(p50_s=1000.0, p90_s=1050.0, p_return=1.0))
    known = replace(KNOWN, lengths={"human": tuple(100.0 * q for q in EXPONENTIAL)})
    # The load takes 0.1 s, so the device's price matters only near the return.
    full = priced(system, device=0.01 * 0.1 / 1e5)
    found = TENUTO.retention(pause, known, full)
    assert found.prefetch_s is not None
    assert 500.0 < found.prefetch_s < 1000.0
    late = TENUTO.retention(pause._replace(elapsed_s=990.0), known, full).prefetch_s
    assert late is not None
    assert late < 20.0


def test_prefetch_needs_a_hint_a_lower_tier_and_an_affordable_price(system: SystemView) -> None:
    pause = paused("human", forecast=Forecast(p50_s=1000.0, p90_s=1050.0))
    assert NONE.retention(pause, KNOWN, system).prefetch_s is None
    assert TENUTO.retention(paused("human"), KNOWN, system).prefetch_s is None
    assert TENUTO.retention(pause, KNOWN, replace(system, tiers=system.tiers[:1])).prefetch_s is None
    assert TENUTO.retention(pause, KNOWN, priced(system, device=1.0)).prefetch_s is None


def test_progress_is_a_forecast_of_the_rest() -> None:
    # 60 % done after 30 s: 20 s to go.
    assert progress_forecast(30.0, 0.6).p50_s == pytest.approx(20.0)
    spreads = []
    for q in (0.1, 0.5, 0.9):
        forecast = progress_forecast(30.0, q)
        assert forecast.p90_s is not None
        spreads.append(forecast.p90_s / forecast.p50_s)
    assert spreads == sorted(spreads, reverse=True)
    assert progress_forecast(30.0, 0.0).p50_s == 30.0
    assert progress_forecast(30.0, 1.0).p50_s == 0.0


NORMAL_64 = tuple(NormalDist().inv_cdf((i + 0.5) / 64) for i in range(64))

forecasts = st.builds(
    lambda p50, ratio, p, c: Forecast(p50_s=p50, p90_s=p50 * ratio, p_return=p, confidence=c),
    st.floats(0.0, 1e5),
    st.floats(1.0, 20.0),
    st.one_of(st.none(), st.floats(0.0, 1.0)),
    st.one_of(st.none(), st.floats(0.0, 1.0)),
)
kinds: st.SearchStrategy[PauseKind] = st.sampled_from(
    ["tool", "human", "subagent", "permission", "background", "unknown"]
)
STATS = PauseStats()


@settings(deadline=None, max_examples=200)
@given(
    kinds,
    st.floats(0.0, 1e6),
    st.one_of(st.none(), forecasts),
    st.floats(0.0, 1e6),
    st.one_of(st.none(), st.floats(0.0, 1e6)),
    st.floats(0.0, 1e6),
    st.integers(0, 100_000),
    st.sampled_from([0.0, 1e-12, 1e-9, 1e-6]),
)
def test_every_decision_is_well_formed(
    kind: PauseKind,
    elapsed_s: float,
    forecast: Forecast | None,
    at_s: float,
    resume_at_s: float | None,
    alive_until_s: float,
    tokens: int,
    price: float,
) -> None:
    pause = PauseView(
        "t",
        kind,
        None,
        elapsed_s,
        forecast=forecast,
        forecast_at_s=min(at_s, elapsed_s),
        resume_at_s=resume_at_s,
        alive_until_s=alive_until_s,
        context_tokens=tokens,
    )
    full = priced(SYSTEM, device=price)
    found = TENUTO.retention(pause, STATS, full)
    assert isfinite(found.rate)
    assert found.rate >= 0.0
    assert found.valid_s > 0.0
    assert 0.0 <= found.lease_s <= LEASE_MAX_S
    assert full.tier(found.lease_tier) is not None
    assert found.prefetch_s is None or (isfinite(found.prefetch_s) and found.prefetch_s >= 0.0)
    assert found == TENUTO.retention(pause, STATS, full)


@settings(deadline=None, max_examples=100)
@given(st.floats(0.0, 1e4), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_better_chance_of_return_is_never_worth_less(elapsed_s: float, p: float, q: float) -> None:
    low, high = sorted((p, q))
    rates = [
        NONE.retention(paused("human", elapsed_s), Known({"human": LONG}, {"human": x}), SYSTEM).rate
        for x in (low, high)
    ]
    assert rates[0] <= rates[1] * (1 + 1e-9)


@settings(deadline=None, max_examples=60)
@given(st.floats(1.0, 1e4), st.floats(1.1, 5.0), st.floats(0.0, 3.0), st.floats(0.1, 10.0))
def test_stretching_time_shrinks_the_rate(p50: float, ratio: float, share: float, c: float) -> None:
    rates = []
    for scale in (1.0, c):
        pause = paused(elapsed_s=share * p50 * scale, forecast=Forecast(p50_s=p50 * scale, p90_s=p50 * ratio * scale))
        known = Known({"tool": tuple(q * scale for q in EXPONENTIAL)})
        rates.append(TENUTO.retention(pause, known, SYSTEM).rate * scale)
    # Up to the rounding of median and spread, which counts most where the index falls steeply, past the forecast.
    assert 0.25 * rates[1] < rates[0] < 4.0 * rates[1]


def test_a_false_end_is_weighed_and_a_true_one_frees_at_once() -> None:
    ended = paused("human", 5.0, end_keep_s=0.0)
    gone = TENUTO.retention(ended, replace(KNOWN, back_after_end=0.05), SYSTEM)
    assert (gone.rate, gone.lease_s) == (0.0, 0.0)
    doubted = TENUTO.retention(ended, replace(KNOWN, back_after_end=0.5), SYSTEM).rate
    ignored = TENUTO.retention(ended, replace(KNOWN, back_after_end=1.0), SYSTEM).rate
    silent = TENUTO.retention(ended._replace(end_keep_s=None), KNOWN, SYSTEM).rate
    assert 0.0 < doubted < 0.6 * silent
    assert ignored == pytest.approx(silent)


def test_a_long_pause_is_asked_about_when_it_is_given_up() -> None:
    found = NONE.retention(paused("human", 3000.0), PauseStats(), SYSTEM)
    assert found.valid_s <= 600.0
