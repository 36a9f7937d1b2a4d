"""One conversation in the proxy's session tree. ``Node`` owns what is known of it and speaks through an SDK session.

Every method only queues hints; none waits. The same moment may be reported twice, by traffic and by a hook: the second
report changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tenuto.answers import Ending
from tenuto.pause import Pause
from tenuto.pause_key import PauseKey
from tenuto.proxy.chains import Prompt, shared
from tenuto.session import Session
from tenuto.wire import AgentCompaction, AgentFork, AgentModelSwitch, AgentResumeSoon, Shared

# Names of tools, in lower case, behind which something else than a program runs.
SPAWNS = frozenset({"agent", "task", "spawn_agent", "delegate_to_agent", "collaborationspawn_agent"})
WAITS = frozenset({"wait_agent", "collaborationwait_agent"})
ASKS = frozenset({"askuserquestion", "ask_user_question", "ask_user", "exitplanmode", "exit_plan_mode", "question"})
# A tool that only says that the task is done: nothing runs, the next turn is a person's.
ENDS = frozenset({"finish", "attempt_completion"})
CUT_OFF = frozenset({"length", "max_tokens", "incomplete", "pause_turn", "MAX_TOKENS"})
# A prompt that shrank to less than this share of the last one has been compacted.
COMPACTED_SHARE = 0.6
# A tool that was faster has the next request on its way before a hint could arrive.
WORTH_TELLING_S = 1.0


class Node:
    """A session, its parent, its running subagents, and the pause that is open in it."""

    def __init__(
        self, session: Session, *, client: str | None, scope: str, parent: Node | None, inferred: bool = False
    ) -> None:
        self.session = session
        self.client = client
        self.scope = scope
        self.parent = parent
        self.inferred = inferred
        self.children: set[str] = set()
        self.running = 0
        self.turns = 0
        self.pause: Pause | None = None
        self.outstanding: set[str] = set()
        self.calls: set[str] = set()
        self.expects = 0  # subagents that were spawned and have not spoken yet
        self.turn_over = False
        self.expected_names: list[str] = []
        self.tools: tuple[str, ...] = ()
        self.model: str | None = None
        self.window: str | None = None
        self.prompt: Prompt | None = None
        self.prompt_tokens = 0
        self.compacting = False
        self.continued = False
        self.rewritten = False  # its last body was not passed on as it came

    @property
    def name(self) -> str:
        """The session's id, as sent to the server."""
        return self.session.id

    # -- pauses -----------------------------------------------------------------------------------------------------

    def begin_pause(self, kind: str, calls: Sequence[tuple[str, Mapping[str, Any]]] = ()) -> None:
        """A pause begins; of parallel calls, the one that should take longest names it. No effect in a pause of its
        kind."""
        if self.pause is not None:
            if self.pause.kind == kind:
                return
            self.end_pause(learn=False)
        name, args = self._longest(kind, calls)
        self.pause = self.session.pause(kind, name=name, args=args).start()

    def end_pause(self, *, learn: bool = True) -> None:
        """The pause is over and teaches the forecaster, unless its end says nothing about it."""
        pause, self.pause = self.pause, None
        if pause is not None:
            pause.stop(learn=learn)

    def resume_soon(self, in_s: float) -> None:
        """The next turn is near; told only in a pause that is long enough to make a difference."""
        if self.pause is not None and self.pause.elapsed_s >= WORTH_TELLING_S:
            self.session.emit(AgentResumeSoon, in_s=in_s, rides=False)

    def _longest(
        self, kind: str, calls: Sequence[tuple[str, Mapping[str, Any]]]
    ) -> tuple[str | None, Mapping[str, Any] | None]:
        if len(calls) < 2:
            return calls[0] if calls else (None, None)
        forecaster = self.session.services.forecaster
        return max(calls, key=lambda call: forecaster.predict(PauseKey.of(kind, call[0], arguments=call[1])).p50_s)

    # -- turns ------------------------------------------------------------------------------------------------------

    def beside(self, tools: tuple[str, ...], prompt: Prompt) -> bool:
        """Whether a request in this conversation's name is no turn of it: it has no tools where the turns have some, and
        does not go on from an answer (an answer and what is said to it are two messages at least)."""
        if tools or not self.tools or self.prompt is None:
            return False
        old, new = self.prompt.messages, prompt.messages
        return not (len(new) >= len(old) + 2 and new[: len(old)] == old)

    def turn(self, model: str | None, tools: tuple[str, ...], prompt: Prompt, window: str | None) -> None:
        """A request of this conversation arrived."""
        self.running += 1
        self.turns += 1
        self.end_pause()
        if self.turn_over:  # whatever was spawned before has spoken by now, or never will
            self.turn_over, self.expects = False, 0
            self.expected_names.clear()
        if model is not None and self.model is not None and model != self.model:
            self.session.emit(AgentModelSwitch, model=model)
        self.model = model or self.model
        self.tools = tools or self.tools
        self.window = window or self.window
        self.outstanding.clear()
        if self.turns == 1 and self.parent is not None:
            self._tell_shared(self.parent, prompt)
        self.prompt = prompt

    def answered(self, ending: Ending) -> None:
        """An answer is complete."""
        self.prompt_tokens = ending.prompt_tokens or self.prompt_tokens
        self.outstanding = {id for id in ending.ids if id}
        self.calls |= self.outstanding
        names = [name.lower() for name, _ in ending.calls]
        spawned = [args for (name, args) in ending.calls if name.lower() in SPAWNS]
        self.expects += len(spawned)
        self.turn_over = ENDS.issuperset(names)
        self._tell_forks(spawned)
        if self.parent is not None and self.turn_over:
            self.parent.joined(self.name)
            return
        self.begin_pause(self._kind(names, ending.stop), () if self.turn_over else ending.calls)

    def _kind(self, names: Sequence[str], stop: str | None) -> str:
        if any(name in ASKS for name in names):
            return "human"
        if names and all(name in SPAWNS or name in WAITS for name in names):
            return "subagent"
        if not self.turn_over:
            return "tool"
        if self.children or self.expects:
            return "subagent"
        return "unknown" if stop in CUT_OFF else "human"

    # -- subagents --------------------------------------------------------------------------------------------------

    def started(self, child: str) -> None:
        """A subagent of this conversation runs."""
        if child not in self.children:
            self.children.add(child)
            self.expects = max(0, self.expects - 1)

    def joined(self, child: str) -> None:
        """A subagent has given its answer."""
        if child in self.children:
            self.children.discard(child)
            self.session.join(child)
            if not self.children:
                self.resume_soon(0.05)

    def _tell_forks(self, spawned: Sequence[Mapping[str, Any]]) -> None:
        forks = sum(1 for args in spawned if args.get("subagent_type") == "fork")
        if forks and self.prompt is not None:
            whole = Shared(messages=len(self.prompt.messages), tokens=self.prompt_tokens or None)
            self.session.emit(AgentFork, count=forks, when_s=0.1, shared=whole, rides=False)

    def _tell_shared(self, parent: Node, prompt: Prompt) -> None:
        """Says how much of the parent's prompt this subagent starts with, where it is anything at all."""
        if parent.prompt is None or parent.prompt.head != prompt.head:
            return
        same = shared(parent.prompt, prompt)
        size = Shared(messages=same, tokens=parent.tokens_of(same) or None)
        parent.session.emit(AgentFork, child=self.name, count=1, when_s=0.0, shared=size)

    # -- compaction -------------------------------------------------------------------------------------------------

    def compaction_began(self) -> None:
        """The summary of this conversation is being asked for."""
        if not self.compacting:
            self.compacting = True
            self.session.emit(AgentCompaction, phase="begin")

    def check_compaction(self, prompt: Prompt, window: str | None, continued: bool) -> None:
        """Whether this turn's prompt is what a compaction left: another window, a summary's opening, or simply short."""
        old = self.prompt
        renumbered = window is not None and self.window is not None and window != self.window
        opened = continued and not self.continued
        self.continued = continued
        if old is None:
            return
        same = shared(old, prompt)
        rewritten = same < len(old.messages)
        shrunk = rewritten and old.head == prompt.head and prompt.size < COMPACTED_SHARE * old.size
        if renumbered or (opened and rewritten) or shrunk or (self.compacting and rewritten):
            self.compacting = False
            keep = Shared(messages=same, tokens=self.tokens_of(same) if old.head == prompt.head else 0)
            self.session.emit(AgentCompaction, phase="commit", keep=keep)
        elif self.compacting:
            self.compacting = False
            self.session.emit(AgentCompaction, phase="abort")

    def tokens_of(self, messages: int) -> int:
        """About how many tokens the head and the first ``messages`` messages of the last prompt are."""
        if self.prompt is None or not self.prompt.size:
            return 0
        part = self.prompt.head_chars + sum(self.prompt.chars[:messages])
        return int(self.prompt_tokens * part / self.prompt.size)
