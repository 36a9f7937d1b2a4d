"""The server's own recording, in virtual time so that every figure is known beforehand; readable by the simulator, and of
facts only."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tenuto.trace import TraceEnd, TraceEvent, TraceHeader, TracePause, TraceSession, TraceTurn, read_trace
from tenuto.wire import AgentEnd, AgentFork, AgentPause, AnyAction, Envelope, EnvelopeAction, Forecast, Shared
from tenuto_server.engine.events import HintBatch, PauseInferred, Sampling, SubmitTurn
from tenuto_server.errors import ConfigError
from tenuto_server.recording import TraceFile, TrafficRecorder
from tenuto_server.sim.formats import read
from tenuto_server.sim.study import Setup, simulate
from tenuto_server.sim.workload import steady
from tenuto_server.sim.world import World

RNG = random.Random(8)
SECRET_NAME = "alice@example.org"


class Site:
    """A world whose engine is recorded."""

    def __init__(self, kit: SimpleNamespace, target: Path, bytes_max: int = 2**20) -> None:
        self.kit = kit
        self.world: World = kit.world("tenuto", device=400)
        self.recorder = TrafficRecorder(self.world.engine, target, model="toy", bytes_max=bytes_max)
        self.world.engine = self.recorder  # type: ignore[assignment]
        self.told = 0

    def ask(self, name: str, prompt: list[int], at_s: float, count: int = 2, **more: object) -> list[int]:
        self.world.run(until_s=at_s)
        number = f"{name}-{len(self.world.turns)}"
        turn = SubmitTurn(number, "t", np.array(prompt, np.int32), Sampling(count), session=name, **more)  # type: ignore[arg-type]
        record = self.world.submit(turn)
        self.world.run(until_s=at_s + 1.0)
        assert record.done is not None
        return [*prompt, *record.tokens]

    def tell(self, action: AnyAction | Envelope) -> None:
        self.told += 1
        envelope = action if isinstance(action, Envelope) else Envelope.of((action,))
        self.world.at(self.world.now_s, HintBatch(f"h{self.told}", "t", envelope))
        self.world.run(until_s=self.world.now_s + 0.001)

    def words(self, count: int) -> list[int]:
        return [RNG.randrange(self.kit.vocab) for _ in range(count)]

    def events(self) -> tuple[TraceHeader, list[TraceEvent]]:
        self.recorder.close()
        return read_trace(self.recorder.path)


def of(events: list[TraceEvent], kind: type, session: str) -> list:
    return [event for event in events if isinstance(event, kind) and event.session == session]


def test_turns_pauses_and_ends_as_they_were(kit: SimpleNamespace, tmp_path: Path) -> None:
    site = Site(kit, tmp_path / "trace.jsonl")
    context = site.ask(SECRET_NAME, site.words(20), 0.0)
    site.tell(
        AgentPause(session=SECRET_NAME, seq=1, kind="tool", tool="bash", program="pytest", forecast=Forecast(p50_s=7))
    )
    longer = [*context, *site.words(6)]
    site.ask(SECRET_NAME, longer, 30.0, last_role="tool")
    diverged = [*longer[:12], *((token + 1) % kit.vocab for token in longer[12:20])]
    site.ask(SECRET_NAME, diverged, 100.0, last_role="user")
    site.world.run(until_s=105.0)
    site.tell(AgentEnd(session=SECRET_NAME, seq=2, keep_s=9.0))
    header, events = site.events()
    assert (header.model, header.tenuto_trace) == ("toy", 1)
    first, second, third = of(events, TraceTurn, "s1")
    # 20 tokens of prompt and one of answer, each 1 ms, and 1 ms a step of which there are two.
    assert (first.t_s, first.prompt_tokens, first.output_tokens, first.kept_tokens) == (0.0, 20, 2, 0)
    assert first.ttft_s == pytest.approx(0.021, abs=0.002)
    assert first.duration_s == pytest.approx(0.023, abs=0.002)
    assert (second.t_s, second.prompt_tokens, second.kept_tokens, second.stop) == (30.0, 28, 22, "length")
    assert second.cached == {"device": 21}
    assert (third.prompt_tokens, third.kept_tokens) == (20, 12)
    assert sum(third.cached.values()) + sum(third.misses.values()) == 20
    tool, human, last = of(events, TracePause, "s1")
    assert (tool.kind, tool.tool, tool.program, tool.p50_s, tool.returned) == ("tool", "bash", "pytest", 7.0, True)
    assert tool.t_s + tool.duration_s == pytest.approx(30.0)
    assert (human.kind, human.tool, human.p50_s) == ("human", None, None)
    assert human.duration_s == pytest.approx(100.0 - human.t_s)
    assert (last.returned, last.duration_s) == (False, pytest.approx(105.0 - last.t_s))
    (end,) = of(events, TraceEnd, "s1")
    assert (end.keep_s, end.t_s) == (9.0, pytest.approx(105.0))
    assert SECRET_NAME not in site.recorder.path.read_text()


def test_what_the_server_infers_names_a_pause_unless_a_hint_did(kit: SimpleNamespace, tmp_path: Path) -> None:
    site = Site(kit, tmp_path / "trace.jsonl")
    for name, told, at_s in (("a", False, 0.0), ("b", True, 20.0)):
        site.ask(name, site.words(8), at_s)
        if told:
            site.tell(AgentPause(session=name, seq=1, kind="permission"))
        site.world.at(site.world.now_s, PauseInferred("t", name, "tool", "grep"))
        site.ask(name, site.words(9), at_s + 10.0, last_role="user")
    _, events = site.events()
    assert [(p.kind, p.tool) for p in (*of(events, TracePause, "s1")[:1], *of(events, TracePause, "s2")[:1])] == [
        ("tool", "grep"),
        ("permission", None),
    ]


def test_forks_hang_from_their_parents(kit: SimpleNamespace, tmp_path: Path) -> None:
    site = Site(kit, tmp_path / "trace.jsonl")
    context = site.ask("main", site.words(20), 0.0)
    site.tell(AgentFork(session="main", seq=1, children=("child",), shared=Shared(messages=3)))
    site.ask("child", [*context, 1, 2], 2.0)
    site.ask("named", site.words(5), 3.0, parent="main")
    _, events = site.events()
    opened = [event for event in events if isinstance(event, TraceSession)]
    assert [(s.session, s.parent, s.fork, s.shared_messages) for s in opened] == [
        ("s1", None, False, None),
        ("s2", "s1", True, 3),
        ("s3", "s1", False, None),
    ]
    trace = read(site.recorder.path)
    assert [len(session.children) for session in trace.sessions] == [2]


def test_warming_and_refused_requests_are_no_turns(kit: SimpleNamespace, tmp_path: Path) -> None:
    site = Site(kit, tmp_path / "trace.jsonl")
    site.ask("s", site.words(20), 0.0, count=0, warm=True)
    too_long = SubmitTurn("long", "t", np.zeros(5000, np.int32), Sampling(1), session="long")
    assert site.world.submit(too_long).rejected is None
    site.world.run(until_s=2.0)
    broken = EnvelopeAction(action_id="x", action_type="agent.pause", payload={"session": "s", "kind": 7})
    site.tell(Envelope(actions=(broken,)))
    assert site.events()[1] == []


def test_a_recording_is_played_by_the_simulator(kit: SimpleNamespace, tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    site = Site(kit, folder)
    contexts = {name: site.words(40) for name in "abc"}
    for turn in range(4):
        for at, name in enumerate("abc"):
            contexts[name] = [*site.ask(name, contexts[name], 20.0 * turn + 2.0 * at + 1.0), *site.words(10)]
    site.recorder.close()
    trace = read(folder)
    assert [len(session.requests) for session in trace.sessions] == [4, 4, 4]
    request = trace.sessions[0].requests[1]
    assert (request.prompt, request.pause_s) == (52, pytest.approx(20.0, abs=1.2))
    workload = steady(trace, 3.0, 1, window_s=300.0, warm_up_s=60.0)
    row = simulate(trace, Setup("lru", 1.0, 1, alive=3.0, unit=4), workload)
    assert row["turns"] > 0


def test_a_limit_ends_the_recording_and_is_counted(kit: SimpleNamespace, tmp_path: Path) -> None:
    site = Site(kit, tmp_path / "trace.jsonl", bytes_max=400)
    for number in range(6):
        site.ask(f"s{number}", site.words(8), 2.0 * number)
    _, events = site.events()
    figures = site.recorder.metrics()
    assert 0 < len(events) == figures["recorder_lines_total"]
    assert figures["recorder_lost_total"] > 0
    assert site.recorder.path.stat().st_size < 600


def test_no_recording_is_overwritten(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_text("mine")
    for target in (there, tmp_path / "no folder" / "trace"):
        with pytest.raises(ConfigError, match="--recorder"):
            TraceFile(target, TraceHeader(), 1000)
    assert there.read_text() == "mine"
