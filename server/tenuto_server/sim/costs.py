"""How long things take on a named machine: prefill, decode, and copies over links that are shared. Owner of the links' state.

Prefill of the token at position x takes ``a + b * x`` seconds (attention grows with context). A decode step reads the
weights once and every running context's KV, so it takes (weights + sum of contexts) / memory bandwidth. A copy waits for
the copies before it on the same link in the same direction.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from tenuto_server.engine.plan import ForwardPlan, Transfer
from tenuto_server.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Machine:
    """``prefill_a_s``, ``prefill_b_s``: per token and per token and position. ``weights_s``: one decode step without any
    context. ``kv_bytes``: per token. ``memory_bps``, ``host_bps``, ``disk_bps``: bytes per second."""

    name: str
    prefill_a_s: float
    prefill_b_s: float
    weights_s: float
    kv_bytes: int
    memory_bps: float
    host_bps: float
    disk_bps: float
    source: str


PRESETS: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        Machine(
            "cpu2-smollm2",
            6.44e-4,
            4.13e-7,
            0.027,
            23_040,
            10e9,
            12.2e9,
            1.2e9,
            "measured on 2 CPU cores, SmolLM2-135M bf16: prefill 1333 / 920 / 428 tokens/s at 512 / 2048 / 8192, 37 tokens/s "
            "decode, 94 MB copied in 7.7 ms, disk 1.2 GB/s",
        ),
        Machine(
            "h100-8b",
            1 / 30_000,
            1.02e-9,
            16e9 / 3.35e12,
            131_072,
            3.35e12,
            50e9,
            7e9,
            "paper figures: half of 989 TFLOPS (30K tokens/s short, 20K on average to 32K), PCIe 5 x16, NVMe gen 4; bf16",
        ),
        Machine(
            "h100-32b",
            1 / 7_700,
            2.6e-9,
            65e9 / 3.35e12,
            262_144,
            3.35e12,
            50e9,
            7e9,
            "paper figures: half of 989 TFLOPS (7.7K tokens/s short, 5.8K on average to 32K), PCIe 5 x16, NVMe gen 4; bf16",
        ),
        Machine(
            "h200-70b",
            2.8e-4,
            5.2e-9,
            70e9 / 4.8e12,
            327_680,
            4.8e12,
            50e9,
            7e9,
            "paper figures: 140 GFLOP a token plus 4 * 80 * 8192 per position at 500 TFLOPS; weights in 8 bits; PCIe 5 x16",
        ),
    )
}


def machine_of(name: str) -> Machine | None:
    """The preset of that name, or what ``tenuto bench costs --out FILE.json`` wrote; None for ``none``. Raises
    ``ConfigError`` that lists the presets or names what the file lacks."""
    if name == "none":
        return None
    if name.endswith(".json"):
        return _measured(Path(name))
    if name not in PRESETS:
        raise ConfigError(f"--timing {name!r} is none of none, {', '.join(PRESETS)}")
    return PRESETS[name]


def _measured(path: Path) -> Machine:
    try:
        facts = json.loads(path.read_text("utf-8"))
        return Machine(**{field.name: facts[field.name] for field in fields(Machine)})
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--timing {path}: {error}") from None
    except KeyError as error:
        raise ConfigError(f"--timing {path}: has no {error}; write it with tenuto bench costs --out") from None


class Clockwork:
    """Durations of plans and copies where one simulated token stands for ``unit`` tokens. ``now_ns()``: virtual time;
    ``block_tokens``: simulated tokens of a block."""

    def __init__(self, machine: Machine, unit: int, now_ns: Callable[[], int], *, block_tokens: int = 1) -> None:
        self._machine, self._unit, self._now_ns = machine, unit, now_ns
        self._block_bytes = unit * block_tokens * machine.kv_bytes
        self._free_ns: dict[tuple[str, str], int] = {}

    def forward_s(self, plan: ForwardPlan) -> float:
        """A batch: its prefill chunks one after another, no faster than the weights are read once, then ``unit`` decode
        steps of all that generate."""
        machine, unit = self._machine, self._unit
        prefill_s, context, decoding = 0.0, 0, False
        for row in plan.rows:
            count = len(row.tokens)
            if row.draw and count == 1:
                decoding = True
                context += row.start + 1
            else:
                tokens, middle = count * unit, (row.start + count / 2) * unit
                prefill_s += tokens * (machine.prefill_a_s + machine.prefill_b_s * middle)
        step_s = machine.weights_s + context * unit * machine.kv_bytes / machine.memory_bps
        return prefill_s + unit * step_s if decoding else max(prefill_s, machine.weights_s)

    def copy_s(self, transfer: Transfer) -> float:
        """What a copy takes of its link."""
        rate = self._machine.disk_bps if _link(transfer)[0] == "disk" else self._machine.host_bps
        return len(transfer.src_slots) * self._block_bytes / rate

    def transfer_s(self, transfer: Transfer) -> float:
        """From now until a copy is done, its wait for the link included."""
        link, now_ns = _link(transfer), self._now_ns()
        end_ns = max(now_ns, self._free_ns.get(link, 0)) + int(self.copy_s(transfer) * 1e9)
        self._free_ns[link] = end_ns
        return (end_ns - now_ns) / 1e9


def _link(transfer: Transfer) -> tuple[str, str]:
    """The slowest part of the way, and the direction."""
    tier = "disk" if "disk" in (transfer.src, transfer.dst) else "host"
    return tier, "up" if transfer.dst == "device" else "down"
