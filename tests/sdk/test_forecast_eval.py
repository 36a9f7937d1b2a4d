"""The evaluation of forecasters: its rivals do what they are named after, and the client's forecaster beats them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tenuto.pause_key import PauseKey

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("forecast_eval", ROOT / "bench" / "forecast_eval.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["forecast_eval"] = module
    spec.loader.exec_module(module)
    return module


def test_rivals_by_hand(script: ModuleType) -> None:
    median, ewma, mean = script.GlobalMedian(), script.Ewma(), script.ToolMean()
    bash, read = PauseKey.of("tool", "bash"), PauseKey.of("tool", "read")
    for key, length_s in ((bash, 4.0), (bash, 8.0), (read, 1.0)):
        seen = script.Seen("s", key, length_s, 0.0)
        for rival in (median, ewma, mean):
            rival.learn(seen)
    following = script.Seen("s", bash, 1.0, 0.0)
    assert median.point(following) == 4.0
    assert ewma.point(following) == 3.5  # (4 + 8) / 2 = 6, (6 + 1) / 2
    assert mean.point(following) == 6.0


def test_the_forecaster_beats_its_rivals(script: ModuleType) -> None:
    path = ROOT.parent / "shared" / "traces" / "agent_sessions.jsonl.gz"
    if not path.exists():
        pytest.skip("the shared trace is not beside this checkout (../shared/traces)")
    stream = list(script.kvct(path))[:4000]
    scores = {row["forecaster"]: row for row in script.evaluate(stream) if row["kind"] == "tool"}
    ours = scores.pop("tenuto.forecast")
    assert len(scores) == 3
    for rival in scores.values():
        assert ours["log_score"] > rival["log_score"] + 0.1
        assert ours["log_sd"] < rival["log_sd"]
    assert 0.75 < ours["within_80"] < 0.88
