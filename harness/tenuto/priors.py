"""What is known about pauses before this machine has seen one: quantile knots by kind, tool class, tool and program.

Constants only. Sources, by the names under which the corpora are published:

- TraceLab (uw-syfi/TraceLab, arXiv 2606.30560): tool wall times of 432,510 calls by 43 developers, by class and tool;
- AgentCgroup (eunomia-bpf/agentcgroup): 8,110 calls with program names, measured in containers;
- KVCT (callanjfox/kv-cache-tester): gaps as a server sees them, stop-reason corrected, 410 sessions.

Each entry is a tuple of (seconds, share of pauses that are no longer).
"""

from __future__ import annotations

Knots = tuple[tuple[float, float], ...]

# Tool run time by class, TraceLab: p25, p50, p90, p99.
TOOL_CLASS: dict[str, Knots] = {
    "shell": ((0.11, 0.25), (0.85, 0.50), (22.7, 0.90), (237.0, 0.99)),
    "edit": ((0.038, 0.25), (0.073, 0.50), (1.86, 0.90), (56.0, 0.99)),
    "read": ((0.015, 0.25), (0.043, 0.50), (0.48, 0.90), (7.3, 0.99)),
    "planning": ((0.028, 0.25), (0.072, 0.50), (2.5, 0.90), (383.0, 0.99)),
    "web": ((2.2, 0.25), (5.8, 0.50), (62.0, 0.90), (262.0, 0.99)),
    "other": ((0.04, 0.25), (2.9, 0.50), (209.0, 0.90), (6477.0, 0.99)),
}

KIND: dict[str, Knots] = {
    # A tool without a name: the overall wall time of TraceLab calls (p25, p50, p90, p99).
    "tool": ((0.058, 0.25), (0.285, 0.50), (13.6, 0.90), (216.0, 0.99)),
    # KVCT gaps after end_turn, as shares of the gaps of sessions that do return.
    "human": (
        (2.0, 0.020),
        (5.0, 0.106),
        (10.0, 0.154),
        (30.0, 0.207),
        (60.0, 0.281),
        (120.0, 0.399),
        (300.0, 0.609),
        (600.0, 0.726),
        (900.0, 0.784),
        (1800.0, 0.878),
        (3600.0, 0.949),
        (36200.0, 0.990),
    ),
    # Synchronous subagents of KVCT: p50, p90 and the longest of 63.
    "subagent": ((117.0, 0.50), (263.0, 0.90), (815.0, 0.984)),
    # A person is asked, but only to agree: TraceLab's class "other (incl. ask-user)".
    "permission": TOOL_CLASS["other"],
    # TraceLab write_stdin: polls of a command in the background.
    "background": ((5.0, 0.50), (60.0, 0.90)),
    # Either of tool and human: KVCT gaps after tool_use, which are 95 % of all gaps a server sees.
    "unknown": (
        (2.0, 0.012),
        (5.0, 0.255),
        (10.0, 0.553),
        (30.0, 0.809),
        (60.0, 0.874),
        (120.0, 0.924),
        (300.0, 0.968),
        (900.0, 0.992),
        (1800.0, 0.996),
    ),
}

# By tool: TraceLab p50 and p90 where it names the tool, else AgentCgroup p50, p90, p99 (tools with 100 calls and more).
TOOL: dict[str, Knots] = {
    "bash": ((0.409, 0.50), (30.331, 0.90)),
    "exec_command": ((0.323, 0.50), (1.002, 0.90)),
    "write_stdin": ((5.002, 0.50), (60.001, 0.90)),
    "read": ((0.036, 0.50), (0.427, 0.90)),
    "apply_patch": ((0.059, 0.50), (1.217, 0.90)),
    "edit": ((0.095, 0.50), (2.237, 0.90)),
    "write": ((0.098, 0.50), (4.465, 0.90)),
    "taskupdate": ((0.082, 0.50), (1.247, 0.90)),
    "grep": ((0.027, 0.50), (0.057, 0.90), (1.282, 0.99)),
    "glob": ((0.030, 0.50), (0.133, 0.90), (2.703, 0.99)),
    "todowrite": ((0.015, 0.50), (0.042, 0.90), (0.153, 0.99)),
}

# By program, AgentCgroup: p50, p90, p99 of the programs with 40 calls and more.
PROGRAM: dict[str, Knots] = {
    "python -m pytest": ((7.238, 0.50), (12.258, 0.90), (54.942, 0.99)),
    "pytest": ((5.915, 0.50), (9.312, 0.90), (14.042, 0.99)),
    "python": ((7.711, 0.50), (10.968, 0.90), (18.677, 0.99)),
    "python3": ((0.850, 0.50), (9.191, 0.90), (12.014, 0.99)),
    "git": ((0.031, 0.50), (6.805, 0.90), (13.434, 0.99)),
    "grep": ((0.024, 0.50), (0.052, 0.90), (9.547, 0.99)),
    "find": ((0.034, 0.50), (7.187, 0.90), (12.425, 0.99)),
    "pip": ((6.952, 0.50), (11.875, 0.90), (56.536, 0.99)),
    "python -m venv": ((12.935, 0.50), (22.215, 0.90), (63.797, 0.99)),
    "ls": ((0.023, 0.50), (0.552, 0.90), (9.603, 0.99)),
    "cat": ((0.309, 0.50), (10.659, 0.90), (15.224, 0.99)),
}

# Probability that the session returns at all: KVCT, 13.3 % never return after end_turn, 0.8 % after tool_use; unknown
# is their mixture at 4.9 % human gaps.
P_RETURN: dict[str, float] = {
    "human": 0.867,
    "tool": 0.992,
    "subagent": 0.992,
    "permission": 0.992,
    "background": 0.992,
    "unknown": 0.986,
}

_CLASS_WORDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("web", ("web", "fetch", "browser", "http", "url")),
    ("shell", ("bash", "shell", "exec", "terminal", "command", "stdin", "run_", "python", "cmd")),
    ("planning", ("todo", "plan", "taskupdate", "think")),
    ("edit", ("edit", "write", "patch", "replace", "insert", "create", "notebook")),
    ("read", ("read", "grep", "glob", "search", "list", "find", "view", "open")),
)


def tool_class(tool: str) -> str:
    """The class of a tool by its name: shell, edit, read, planning, web or other.

    A name is matched by the words that agents use for such tools; anything unknown is ``other``.
    """
    name = tool.lower()
    for label, words in _CLASS_WORDS:
        if any(word in name for word in words):
            return label
    return "other"
