"""``tenuto bench parity``: agents against the engine with a real model, then the same agents in the simulator.

Three journals of decisions come of it. ``live``: as they were taken. ``replayed``: by a fresh engine under virtual time that
is given the same events; it must be the same to the last digit. ``simulated``: by the simulator, whose machine costs what
was measured before the run; how far it agrees, and how far its times to first token are off, is reported.

Exit status: 0 the replayed journal is the live one, 1 it is not, or the run failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console
from rich.table import Table

from tenuto_server.cache.identity import RootIdentity
from tenuto_server.config import CacheConfig, EngineConfig
from tenuto_server.engine.events import Sampling
from tenuto_server.engine.loop import EngineLoop
from tenuto_server.engine.plan import ForwardPlan, ForwardRow
from tenuto_server.errors import ConfigError, TenutoServerError
from tenuto_server.model.load import load_model
from tenuto_server.parity.live import LiveWorld, ScriptedExecutor, StepLog
from tenuto_server.parity.replay import Play, model, replay
from tenuto_server.runtime.costs import measure_costs
from tenuto_server.runtime.executor import TorchExecutor
from tenuto_server.sim.compare import compare_files, sessions_agree
from tenuto_server.sim.costs import Machine
from tenuto_server.sim.formats import read
from tenuto_server.sim.harness import Sent
from tenuto_server.sim.knowledge import Delivery, PauseScale, parse_policy
from tenuto_server.sim.tally import classes_of
from tenuto_server.sim.traces import Child, Request, Session, Trace
from tenuto_server.sim.workload import Workload, steady

BLOCK_TOKENS = 16
_CHUNK_TOKENS = 512  # the engine's default step
_FAR_TOKENS = 2048

Sample = dict[str, tuple[float, tuple[str, ...]]]
"""Seconds to the first token and the classes of a turn, by session and number of the turn."""


def main(argv: Sequence[str]) -> int:
    """Runs, prints, and writes the journals into ``--keep``."""
    args = _parser().parse_args(argv)
    console = Console() if sys.stdout.isatty() else Console(width=120)
    try:
        if args.keep is None:
            with TemporaryDirectory(prefix="tenuto-parity-") as folder:
                return run(args, Path(folder), console)
        args.keep.mkdir(parents=True, exist_ok=True)
        return run(args, args.keep, console)
    except (TenutoServerError, OSError) as error:
        print(f"tenuto bench parity: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tenuto bench parity", description=__doc__.splitlines()[0])
    parser.add_argument(
        "trace", nargs="?", default="synthetic:40:1", help="as for tenuto simulate (default %(default)s)"
    )
    parser.add_argument("--model", default="smollm2-135m", help="as for tenuto serve")
    parser.add_argument("--policy", default="tenuto:r2=0.5+end+compaction", help="one policy of tenuto simulate")
    parser.add_argument("--hints", default="on", help="how hints are delivered, as for tenuto simulate")
    parser.add_argument("--alive", type=float, default=8.0, help="sessions alive on average (default %(default)g)")
    parser.add_argument("--capacity-frac", type=float, default=0.5, help="device memory / mean live KV")
    parser.add_argument("--host-ratio", type=float, default=1.0, help="host memory in device memories")
    parser.add_argument("--minutes", type=float, default=1.5, help="how long agents work (default %(default)g)")
    parser.add_argument("--speed", type=float, default=10.0, help="pauses are shortened by this (default %(default)g)")
    parser.add_argument(
        "--shrink", type=float, default=80.0, help="prompts are shortened by this (default %(default)g)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the three journals here")
    return parser


def run(args: argparse.Namespace, folder: Path, console: Console) -> int:
    """Everything, with the journals in ``folder``."""
    trace = scaled(read(args.trace), args.shrink, args.speed)
    loaded = load_model(args.model, dtype="fp32")
    policy, knowledge = parse_policy(args.policy)
    if policy is None:
        raise ConfigError("the oracle does not run on an engine")
    length_s = args.minutes * 60.0
    workload = at_once(steady(trace, args.alive, args.seed, window_s=length_s, warm_up_s=1.0, served=True))
    device = max(64, int(args.capacity_frac * workload.live_tokens / BLOCK_TOKENS))
    host = int(args.host_ratio * device)
    executor = TorchExecutor(loaded.transformer, device_blocks=device, host_blocks=host, block_tokens=BLOCK_TOKENS)
    try:
        machine = measured(executor, args.model)
        config = settings(machine, args.policy, device, host, executor.store.layout.block_bytes)
        play = Play(
            config,
            policy,
            RootIdentity(loaded.digest, "", "fp32", 1, BLOCK_TOKENS, b"parity-of-blocks"),
            workload,
            knowledge,
            Delivery.parse(args.hints),
            PauseScale.of(trace.sessions),
            workload.to_s,
        )
        console.print(
            f"{args.model}, {args.policy}, hints {args.hints}: {workload.alive:.1f} sessions alive, "
            f"{device} device and {host} host blocks, {length_s:.0f} s"
        )
        return judge(play, machine, executor, folder, console)
    finally:
        executor.close()


def judge(play: Play, machine: Machine, executor: TorchExecutor, folder: Path, console: Console) -> int:
    """The three runs and what they say about each other."""
    files = [folder / f"{name}.journal" for name in ("live", "replayed", "simulated")]
    live, script, journal = Sample(), ScriptedExecutor(executor), list[str]()
    log = StepLog(play.engine(journal))
    world = LiveWorld(lambda clock_ns: EngineLoop(log, script, inbox_max=1 << 16, clock_ns=clock_ns))
    play.agents(world, script, lambda sent: _note(live, sent)).start()
    world.run(play.until_s)
    again, complaints = replay(play, log.steps)
    simulated = Sample()
    modelled = model(play, machine, lambda sent: _note(simulated, sent))
    for path, lines in zip(files, (journal, again, modelled), strict=True):
        path.write_text("".join(line + "\n" for line in lines), "utf-8")
    console.print(f"\n[bold]live and replayed[/] ({len(log.steps)} steps, {len(live)} turns)")
    for complaint in complaints[:5]:
        console.print(complaint, markup=False)
    differs = compare_files(files[0], files[1], console) or int(bool(complaints)) or int(journal != again)
    console.print("\n[bold]live (A) and simulated (B)[/]")
    sessions_agree(files[0], files[2], console)
    console.print(ttft_table(live, simulated))
    return differs


def _note(into: Sample, sent: Sent) -> None:
    if sent.turn.first_token_ns is None:
        return
    waited_s = (sent.turn.first_token_ns - sent.turn.submitted_ns) / 1e9
    classes = classes_of(sent.pause, sent.compacted, sent.line.session.thread)
    into[f"{sent.line.name} {sent.line.at}"] = waited_s, classes


def ttft_table(live: Sample, simulated: Sample) -> Table:
    """Time to first token by class in both runs, and the error of the simulator: of the quantiles, and turn by turn."""
    table = Table(title="time to first token, s", title_justify="left")
    table.add_column("after")
    for name in ("turns", "live p50", "sim p50", "error", "live p90", "sim p90", "error", "typical turn off by"):
        table.add_column(name, justify="right")
    both = live.keys() & simulated.keys()
    for name in sorted({name for _, classes in live.values() for name in classes}):
        turns = [key for key in both if name in live[key][1]]
        if not turns:
            continue
        mine, other = [live[key][0] for key in turns], [simulated[key][0] for key in turns]
        cells = [name, str(len(turns))]
        for q in (0.5, 0.9):
            a, b = float(np.quantile(mine, q)), float(np.quantile(other, q))
            cells += [f"{a:.3f}", f"{b:.3f}", f"{100 * (b / a - 1):+.0f} %"]
        off = statistics.median(abs(log(max(b, 1e-4) / max(a, 1e-4))) for a, b in zip(mine, other, strict=True))
        table.add_row(*cells, f"x{np.exp(off):.2f}")
    return table


def settings(machine: Machine, policy: str, device: int, host: int, block_bytes: int) -> EngineConfig:
    """The engine's settings, the same for all three runs."""
    cache = CacheConfig(device, host, 0, BLOCK_TOKENS)
    return EngineConfig(
        cache,
        policy=policy,
        hint_rate_per_s=1e9,
        hint_burst=1 << 30,
        prefill_a_s=machine.prefill_a_s,
        prefill_b_s=machine.prefill_b_s,
        host_bytes_per_s=machine.host_bps,
        block_bytes=block_bytes,
    )


def measured(executor: TorchExecutor, name: str) -> Machine:
    """What work costs here: copies by the server's own probe, prefill by chunks as large as the engine's, decode by single
    tokens, each near and far into a context."""
    costs = measure_costs(executor, max_context_tokens=8192)
    token_bytes = executor.store.layout.block_bytes // BLOCK_TOKENS
    room = len(executor.store.device_pool) * BLOCK_TOKENS
    chunk = min(_CHUNK_TOKENS, room // 2)
    far = min(_FAR_TOKENS, room - chunk)
    near_s, far_s = _forward_s(executor, 0, chunk), _forward_s(executor, far, chunk)
    b_s = max(0.0, (far_s - near_s) / (chunk * far))
    token_s, far_token_s = _forward_s(executor, 0, 1), _forward_s(executor, far, 1)
    return Machine(
        name,
        max(near_s / chunk - b_s * chunk / 2, 0.1 * near_s / chunk),
        b_s,
        token_s,
        token_bytes,
        far * token_bytes / max(far_token_s - token_s, 1e-5),
        costs.host_bytes_per_s or 1e9,
        costs.disk_bytes_per_s or 1e9,
        "measured before the run",
    )


def _forward_s(executor: TorchExecutor, start: int, count: int) -> float:
    """Seconds for ``count`` tokens after ``start``; the median of seven."""
    blocks = np.arange((start + count - 1) // BLOCK_TOKENS + 1, dtype=np.int32)
    row = ForwardRow(0, start, np.zeros(count, np.int32), blocks, True, Sampling(1), 1)
    return statistics.median(executor.run(ForwardPlan(0, (row,))).elapsed_ns for _ in range(7)) / 1e9


def at_once(workload: Workload) -> Workload:
    """The workload without the hours before it, from which a few sessions in long pauses reach in: those begin with it."""
    begin_s = workload.from_s - 1.0
    threads = tuple(replace(t, start_s=max(0.0, t.start_s - begin_s)) for t in workload.threads)
    return replace(workload, threads=threads, from_s=1.0, to_s=workload.to_s - begin_s)


def scaled(trace: Trace, shrink: float, speed: float) -> Trace:
    """The trace with prompts and answers shortened by ``shrink`` and pauses by ``speed``."""

    def count(tokens: int) -> int:
        return max(1, round(tokens / shrink))

    def request(r: Request) -> Request:
        pause_s = None if r.pause_s is None else r.pause_s / speed
        prompt = max(BLOCK_TOKENS, count(r.prompt))
        return replace(
            r,
            prompt=prompt,
            out=max(2, count(4 * r.out)),
            shared=min(prompt, count(r.shared) if r.shared else 0),
            pause_s=pause_s,
            service_s=r.service_s / speed,
        )

    def session(s: Session) -> Session:
        children = tuple(Child(child.after, session(child.session)) for child in s.children)
        return replace(
            s, requests=tuple(request(r) for r in s.requests), head=s.head and count(s.head), children=children
        )

    return replace(trace, sessions=tuple(session(s) for s in trace.sessions), starts_s=())
