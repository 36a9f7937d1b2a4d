"""The workload: deterministic, and drawn from the distributions that it names."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from pathlib import Path

import pytest

from tenuto_server.bench.demo_tools import WorkFolder
from tenuto_server.bench.workload import (
    HUMAN_SHARE,
    CompactStep,
    ForkStep,
    PersonStep,
    Sources,
    ToolStep,
    WorkloadSettings,
    human_pause_s,
    make_plan,
)

SOURCES = Sources(
    files=tuple((f"package/module_{n}.py", 120 + n) for n in range(12)),
    tests=("test_a.py", "test_b.py"),
    scripts=("one.py", "two.py"),
    words=("some_word", "other_word"),
)


def test_the_same_seed_gives_the_same_plan() -> None:
    settings = WorkloadSettings(seed=7)
    assert make_plan(settings, SOURCES) == make_plan(settings, SOURCES)
    assert make_plan(settings, SOURCES) != make_plan(dataclasses.replace(settings, seed=8), SOURCES)


@pytest.mark.parametrize("seed", range(20))
def test_every_plan_forks_compacts_and_ends_early(seed: int) -> None:
    settings = WorkloadSettings(seed=seed, agents=5, tasks=2, turns=(5, 7))
    plans = make_plan(settings, SOURCES)
    assert [plan.name for plan in plans] == [f"coder-{n}" for n in range(1, 6)]
    assert [session.id for session in plans[1].sessions] == ["agent-2.1", "agent-2.2"]
    sessions = [session for plan in plans for session in plan.sessions]
    assert [sum(isinstance(step, ForkStep) for step in session.steps) for session in sessions] == [1] + [0] * 9
    assert [sum(isinstance(step, CompactStep) for step in session.steps) for session in sessions] == [0, 0, 1] + [0] * 7
    assert sessions[8].steps == ()
    assert all(4 <= len(session.steps) <= 7 for session in sessions[:8])
    starts = [plan.start_s for plan in plans]
    assert starts[0] == 0.0
    assert starts == sorted(starts)


def test_pauses_come_in_the_proportions_of_the_corpora() -> None:
    settings = WorkloadSettings(seed=3, agents=200, tasks=2, turns=(26, 26))
    steps = [step for plan in make_plan(settings, SOURCES) for session in plan.sessions for step in session.steps]
    people = sum(isinstance(step, PersonStep) for step in steps)
    drawn = [step for step in steps if isinstance(step, ToolStep)]
    # 10,000 draws: the standard error of a share is below half a percent.
    assert people / (people + len(drawn)) == pytest.approx(HUMAN_SHARE, abs=0.02)
    kinds = Counter(step.tool for step in drawn)
    # AgentCgroup: Read 1574 and edits 898 of the 5,933 calls that the workload draws from.
    assert kinds["read_file"] / len(drawn) == pytest.approx(1574 / 5933, abs=0.02)
    assert kinds["edit_file"] / len(drawn) == pytest.approx(898 / 5933, abs=0.02)
    tests = sum("pytest" in str(step.arguments.get("command")) for step in drawn)
    assert tests / len(drawn) == pytest.approx(802 / 5933, abs=0.02)


def test_human_pauses_follow_the_quantiles() -> None:
    settings = WorkloadSettings(compression=10.0, human_max_s=1e9)
    assert human_pause_s(0.5, settings) == pytest.approx(11.7)
    assert human_pause_s(0.9, settings) == pytest.approx(134.1)
    assert human_pause_s(0.01, settings) == pytest.approx(0.9)
    assert human_pause_s(0.999, settings) == pytest.approx(655.8)
    # Half-way in probability between 117 s (p50) and 375 s (p75) lies their geometric mean, 209.5 s.
    assert human_pause_s(0.625, settings) == pytest.approx(20.95, rel=1e-3)
    cut = dataclasses.replace(settings, human_max_s=30.0)
    assert human_pause_s(0.9, cut) == 30.0
    chance = random.Random(1)
    drawn = sorted(human_pause_s(chance.random(), settings) for _ in range(4001))
    assert drawn[2000] == pytest.approx(11.7, rel=0.1)


def test_the_work_folder_is_a_copy_with_tools_that_run(tmp_path: Path) -> None:
    import anyio

    folder = WorkFolder(tmp_path / "work", output_chars=300)
    sources = folder.sources()
    assert ("tenuto/pause_key.py", (folder.root / "tenuto/pause_key.py").read_text().count("\n")) in sources.files
    assert len(sources.files) <= 80
    path = sources.files[0][0]
    original = (folder.root / path).read_text()

    async def calls() -> list[str]:
        return [
            await folder.run(ToolStep("bash", {"command": "grep -rn class_of_nothing_at_all ."})),
            await folder.run(ToolStep("bash", {"command": "grep -rn split_command ."})),
            await folder.run(ToolStep("read_file", {"path": path, "line": 1, "count": 2})),
            await folder.run(ToolStep("edit_file", {"path": path, "append": "# a note"})),
            await folder.run(ToolStep("bash", {"command": "python sizes.py"})),
            await folder.run(ToolStep("bash", {"command": "python -m pytest -q missing.py"})),
        ]

    nothing, found, read, edited, sizes, failed = anyio.run(calls)
    assert nothing == "(no output)"
    assert "pause_key.py" in found
    assert len(found) == 300
    assert read.splitlines()[0] == "1\t" + original.splitlines()[0]
    assert (folder.root / path).read_text() == original + "# a note\n"
    assert sizes.split()[0].isdigit()
    assert edited.startswith(f"appended 1 line to {path}; quick tests:")
    assert "1 passed" in edited
    assert "missing.py" in failed
