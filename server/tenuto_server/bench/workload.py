"""The workload of the demonstration: what each agent will do, drawn once from a seed. Values only, no state.

A small model cannot drive an agent, so which tool runs next is drawn here; the tools themselves, the model's answers and
the prompts are real (``demo_record``). Every figure below is either measured on real agents and cited by the name of its
corpus (docs/benchmarks.md says what they are), or sized for a slow two-core machine and then says so.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

HUMAN_SHARE = 6343 / (6343 + 37269)
"""KVCT, as labelled: of 43,612 pauses 6,343 waited for a person; all others for a tool."""

HUMAN_QUANTILES_S: tuple[tuple[float, float], ...] = (
    (0.05, 9.0),
    (0.10, 15.0),
    (0.25, 37.0),
    (0.50, 117.0),
    (0.75, 375.0),
    (0.90, 1341.0),
    (0.95, 2993.0),
    (0.99, 6558.0),
)
"""KVCT, human gaps as labelled: (probability, seconds). Between the knots log-linear, beyond them constant."""

TOOL_CALLS: tuple[tuple[str, int], ...] = (
    ("read", 1574),
    ("search", 712 + 313),
    ("python", 685 + 307),
    ("edit", 796 + 102),
    ("test", 750 + 52),
    ("list", 152 + 219 + 271),
)
"""AgentCgroup, calls by tool or program: Read; Grep and grep; python and python3; Edit and Write; pytest; ls, find and
Glob. Programs that make no sense in a copied folder (git, pip, the network) are left out."""


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    """Sizes, chosen for a machine that prefills 500 to 600 tokens a second: a pass then takes about 45 s, a turn whose KV
    is at hand about 0.3 s, and the device, which must hold the longest context, can be a third of the mean live KV.

    ``agents``: at work side by side, each on ``tasks`` sessions one after the other, so that sessions begin and end all
    the time. ``turns``: fewest and most turns of a session. ``brief_chars``: size of the source excerpt that comes with a task.
    ``output_chars``: cut of a tool's output. ``compression``: human pauses are divided by it, then cut at
    ``human_max_s``; tools take what they take. ``arrival_s``: mean time between the starts of agents (exponential);
    ``between_s``: from the end of an agent's session to its next.
    """

    seed: int = 1
    agents: int = 12
    tasks: int = 2
    turns: tuple[int, int] = (3, 3)
    brief_chars: int = 550
    output_chars: int = 120
    answer_tokens: int = 6
    compression: float = 10.0
    human_max_s: float = 12.0
    arrival_s: float = 0.8
    between_s: float = 0.5


@dataclass(frozen=True, slots=True)
class ToolStep:
    """A tool call: its name and arguments, as the agent would see them."""

    tool: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class PersonStep:
    """The turn ends and a person answers with ``text`` after ``wait_s`` seconds (compressed)."""

    wait_s: float
    text: str


@dataclass(frozen=True, slots=True)
class ForkStep:
    """Two subagents start on this session's prompt, each with a question and one tool call; their reports come back."""

    questions: tuple[tuple[str, ToolStep], ...]


@dataclass(frozen=True, slots=True)
class CompactStep:
    """The history is replaced by its summary, which the model writes in a turn of its own."""

    ask: str = "Summarise the work so far: goal, findings, open points."


Step: TypeAlias = ToolStep | PersonStep | ForkStep | CompactStep


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """One session of an agent: what it is asked, and what follows each of its turns but the last."""

    id: str
    task: str
    brief: tuple[str, int]  # file and first line of the excerpt that comes with the task
    steps: tuple[Step, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class AgentPlan:
    """One agent: when it starts (seconds), and its sessions in order."""

    name: str
    start_s: float
    sessions: tuple[SessionPlan, ...]


@dataclass(frozen=True, slots=True)
class Sources:
    """What may be named in tool calls: relative paths of source files with their number of lines, test and script
    files, and words that occur in the sources."""

    files: tuple[tuple[str, int], ...]
    tests: tuple[str, ...]
    scripts: tuple[str, ...]
    words: tuple[str, ...]


_TASKS = (
    "Find out why a pause that ends early still counts as late, and fix it.",
    "Add a limit to the number of open sessions and test it.",
    "The header of a hint can grow without bound. Find where it is built.",
    "Explain how a forecast is made and where its history is kept.",
    "Make the error for a missing session name the session.",
    "Reduce the work done for each message of a long prompt.",
    "Check that a retried request cannot be counted twice.",
    "Document the fields of a trace and remove those nobody reads.",
)
_REPLIES = (
    "Yes, go on, but leave the public names alone.",
    "Not there. Look at how the tests call it first.",
    "Good. Now do the same for the other module.",
    "Please keep the change small and run the tests again.",
    "That is the right place. What would break?",
    "I do not think so. Show me the lines you mean.",
)
_QUESTIONS = ("Which functions would this change touch?", "Which tests cover this, and what do they miss?")


def human_pause_s(share: float, settings: WorkloadSettings) -> float:
    """The human pause at this quantile (0..1) of ``HUMAN_QUANTILES_S``, compressed and cut, in seconds."""
    low_p, low_s = HUMAN_QUANTILES_S[0]
    seconds = HUMAN_QUANTILES_S[-1][1]
    if share <= low_p:
        seconds = low_s
    else:
        for high_p, high_s in HUMAN_QUANTILES_S[1:]:
            if share <= high_p:
                part = (share - low_p) / (high_p - low_p)
                seconds = math.exp(math.log(low_s) + part * math.log(high_s / low_s))
                break
            low_p, low_s = high_p, high_s
    return min(seconds / settings.compression, settings.human_max_s)


def make_plan(settings: WorkloadSettings, sources: Sources) -> list[AgentPlan]:
    """The plan of every agent; the same settings and sources give the same plan.

    The first agent's first session forks in its middle, the second agent's compacts in its middle, the last agent's ends
    after one turn.
    """
    chance = random.Random(settings.seed)
    agents, start_s = [], 0.0
    for number in range(settings.agents):
        sessions = []
        for task in range(settings.tasks):
            steps: list[Step] = [_step(chance, settings, sources) for _ in range(chance.randint(*settings.turns) - 1)]
            middle = len(steps) // 2
            if task == 0 and number == 0:
                steps.insert(middle, ForkStep(tuple((question, _tool(chance, sources)) for question in _QUESTIONS)))
            elif task == 0 and number == 1:
                steps.insert(middle + 1, CompactStep())
            elif task == 0 and number == settings.agents - 1:
                steps = []
            path, lines = chance.choice(_long(sources.files))
            brief = (path, 1 + chance.randrange(max(1, lines - 80)))
            name = f"agent-{number + 1}.{task + 1}"
            sessions.append(SessionPlan(name, _TASKS[chance.randrange(len(_TASKS))], brief, tuple(steps)))
        agents.append(AgentPlan(f"coder-{number + 1}", round(start_s, 3), tuple(sessions)))
        start_s += chance.expovariate(1.0 / settings.arrival_s)
    return agents


def _long(files: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    longest = max(lines for _, lines in files)
    return [(path, lines) for path, lines in files if lines >= min(100, longest)]


def _step(chance: random.Random, settings: WorkloadSettings, sources: Sources) -> Step:
    if chance.random() < HUMAN_SHARE:
        return PersonStep(round(human_pause_s(chance.random(), settings), 3), chance.choice(_REPLIES))
    return _tool(chance, sources)


def _tool(chance: random.Random, sources: Sources) -> ToolStep:
    kinds, weights = zip(*TOOL_CALLS, strict=True)
    kind = chance.choices(kinds, weights)[0]
    path, lines = chance.choice(sources.files)
    match kind:
        case "read":
            return ToolStep("read_file", {"path": path, "line": 1 + chance.randrange(max(1, lines - 20)), "count": 20})
        case "search":
            return ToolStep("bash", {"command": f"grep -rn {chance.choice(sources.words)} ."})
        case "python":
            return ToolStep("bash", {"command": f"python {chance.choice(sources.scripts)}"})
        case "edit":
            note = f"# Reviewed: {chance.choice(sources.words)}"
            return ToolStep("edit_file", {"path": path, "append": note})
        case "test":
            return ToolStep("bash", {"command": f"python -m pytest -q {chance.choice(sources.tests)}"})
        case _:
            return ToolStep("bash", {"command": f"ls -l {path.rsplit('/', 1)[0] if '/' in path else '.'}"})


def describe(settings: WorkloadSettings) -> str:
    """The parameters and where they come from, for people."""
    low, high = settings.turns
    return (
        f"{settings.agents} agents with {settings.tasks} sessions of {low} to {high} turns each (seed {settings.seed}), "
        f"starting {settings.arrival_s:g} s apart on average; {HUMAN_SHARE:.1%} of their pauses wait for a person (KVCT), "
        f"the others for tools in the proportions of AgentCgroup. Tools really run and take what they take. Human pauses "
        f"are drawn from KVCT's quantiles (median 117 s), divided by {settings.compression:g} and cut at "
        f"{settings.human_max_s:g} s. Which tool runs next is drawn, since the model is too small to choose; answers are "
        f"its own, {settings.answer_tokens} tokens each, greedy."
    )
