"""The forecaster against published tables and hand calculations; its bounds and its file against abuse."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.distribution import GRID_BINS, GRID_MIN_S, LogSketch, PauseDistribution
from tenuto.forecast import PauseForecaster, history_path
from tenuto.pause_key import PauseKey
from tenuto.priors import tool_class

HUMAN = PauseKey.of("human")
BIN = math.exp(0.2)  # the resolution of a sketch: one bin is a factor of e^0.2


def within(value: float, expected: float, factor: float = BIN) -> bool:
    return expected / factor <= value <= expected * factor


@pytest.mark.parametrize(
    ("key", "p50_s", "p90_s"),
    [
        (PauseKey.of("human"), 182.0, 2280.0),  # KVCT, after end_turn, corrected
        (PauseKey.of("tool", "Bash"), 0.409, 30.331),  # TraceLab, by tool
        (PauseKey.of("tool", "Read"), 0.036, 0.427),
        (PauseKey.of("tool", command="pytest tests"), 5.915, 9.312),  # AgentCgroup, by program
        (PauseKey.of("tool", command="python -m pytest tests"), 7.238, 12.258),
        (PauseKey.of("subagent"), 117.0, 263.0),  # KVCT subagents
    ],
)
def test_priors_give_the_published_quantiles(key: PauseKey, p50_s: float, p90_s: float) -> None:
    forecast = PauseForecaster().predict(key)
    # A prior is spread evenly (in logs) over the bins between its knots, hence one bin of tolerance.
    assert within(forecast.p50_s, p50_s)
    assert within(forecast.p90_s, p90_s, BIN**1.5)
    assert forecast.confidence == 0.0


@pytest.mark.parametrize(
    ("idle_s", "never"), [(60.0, 0.18), (300.0, 0.28), (900.0, 0.41), (1800.0, 0.56), (3600.0, 0.75)]
)
def test_probability_of_never_returning_grows_as_published(idle_s: float, never: float) -> None:
    # KVCT: P(never returns | idle > t) after end_turn. The formula only gets the overall 13.3 % and the gaps' shares.
    forecast = PauseForecaster().predict(HUMAN, elapsed_s=idle_s)
    assert 1.0 - forecast.p_return == pytest.approx(never, abs=0.025)


@pytest.mark.parametrize(("idle_s", "median_s"), [(120.0, 370.0), (300.0, 717.0), (900.0, 1151.0), (1800.0, 1328.0)])
def test_median_remaining_time_of_a_person(idle_s: float, median_s: float) -> None:
    # KVCT, user gaps, corrected: median residual given idle t.
    assert within(PauseForecaster().predict(HUMAN, elapsed_s=idle_s).p50_s, median_s, 1.35)


def test_shrinkage_by_hand() -> None:
    """With n observations of 100 s, the posterior puts n / (n + 5) on them and 5 / (n + 5) on the level above."""
    forecaster = PauseForecaster()
    key = PauseKey.of("subagent")
    prior = forecaster.distribution(key).survival(1e5)
    for n in range(1, 4):
        forecaster.observe(key, 100.0)
        distribution = forecaster.distribution(key)
        assert distribution.survival(1e5) == pytest.approx(prior * 5 / (n + 5))
        # A pause speaks for lengths within 2 + 8 / sqrt(n) bins of it.
        reach = math.exp(0.2 * (3 + 8 / math.sqrt(n)))
        assert distribution.survival(100.0 / reach) - distribution.survival(100.0 * reach) >= n / (n + 5)
        assert forecaster.predict(key).confidence == pytest.approx(n / (n + 5))


def test_learns_each_level_for_its_keys() -> None:
    forecaster = PauseForecaster()
    slow, quick = PauseKey.of("tool", command="make all"), PauseKey.of("tool", command="make help")
    for _ in range(30):
        forecaster.observe(slow, 300.0)
        forecaster.observe(quick, 0.1)
    assert within(forecaster.predict(slow).p50_s, 300.0)
    assert within(forecaster.predict(quick).p50_s, 0.1)
    # An argument never seen falls back to the program, which knows both; another program hardly moves.
    unseen = forecaster.distribution(PauseKey.of("tool", command="make other"))
    assert unseen.survival(1.0) == pytest.approx(0.5, abs=0.1)


def test_own_session_counts_more() -> None:
    forecaster = PauseForecaster()
    key = PauseKey.of("tool", "search")
    for _ in range(20):
        forecaster.observe(key, 10.0)
    for _ in range(6):
        forecaster.observe(key, 0.5, session="mine")
    mine, other = forecaster.predict(key, session="mine"), forecaster.predict(key, session="other")
    assert within(mine.p50_s, 0.5, BIN**2)
    assert within(other.p50_s, 10.0, BIN**2)


def test_people_have_hours() -> None:
    """Quick in the morning, slow at night: the forecast goes by the local hour at which the pause began."""
    midnight = time.mktime((2026, 3, 2, 0, 0, 0, 0, 0, -1))  # a Monday
    now = midnight
    forecaster = PauseForecaster(clock=lambda: now)
    for day in (0, 1, 2, 3, 4, 7, 8, 9, 10, 11):
        for hour, length_s in ((9, 20.0), (22, 3000.0)):
            for minute in range(0, 60, 5):
                now = midnight + day * 86400 + hour * 3600 + minute * 60 + length_s
                forecaster.observe(HUMAN, length_s)
    now = midnight + 14 * 86400 + 9 * 3600 + 600
    morning = forecaster.predict(HUMAN)
    now += 13 * 3600
    night = forecaster.predict(HUMAN)
    assert within(morning.p50_s, 20.0, 2.0)
    assert within(night.p50_s, 3000.0, 2.0)
    # At 9:10, a pause that began the evening before is one of the evening's.
    now = midnight + 14 * 86400 + 9 * 3600 + 600
    assert forecaster.predict(HUMAN, elapsed_s=600.0).p50_s < forecaster.predict(HUMAN, elapsed_s=11 * 3600.0).p50_s


def test_people_have_a_rhythm() -> None:
    """Sessions whose pauses have been short go on being quick: learned over sessions, used in one just begun."""
    forecaster = PauseForecaster(clock=lambda: 0.0)
    for number in range(40):
        for _ in range(6):
            forecaster.observe(HUMAN, 15.0, session=f"quick{number}")
            forecaster.observe(HUMAN, 2000.0, session=f"slow{number}")
    for session, length_s in (("q", 15.0), ("s", 2000.0)):
        for _ in range(2):
            forecaster.observe(HUMAN, length_s, session=session)
    quick, slow = (forecaster.predict(HUMAN, session=s).p50_s for s in ("q", "s"))
    assert quick < 60.0 < 500.0 < slow


def test_elapsed_time_sharpens_a_bimodal_key() -> None:
    forecaster = PauseForecaster()
    key = PauseKey.of("tool", command="git fetch")
    for _ in range(50):
        forecaster.observe(key, 0.03)
        forecaster.observe(key, 8.0)
    remaining = forecaster.predict(key, elapsed_s=1.0)
    assert within(remaining.p50_s, 7.0)  # whatever has lasted a second is of the slow kind


def test_far_beyond_the_grid_a_pause_lasts_as_long_again() -> None:
    forecast = PauseForecaster().predict(HUMAN, elapsed_s=1e9)
    assert forecast.p50_s == pytest.approx(30 * 86400.0)  # capped at 30 days
    edge = PauseDistribution([0.0] * (GRID_BINS - 1) + [1.0])
    assert edge.quantile(0.5, elapsed_s=3e6) == pytest.approx(6e6)


def test_returns_are_counted() -> None:
    forecaster = PauseForecaster()
    before = forecaster.predict(HUMAN).p_return
    for _ in range(60):
        forecaster.observe_no_return("human")
    # 20 pseudo-observations of the prior, 60 of never.
    assert forecaster.predict(HUMAN).p_return == pytest.approx(20 * 0.867 / 80, abs=0.002)
    assert before == pytest.approx(0.867)


durations = st.floats(min_value=0.0, max_value=1e12, allow_nan=False)
keys = st.builds(
    lambda kind, tool, command: PauseKey.of(kind, tool, command=command),
    st.sampled_from(["tool", "human", "subagent", "permission", "background", "unknown", "odd"]),
    st.sampled_from([None, "Bash", "Read", "web_search", "x/y"]),
    st.sampled_from([None, "pytest a", "pytest b", "git status", "make"]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(keys, durations), max_size=40), keys, durations)
def test_forecasts_are_always_usable(seen: list[tuple[PauseKey, float]], key: PauseKey, elapsed_s: float) -> None:
    forecaster = PauseForecaster()
    for observed, duration_s in seen:
        forecaster.observe(observed, duration_s, session="s")
    distribution = forecaster.distribution(key, session="s")
    assert math.fsum(distribution.masses) == pytest.approx(1.0)
    quantiles = [distribution.quantile(q / 20, elapsed_s=elapsed_s) for q in range(21)]
    assert quantiles == sorted(quantiles)
    assert all(math.isfinite(q) and q >= min(elapsed_s, GRID_MIN_S) for q in quantiles)
    for at_s in (0.0, elapsed_s):
        forecast = forecaster.predict(key, elapsed_s=at_s, session="s")
        assert 0.0 <= forecast.p50_s <= forecast.p90_s <= 30 * 86400.0
        assert 0.0 <= forecast.p_return <= 1.0
        assert 0.0 <= forecast.confidence <= 1.0


@settings(max_examples=20, deadline=None)
@given(st.lists(durations, min_size=1, max_size=50))
def test_survival_and_quantile_are_inverse(values: list[float]) -> None:
    forecaster = PauseForecaster()
    for value in values:
        forecaster.observe(HUMAN, value)
    distribution = forecaster.distribution(HUMAN)
    for q in (0.05, 0.5, 0.9, 0.99):
        assert distribution.survival(distribution.quantile(q)) == pytest.approx(1.0 - q, abs=1e-9)


def test_bounded_whatever_is_observed() -> None:
    forecaster = PauseForecaster(keys_max=100)
    for i in range(3000):
        forecaster.observe(PauseKey.of("tool", "bash", command=f"prog{i % 700} arg{i}"), 0.001 * i, session=f"s{i}")
    assert len(forecaster) <= 100
    # The coarse levels are used by every call and must survive the flood of fine ones.
    assert forecaster.predict(PauseKey.of("tool", "bash", command="unseen")).confidence > 0.9
    sketch_sizes = [len(s.bins) for s in forecaster._sketches.values()]
    assert max(sketch_sizes) <= GRID_BINS
    assert max(s.weight for s in forecaster._sketches.values()) <= 512.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_what_is_no_duration_teaches_nothing(value: float) -> None:
    forecaster = PauseForecaster()
    before = forecaster.predict(HUMAN)
    forecaster.observe(HUMAN, value)
    assert forecaster.predict(HUMAN) == before


def test_history_survives_and_holds_no_arguments(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "pauses.json"
    key = PauseKey.of("tool", command="deploy production-secret-host")
    first = PauseForecaster(path)
    for _ in range(10):
        first.observe(key, 42.0)
    expected = first.predict(key)
    assert first.unsaved == 10
    assert first.save()
    assert first.unsaved == 0
    assert "production-secret-host" not in path.read_text("utf-8")
    assert PauseForecaster(path).predict(key) == expected
    assert [p.name for p in path.parent.iterdir()] == ["pauses.json"]  # no temporary file left


def test_two_processes_merge(tmp_path: Path) -> None:
    path = tmp_path / "pauses.json"
    PauseForecaster(path).save()
    one = PauseForecaster(path)
    one.observe(HUMAN, 50.0)
    one.save()
    two, three = PauseForecaster(path), PauseForecaster(path)
    for _ in range(4):
        two.observe(HUMAN, 50.0)
        three.observe(HUMAN, 50.0)
    assert two.save()
    assert three.save()
    assert PauseForecaster(path).predict(HUMAN).confidence == pytest.approx(9 / 14)  # 1 + 4 + 4 observations
    assert three.predict(HUMAN).confidence == pytest.approx(9 / 14)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "not json",
        "[]",
        "{}",
        '{"version": 99, "secret": "00", "keys": {}, "returns": {}}',
        '{"version": 1, "secret": "zz", "keys": {}, "returns": {}}',
        '{"version": 1, "secret": "%s", "keys": {"human": {"5": -3}}, "returns": {}}' % ("0" * 32),
        '{"version": 1, "secret": "%s", "keys": {"human": {"500": 1}}, "returns": {}}' % ("0" * 32),
        '{"version": 1, "secret": "%s", "keys": {"human": [1]}, "returns": {}}' % ("0" * 32),
        '{"version": 1, "secret": "%s", "keys": {}, "returns": {"human": [1e9, 0]}}' % ("0" * 32),
        "\x00\x01",
        "[" * 5000,
    ],
)
def test_corrupt_history_counts_as_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "pauses.json"
    path.write_text(content, "utf-8")
    forecaster = PauseForecaster(path)
    assert forecaster.predict(HUMAN) == PauseForecaster().predict(HUMAN)
    forecaster.observe(HUMAN, 10.0)
    assert forecaster.save()
    assert json.loads(path.read_text("utf-8"))["version"] == 1
    assert PauseForecaster(path).predict(HUMAN).confidence == pytest.approx(1 / 6)


def test_unwritable_history_is_not_fatal(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    forecaster = PauseForecaster(tmp_path / "file" / "pauses.json")
    forecaster.observe(HUMAN, 10.0)
    assert not forecaster.save()
    assert forecaster.unsaved == 1
    assert forecaster.predict(HUMAN).confidence == pytest.approx(1 / 6)


def test_history_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TENUTO_HISTORY", str(tmp_path / "h.json"))
    assert history_path() == tmp_path / "h.json"
    for off in ("off", "", " OFF "):
        monkeypatch.setenv("TENUTO_HISTORY", off)
        assert history_path() is None
    monkeypatch.delenv("TENUTO_HISTORY")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = history_path()
    assert found is not None
    assert found.parts[-2:] == ("tenuto", "pauses.json")
    if os.name == "posix" and os.uname().sysname == "Linux":
        assert found == tmp_path / "tenuto" / "pauses.json"


@pytest.mark.parametrize(
    ("tool", "expected"),
    [
        ("Bash", "shell"),
        ("exec_command", "shell"),
        ("write_stdin", "shell"),
        ("Read", "read"),
        ("Grep", "read"),
        ("Edit", "edit"),
        ("apply_patch", "edit"),
        ("TodoWrite", "planning"),
        ("WebFetch", "web"),
        ("web_search", "web"),
        ("AskUserQuestion", "other"),
    ],
)
def test_tool_classes(tool: str, expected: str) -> None:
    assert tool_class(tool) == expected


@given(st.lists(st.floats(0.001, 1e7), min_size=1, max_size=120), st.booleans())
def test_a_sketch_spreads_pauses_one_by_one_as_it_does_all_at_once(durations: list[float], wide: bool) -> None:
    sketch = LogSketch(wide=wide)
    for duration_s in durations:
        sketch.add(duration_s)
        grown = sketch.smooth()
        assert sum(grown) == pytest.approx(sketch.weight)
    anew = LogSketch(sketch.bins, wide=wide).smooth()
    # The width of the spread follows the number of pauses in steps of a tenth.
    assert sum(abs(a - b) for a, b in zip(grown, anew, strict=True)) <= 0.1 * sketch.weight
