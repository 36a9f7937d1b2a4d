"""The control plane's cost bench at its smallest: every row is there, every figure a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "engine_cost.py"


def test_every_event_and_the_step_are_timed():
    asked = ["--sessions", "20,40", "--running", "4", "--count", "16"]
    out = subprocess.run([sys.executable, str(SCRIPT), *asked], capture_output=True, text=True, timeout=120, check=True)
    rows = [line.rsplit(maxsplit=3) for line in out.stdout.splitlines()[2:]]
    assert {(name, int(sessions)) for name, sessions, _, _ in rows} >= {
        (name, sessions) for name in ("inferred", "hint", "step of 4") for sessions in (20, 40)
    }
    for _, _, median, p99 in rows:
        assert 0.0 < float(median) <= float(p99)
