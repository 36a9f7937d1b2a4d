"""What a server believes of pauses before it has seen one. Constants with their sources; holds no state.

Lengths are gaps as a server sees them (client overhead, permission prompts and streaming tails included), so they differ
from tool run times. Sources, by the names under which the corpora are published: KVCT = callanjfox/kv-cache-tester, 410
coding-agent sessions, class by the stop reason of the previous answer, unrecorded answers removed; TraceLab =
uw-syfi/TraceLab (arXiv 2606.30560), tool calls of 43 developers.
"""

from __future__ import annotations

from tenuto.wire import PauseKind

KINDS: tuple[PauseKind, ...] = ("tool", "human", "subagent", "permission", "background", "unknown")

_TOOL = (
    (2.0, 0.012),
    (5.0, 0.255),
    (10.0, 0.553),
    (17.2, 0.709),
    (30.0, 0.809),
    (60.0, 0.874),
    (120.0, 0.924),
    (300.0, 0.968),
    (600.0, 0.984),
    (900.0, 0.992),
    (1800.0, 0.996),
)
_HUMAN = (
    (2.0, 0.020),
    (5.0, 0.106),
    (10.0, 0.154),
    (17.2, 0.179),
    (30.0, 0.207),
    (60.0, 0.281),
    (120.0, 0.399),
    (300.0, 0.609),
    (600.0, 0.726),
    (900.0, 0.784),
    (1800.0, 0.878),
    (3600.0, 0.949),
    (36200.0, 0.990),
)

LENGTH: dict[PauseKind, tuple[tuple[float, float], ...]] = {
    # KVCT after tool_use: p50 9 s, p90 81 s, p99 639 s.
    "tool": _TOOL,
    # KVCT after end_turn: p50 182 s. The sixth that ends within 10 s is queued input, a mode of its own.
    "human": _HUMAN,
    # KVCT, 63 subagents: p50, p90 and the longest.
    "subagent": ((117.0, 0.50), (263.0, 0.90), (815.0, 0.984)),
    # TraceLab, class "other (incl. ask-user)": a person is asked, but only to agree.
    "permission": ((2.9, 0.50), (209.0, 0.90), (6477.0, 0.99)),
    # TraceLab, write_stdin: polls of a command that runs on.
    "background": ((5.0, 0.50), (60.0, 0.90)),
    "unknown": _TOOL,
}
"""Points (seconds, share of the pauses that end and are no longer)."""

P_RETURN: dict[PauseKind, float] = {
    # KVCT: 13.3 % never return after end_turn, 0.8 % after tool_use. The kinds without a figure wait for a program
    # or for one click in the middle of a turn, like a tool.
    "tool": 0.992,
    "human": 0.867,
    "subagent": 0.992,
    "permission": 0.992,
    "background": 0.992,
    # 95.1 % tool and 4.9 % human gaps.
    "unknown": 0.986,
}

KIND_SHARE: dict[PauseKind, float] = {"tool": 0.951, "human": 0.049}
"""KVCT: what a pause is when nothing tells."""

P_INTACT: dict[PauseKind, float] = {
    # KVCT: after end_turn 16.2 % of the prompts break off early and lose a median 85 % of the prefix (0.162 * 0.85);
    # after tool_use 1.6 % lose 86 %.
    "tool": 0.986,
    "human": 0.862,
    "subagent": 0.986,
    "permission": 0.986,
    "background": 0.986,
    "unknown": 0.980,
}
"""Share of a session's KV that the prompt after the pause still begins with."""
