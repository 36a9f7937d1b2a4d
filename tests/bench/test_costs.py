"""The fit of measured costs recovers what made them."""

from __future__ import annotations

import pytest

from tenuto_server.bench import main
from tenuto_server.bench.costs import fit


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
