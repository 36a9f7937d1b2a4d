"""What pauses have taught, written and read back: the same answers to every question, no names, and nothing half-believed."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from tenuto.wire import Forecast
from tenuto_server.learned import LearnedFile, alias_of
from tenuto_server.policy.calibration import PauseStats
from tenuto_server.policy.learned import KEYS_MAX, TENANTS_MAX, Learned, Unfit
from tenuto_server.policy.pace import Traits

ALIAS = alias_of(b"a secret of thirty-two bytes ....")


def taught(tenant: str = "acme") -> PauseStats:
    stats = PauseStats()
    for i in range(60):
        traits = Traits(None, None, 100 + i, 20_000 + 100 * i)
        said = Forecast(p50_s=30.0, p90_s=60.0)
        stats.observe(tenant, "tool", "bash\tpytest", 25.0 + i, said, rhythm=("slow",), traits=traits, intact=0.9)
        stats.observe(tenant, "human", None, 300.0 + 10 * i, traits=traits, intact=0.5)
    for _ in range(5):
        stats.observe_censored(tenant, "human", 3600.0, traits=Traits(None, None, 10, 60_000))
        stats.observe_end(tenant, "human", None)
    stats.observe_false_end(tenant)
    stats.observe_compaction(tenant, False)
    return stats


def answers(stats: PauseStats, tenant: str = "acme") -> list[object]:
    return [
        stats.quantiles(tenant, "tool", "bash\tpytest"),
        stats.quantiles(tenant, "tool", "bash\tpytest", ("slow",)),
        stats.quantiles(tenant, "human", None),
        stats.p_return(tenant, "human", None, depth=120),
        stats.p_intact("human", 115),
        stats.trust(tenant, "tool", "bash\tpytest"),
        stats.trust(tenant, "tool", "never seen"),
        stats.p_return_ended(tenant),
        stats.believes_compaction(tenant),
        stats.history(tenant, "tool", "bash\tpytest"),
    ]


def reborn(saved: dict[str, object], tenant: str = "acme") -> PauseStats:
    stats = PauseStats()
    learned = Learned(stats, ALIAS)
    learned.restore(json.loads(json.dumps(saved)))
    learned.heard(tenant)
    return stats


def test_every_answer_survives() -> None:
    stats = taught()
    for before, after in zip(answers(stats), answers(reborn(Learned(stats, ALIAS).dump())), strict=True):
        if isinstance(before, tuple) and before and isinstance(before[0], float):
            assert after == pytest.approx(before, rel=1e-6)
        elif isinstance(before, float):
            assert after == pytest.approx(before, rel=1e-9)
        else:
            assert after == before
    assert answers(stats) != answers(PauseStats())


def test_a_tenant_gets_only_its_own_and_is_not_named() -> None:
    saved = Learned(taught("acme-industries"), ALIAS).dump()
    assert "acme-industries" not in json.dumps(saved)
    stranger = reborn(saved, "somebody else")
    assert stranger.history("somebody else", "tool", "bash\tpytest").n == 0
    assert stranger.history("acme-industries", "tool", "bash\tpytest").n == 0  # not heard of yet


def test_what_was_not_asked_for_is_kept_for_the_next_time() -> None:
    first = Learned(taught(), ALIAS).dump()
    quiet = Learned(PauseStats(), ALIAS)
    quiet.restore(first)
    assert reborn(quiet.dump()).history("acme", "tool", "bash\tpytest").n == 60


def test_the_file_is_bounded() -> None:
    stats = PauseStats()
    for i in range(TENANTS_MAX + 50):
        stats.observe(f"tenant {i}", "tool", "bash", 5.0)
    for i in range(KEYS_MAX + 50):
        stats.observe("many keys", "tool", f"tool {i}", 5.0)
    saved = Learned(stats, ALIAS).dump()
    assert len(saved["tenants"]) == TENANTS_MAX
    assert ALIAS("tenant 0") not in saved["tenants"]
    assert sum(len(state["keys"]) for state in saved["tenants"].values()) <= KEYS_MAX
    assert len(json.dumps(saved)) < 2_000_000


@pytest.mark.parametrize(
    "damage",
    [
        lambda saved: saved.pop("fates"),
        lambda saved: saved["fields"].pop("Score"),
        lambda saved: saved["kinds"]["tool"].update(returned=float("nan")),
        lambda saved: saved["kinds"]["tool"].update(returned=True),
        lambda saved: saved["kinds"]["tool"]["lengths"].update(counts=[3, 0, 1.0]),
        lambda saved: saved["kinds"]["tool"]["lengths"]["counts"].__setitem__(1, 10_000),
        lambda saved: saved["fates"].append(["nonsense", {}]),
        lambda saved: next(iter(saved["tenants"].values())).update(keys=[["tool", "x"]]),
        lambda saved: saved.update(tenants=[]),
    ],
)
def test_what_does_not_fit_is_refused_as_a_whole(damage: object) -> None:
    saved = Learned(taught(), ALIAS).dump()
    damage(saved)  # type: ignore[operator]
    stats = PauseStats()
    with pytest.raises(Unfit):
        Learned(stats, ALIAS).restore(saved)
    assert answers(stats) == answers(PauseStats())


def test_the_file_is_written_when_due_and_read_at_the_next_start(tmp_path: Path) -> None:
    path, now = tmp_path / "learned.json", [0.0]
    stats = taught()
    file = LearnedFile(path, Learned(stats, ALIAS), every_s=60.0, clock=lambda: now[0])
    file.tend()
    now[0] = 61.0
    file.tend()
    file.close()
    assert not path.exists()  # nothing has been learned since
    stats.observe("acme", "tool", "bash\tpytest", 30.0)
    file.tend()
    file.close()
    assert path.stat().st_mode & 0o077 == 0
    fresh = PauseStats()
    learned = Learned(fresh, ALIAS)
    assert LearnedFile(path, learned).load()
    learned.heard("acme")
    assert fresh.history("acme", "tool", "bash\tpytest").n == 61
    assert [entry.name for entry in tmp_path.iterdir()] == ["learned.json"]


@pytest.mark.parametrize("how", ["cut", "flipped", "empty", "other version", "no text"])
def test_a_damaged_file_is_ignored_and_said_so(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "learned.json"
    stats = taught()
    file = LearnedFile(path, Learned(stats, ALIAS))
    stats.observe("acme", "tool", None, 1.0)
    file.close()
    data = path.read_bytes()
    at = len(data) // 2
    path.write_bytes(
        {
            "cut": data[:at],
            "flipped": data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :],
            "empty": b"",
            "other version": data.replace(b'"tenuto_learned": 1', b'"tenuto_learned": 2'),
            "no text": b"\xff\xfe\x00" * 100,
        }[how]
    )
    fresh = PauseStats()
    with caplog.at_level(logging.WARNING):
        assert not LearnedFile(path, Learned(fresh, ALIAS)).load()
    assert "is ignored" in caplog.text
    assert answers(fresh) == answers(PauseStats())


def test_a_directory_that_cannot_be_written_costs_nothing_but_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stats = PauseStats()
    file = LearnedFile(tmp_path / "gone" / "learned.json", Learned(stats, ALIAS))
    for length_s in (1.0, 2.0):
        stats.observe("acme", "tool", None, length_s)
        with caplog.at_level(logging.WARNING):
            file.close()
    assert caplog.text.count("cannot be written") == 1
