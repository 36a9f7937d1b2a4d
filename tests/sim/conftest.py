"""Small traces and workloads for simulator tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tenuto_server.sim.generator import generate
from tenuto_server.sim.traces import Trace, read_reduced
from tenuto_server.sim.workload import Workload, steady

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "traces" / "agent_sessions.jsonl.gz"


@pytest.fixture(scope="session")
def synthetic() -> Trace:
    return generate(40, 3)


@pytest.fixture(scope="session")
def small(synthetic: Trace) -> Workload:
    """Thirty sessions alive for an hour and a half after half an hour of warm-up: some five hundred requests."""
    return steady(synthetic, 30.0, 5, window_s=5400.0, warm_up_s=1800.0)


@pytest.fixture(scope="session")
def shared_trace() -> Trace:
    if not SHARED.exists():
        pytest.skip("the shared trace is not beside this checkout (../shared/traces)")
    return read_reduced(SHARED)
