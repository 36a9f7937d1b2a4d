"""Every Triton kernel on the GPU at hand: is it right, how fast is it, and how far from what the device can do.

    python bench/gpu.py --json gpu.json --markdown gpu.md      # under 4 minutes, most of it compilation
    python bench/gpu.py --only decode,offload                  # some of the sections
    python bench/gpu.py --interpret --quick                    # no GPU: the same steps in Triton's interpreter, no figures

First each kernel runs the suite that every backend must pass (`tenuto_kernels.testing`), then it is timed: the median of
repeated calls between CUDA events, the second-level cache flushed before each. Beside it, in the same run: torch's own way
(scaled_dot_product_attention over contiguous keys, the torch definition, a bf16 product; for a decode step the launch of one
kernel after the other), and the bound: memory bandwidth as a large copy on the device shows it, copy bandwidth as one large
pinned copy shows it. Exit status 1: a kernel is wrong;
2: no GPU, or wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SECTIONS = ("decode", "prefill", "rowwise", "products", "sample", "blocks", "offload", "step")


def check_all(names: list[str], backend: str, quick: bool) -> list[dict[str, Any]]:
    """The suite of each operation; a failure is recorded, not raised."""
    from tenuto_kernels.testing import check_op

    found = []
    for op in names:
        began = time.perf_counter()
        row: dict[str, Any] = {"op": op, "cases": 2 if quick else 8}
        try:
            results = check_op(op, backend, cases=row["cases"], longest=24 if quick else 120)  # type: ignore[arg-type]
            row |= {"ok": True, "max_error": max(result.max_error for result in results)}
        except Exception as error:  # whatever a kernel dies of belongs in the report, beside what the others do
            row |= {"ok": False, "error": f"{type(error).__name__}: {error}"[:2000]}
        row["took_s"] = round(time.perf_counter() - began, 2)
        print(f"  {op:28}{'ok' if row['ok'] else 'WRONG':6}{row['took_s']:8.1f} s  {row.get('error', '')}", flush=True)
        found.append(row)
    return found


def time_all(sections: list[str], device: str, quick: bool) -> Iterator[dict[str, Any]]:
    """Timed rows, section by section; one that fails gives a row with its error."""
    import gpu_cases

    bench = gpu_cases.Bench(device, quick)
    yield {"section": "device", "name": "memory bandwidth, copy on the device", "rate": bench.memory, "unit": "GB/s"}
    yield {"section": "device", "name": "pinned host to device", "rate": bench.to_device, "unit": "GB/s"}
    yield {"section": "device", "name": "device to pinned host", "rate": bench.to_host, "unit": "GB/s"}
    for section in sections:
        try:
            for row in getattr(gpu_cases, section)(bench):
                yield {"section": section, **row}
        except Exception as error:
            yield {"section": section, "name": "failed", "error": f"{type(error).__name__}: {error}"[:2000]}


def line(row: dict[str, Any]) -> list[str]:
    """A row's cells: what, ms, rate, share of the bound, torch's ms, how many times faster than it."""
    if "error" in row:
        return [row["section"], f"{row['name']}: {row['error'].splitlines()[0]}", "", "", "", "", ""]
    other = row.get("torch_ms")
    return [
        row["section"],
        row["name"],
        f"{row['ms']:.4g}" if "ms" in row else "",
        f"{row['rate']:.4g} {row['unit']}" if "rate" in row else "",
        f"{100 * row['rate'] / row['bound']:.0f} %" if row.get("bound") else "",
        f"{other:.4g}" if other else "",
        f"{other / row['ms']:.2f}" if other and row.get("ms") else "",
    ]


HEADINGS = ["section", "what", "ms", "rate", "of the bound", "torch ms", "times faster"]


def markdown(report: dict[str, Any]) -> str:
    """The report as two tables."""
    about = report["about"]
    lines = [f"{about['device']}, torch {about['torch']}, triton {about['triton']}, commit {about['commit']}.", ""]
    lines += ["| kernel | cases | largest error |", "| --- | ---: | ---: |"]
    for row in report["checks"]:
        lines.append(
            f"| {row['op']} | {row['cases']} | {row['max_error']:.2g} |" if row["ok"] else f"| {row['op']} | wrong | |"
        )
    lines += ["", "| " + " | ".join(HEADINGS) + " |", "| --- | --- | ---: | ---: | ---: | ---: | ---: |"]
    lines += ["| " + " | ".join(line(row)) + " |" for row in report["timings"]]
    return "\n".join(lines) + "\n"


def about(interpret: bool) -> dict[str, Any]:
    import torch
    import triton

    from tenuto_server.bench.demo import about as machine

    device = "Triton's interpreter (times mean nothing)" if interpret else torch.cuda.get_device_name()
    return {**machine(), "device": device, "torch": torch.__version__, "triton": triton.__version__}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"timed sections, of {', '.join(SECTIONS)}")
    parser.add_argument("--checks", metavar="OPS", help="operations to check, '' for none (default: all)")
    parser.add_argument("--quick", action="store_true", help="few cases, small shapes")
    parser.add_argument("--interpret", action="store_true", help="in Triton's interpreter, without a GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write its tables there")
    options = parser.parse_args()
    sections = options.only.split(",")
    if unknown := set(sections) - set(SECTIONS):
        print(f"bench/gpu.py: {', '.join(sorted(unknown))} is none of {', '.join(SECTIONS)}", file=sys.stderr)
        return 2
    backend = "interpret" if options.interpret else "gpu"
    os.environ["TENUTO_KERNELS"] = backend
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which is just below
    import torch

    if not options.interpret and not torch.cuda.is_available():
        print(
            "bench/gpu.py: torch sees no CUDA device. On a machine with one, install a torch built for CUDA and "
            "'tenuto[server,gpu]'; without one, --interpret --quick goes through the same steps.",
            file=sys.stderr,
        )
        return 2
    began = time.perf_counter()
    report: dict[str, Any] = {"what": "bench/gpu.py", "about": about(options.interpret)}
    print(report["about"]["device"])
    from tenuto_kernels.testing import OPS

    names = list(OPS) if options.checks is None else [name for name in options.checks.split(",") if name]
    report["checks"] = check_all(names, backend, options.quick)
    report["timings"] = []
    for row in time_all(sections, "cpu" if options.interpret else "cuda", options.quick):
        report["timings"].append(row)
        cells = line(row)
        print(f"  {cells[0]:9}{cells[1]:52}" + "".join(f" {cell:>15}" for cell in cells[2:]), flush=True)
    report["took_s"] = round(time.perf_counter() - began, 1)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.markdown:
        options.markdown.write_text(markdown(report), encoding="utf-8")
    wrong = [row["op"] for row in report["checks"] if not row["ok"]]
    failed = [row["section"] for row in report["timings"] if "error" in row]
    print(
        f"{report['took_s']} s"
        + (f"; WRONG: {', '.join(wrong)}" if wrong else "")
        + (f"; failed: {failed}" if failed else "")
    )
    return 1 if wrong or failed else 0


if __name__ == "__main__":
    sys.exit(main())
