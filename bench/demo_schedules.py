"""The demonstration's recording under many schedules, in virtual time: does what hints gain depend on the draw of one?

    tenuto demo --keep D                                    # makes a recording
    python bench/demo_schedules.py D                        # 200 schedules of every arm
    python bench/demo_schedules.py D E F --schedules 50 --jitter 0.05

How it is played: ``tenuto_server.bench.demo_schedules``. ``tenuto demo`` does the same with fewer schedules at its end.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track

from tenuto_server.bench.demo_schedules import ARMS, JITTER, Pass, compare, figures, play_all, read
from tenuto_server.bench.report_table import schedule_lines


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folders", nargs="+", type=Path, metavar="DIR", help="what tenuto demo --keep DIR left there")
    add("--schedules", type=int, default=200, help="of every arm (default: 200)")
    add("--jitter", type=float, default=JITTER, help=f"standard deviation of a pause's logarithm (default: {JITTER})")
    add("--tokens-per-s", type=float, help="of prefill (default: as measured with the recording)")
    add("--model", default="smollm2-135m", help="whose tokenizer and template make the prompts")
    add("--patient", action="store_true", help="hints never wait for a busy engine's answer")
    add("--json", type=Path, help="every schedule's ratios into a file")
    args = parser.parse_args()
    if args.schedules < 1:
        parser.error("--schedules must be 1 or more")
    found = {}
    for folder in args.folders:
        scene = read(folder, args.model, args.tokens_per_s)
        passes: dict[str, list[Pass]] = {arm: [] for arm in ARMS}
        played = play_all(scene, args.schedules, args.jitter, patient=args.patient)
        total, err = args.schedules * len(ARMS), Console(stderr=True)
        for arm, one in track(played, folder.name, total, console=err, transient=True, disable=not sys.stderr.isatty()):
            passes[arm].append(one)
        print(f"\n{folder.name}: {args.schedules} schedules, {len(passes[ARMS[0]][0].ttft_s)} turns after pauses each")
        print(f"{'arm':14} {'prefilled':>10} {'TTFT mean':>10} {'p50':>7} {'p90':>7} {'of it in the queue, mean':>26}")
        for arm, of in figures(passes).items():
            times = f"{of['ttft_mean_s']:>10.3f} {of['ttft_p50_s']:>7.3f} {of['ttft_p90_s']:>7.3f}"
            print(f"{arm:14} {of['prefilled']:>10,.0f} {times} {of['queue_mean_s']:>26.3f}")
        found[folder.name] = compare(passes)
        print("\n".join(schedule_lines(found[folder.name])))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
