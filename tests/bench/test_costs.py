"""The fit of measured costs recovers what made them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tenuto_server.bench import main
from tenuto_server.bench.costs import fit
from tenuto_server.errors import ConfigError
from tenuto_server.sim.costs import machine_of


@pytest.mark.parametrize(("c", "a", "b"), [(0.02, 1e-3, 4e-7), (0.0, 5e-5, 1e-9), (0.1, 2e-3, 0.0)])
def test_fit_recovers_a_law(c: float, a: float, b: float) -> None:
    points = [(n, c + a * n + b * n * n / 2) for n in (256, 512, 1024, 2048, 4096)]
    found = fit(points)
    assert found == pytest.approx((c, a, b), rel=1e-6, abs=1e-12)


def test_fit_never_makes_later_tokens_cheaper() -> None:
    """A concave measurement (noise) is fitted by a line: 0.2 s for 256 tokens, 0.35 s for 512, 0.6 s for 1024."""
    _, a, b = fit([(256, 0.2), (512, 0.35), (1024, 0.6)])
    assert b == 0.0
    assert 4e-4 < a < 7e-4


def test_the_command_lists_its_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "costs" in capsys.readouterr().out
    assert main(["speed"]) == 2
    assert "costs" in capsys.readouterr().err


def test_the_simulator_reads_what_was_measured(tmp_path: Path) -> None:
    """A written result is a machine for ``--timing``; an incomplete one is refused by the field it lacks."""
    written = tmp_path / "costs.json"
    facts = {
        "name": "mine",
        "prefill_a_s": 1e-3,
        "prefill_b_s": 1e-7,
        "weights_s": 0.03,
        "kv_bytes": 23040,
        "memory_bps": 1e10,
        "host_bps": 1e9,
        "disk_bps": 1e8,
        "source": "a test",
        "about": {"cores": 2},
    }
    written.write_text(json.dumps(facts))
    machine = machine_of(str(written))
    assert machine is not None
    assert (machine.name, machine.prefill_a_s, machine.disk_bps) == ("mine", 1e-3, 1e8)
    written.write_text(json.dumps({k: v for k, v in facts.items() if k != "host_bps"}))
    with pytest.raises(ConfigError, match="host_bps"):
        machine_of(str(written))
    with pytest.raises(ConfigError, match="missing"):
        machine_of(str(tmp_path / "missing.json"))
