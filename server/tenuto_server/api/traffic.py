"""What the requests of a session tell together: what kind each is, who started whom, what pause begins.

``Traffic`` owns one record per session (bounded; the one unused for longest is forgotten), the outlines of recent answers
and the figures by kind of request. It is the server's own knowledge, without any hint: client headers where there are some, else the prompts.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tenuto.headers import Identity
from tenuto.wire import PauseKind
from tenuto_server.api.answer import Answer, Call, program_of
from tenuto_server.api.clues import ASKS, SPAWNS, WAITS, Clues, Kind, bare_name
from tenuto_server.api.conversation import Conversation
from tenuto_server.api.outline import Change, Outline, compare, shared_messages

SESSIONS_MAX = 2048
ANSWERS_MAX = 512
_SPAWNS_MAX = 64
_SPAWN_S = 600.0
_CHILD_COMES_S = 10.0
_SPAWN_TEXT_MIN = 12
# Calls that a pause of another kind than a tool's follows, in the order of precedence.
_WAITED_FOR: tuple[tuple[frozenset[str], PauseKind], ...] = ((ASKS, "permission"), (SPAWNS | WAITS, "subagent"))
_SHRUNK = 0.6  # a prompt below this share of the last one was compacted, when all else is equal


@dataclass(slots=True)
class _Record:
    """A session's last request. ``over``: its answer called nothing. ``child_due``: a spawned child is to show up by then."""

    outline: Outline
    clues: Clues
    parent: str | None = None
    running: int = 0
    over: bool = False
    child_due: float = 0.0
    children: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Arrival:
    """A request as it was understood. ``kind`` side: it belongs to a session without being one of its turns. ``inferred``:
    what was concluded from traffic, by name. ``behind_side``: it shows that its session's last request was a side call."""

    kind: Kind
    identity: Identity
    outline: Outline
    clues: Clues
    change: Change | None = None
    inferred: list[str] = field(default_factory=list)
    behind_side: bool = False


@dataclass(frozen=True, slots=True)
class Pause:
    """What begins when an answer ends."""

    kind: PauseKind
    tool: str | None = None
    program: str | None = None


class Traffic:
    """See the module. For one event loop; ``clock`` in seconds."""

    def __init__(self, sessions_max: int = SESSIONS_MAX, clock: Callable[[], float] = time.monotonic) -> None:
        self._sessions_max, self._clock = sessions_max, clock
        self._records: OrderedDict[tuple[str, str], _Record] = OrderedDict()
        self._answers: OrderedDict[tuple[str, str], Outline] = OrderedDict()
        self._spawns: dict[str, deque[tuple[float, str, str]]] = {}
        self.counts: Counter[str] = Counter()
        self.prompt_tokens: Counter[str] = Counter()
        self.cached_tokens: Counter[str] = Counter()

    @property
    def sessions(self) -> int:
        """Records held."""
        return len(self._records)

    def arrive(self, tenant: str, identity: Identity, clues: Clues, outline: Outline, talk: Conversation) -> Arrival:
        """A request has come; it is not submitted yet."""
        arrival = Arrival(clues.kind, identity, outline, clues)
        record = self._records.get((tenant, identity.session)) if identity.session is not None else None
        if clues.kind == "turn" and _is_side_call(record, identity, clues, outline):
            arrival.kind = "side"
            self._note(arrival, "side_call")
        elif record is not None:
            arrival.behind_side = _was_side_call(record.outline, outline)
        elif identity.parent is None:
            parent = self._spawned_by(tenant, talk)
            if parent is not None and parent != identity.session:
                arrival.identity = Identity(identity.session, parent, identity.final)
                self._note(arrival, "spawned")
        return arrival

    def started(self, tenant: str, session: str, request_id: str, arrival: Arrival) -> None:
        """The turn was admitted under this session's name: fills in what changed since its last request."""
        self._keep_outline(tenant, request_id, arrival.outline)
        if arrival.kind == "side":
            return
        key, outline = (tenant, session), arrival.outline
        record = self._records.pop(key, None)
        if record is None:
            record = _Record(outline, arrival.clues)
            if arrival.identity.parent is not None:
                self._note(arrival, "subagent")
        elif _was_side_call(record.outline, outline):
            # A session may begin with a call that is none of its turns, such as one for a title.
            self._note(arrival, "side_call_before")
        else:
            arrival.change = compare(record.outline, outline)
            if _compacted(record, arrival):
                self._note(arrival, "compaction")
            if arrival.change is not None and arrival.change.part == "model":
                self._note(arrival, "model_switch")
        if arrival.kind == "compaction":
            self._note(arrival, "compaction_request")
        if arrival.kind == "prewarm":
            self._note(arrival, "prewarm")
        parent = arrival.identity.parent
        if parent is not None and record.parent is None and (of := self._records.get((tenant, parent))) is not None:
            record.parent, of.child_due = parent, 0.0
            of.children.add(session)
        record.outline, record.clues, record.over = outline, arrival.clues, False
        record.running += arrival.kind != "prewarm"
        self._records[key] = record
        while len(self._records) > self._sessions_max:
            self._records.popitem(last=False)

    def finished(self, tenant: str, session: str) -> bool:
        """Whether this is a subagent that has given its answer: nobody is expected to come back to it."""
        record = self._records.get((tenant, session))
        if record is None or record.parent is None or record.running or not record.over:
            return False
        return not self._child_at_work(tenant, record)

    def account(self, arrival: Arrival, prompt_tokens: int, cached_tokens: int) -> None:
        """Adds an answered request to the figures of its kind; a subagent's turns are a kind of their own."""
        kind = "subagent" if arrival.kind == "turn" and arrival.identity.parent is not None else arrival.kind
        self.prompt_tokens[kind] += prompt_tokens
        self.cached_tokens[kind] += cached_tokens

    def left(self, tenant: str, session: str, arrival: Arrival) -> None:
        """The turn is over, whether it was answered or not."""
        record = self._records.get((tenant, session))
        if record is not None and arrival.kind not in ("side", "prewarm"):
            record.running = max(0, record.running - 1)

    def answered(self, tenant: str, session: str, arrival: Arrival, answer: Answer, cut: bool = False) -> Pause | None:
        """The pause that begins when this answer is complete; None where no turn of the session has ended, and where the
        answer was ``cut`` off by its limit, which tells nothing."""
        record = self._records.get((tenant, session))
        if record is None or arrival.kind in ("side", "prewarm"):
            return None
        record.over = not answer.calls
        if answer.calls:
            return self._after_calls(tenant, session, record, answer.calls)
        if cut:
            return None
        if arrival.kind == "compaction":
            # What follows is the client's own next request, at once: its history is filed under this name.
            return Pause("background", "compaction")
        if self._child_at_work(tenant, record):
            return Pause("subagent", "background")
        return Pause("subagent", "finished") if record.parent is not None else Pause("human")

    def _after_calls(self, tenant: str, session: str, record: _Record, calls: list[Call]) -> Pause:
        names = [bare_name(call.name) for call in calls]
        for call, name in zip(calls, names, strict=True):
            if name in SPAWNS:
                record.child_due = self._clock() + _CHILD_COMES_S
                self._remember_spawn(tenant, session, call.parsed())
        for known, kind in _WAITED_FOR:
            for call, name in zip(calls, names, strict=True):
                if name in known:
                    return Pause(kind, call.name[:256])
        return Pause("tool", calls[0].name[:256], program_of(calls[0].arguments))

    def _child_at_work(self, tenant: str, record: _Record) -> bool:
        if record.child_due > self._clock():
            return True
        children = (self._records.get((tenant, child)) for child in record.children)
        return any(child is not None and not child.over for child in children)

    # ---- subagents without headers -------------------------------------------------------------------------------

    def _remember_spawn(self, tenant: str, session: str, arguments: Mapping[str, Any]) -> None:
        texts = [value for value in arguments.values() if isinstance(value, str)]
        text = max(texts, key=len, default="").strip()
        if len(text) >= _SPAWN_TEXT_MIN:
            self._spawns.setdefault(tenant, deque(maxlen=_SPAWNS_MAX)).append((self._clock(), session, text))

    def _spawned_by(self, tenant: str, talk: Conversation) -> str | None:
        """The session whose call asked for what this conversation begins with."""
        recent = [spawn for spawn in self._spawns.get(tenant, ()) if self._clock() - spawn[0] < _SPAWN_S]
        if not recent or any(message["role"] == "assistant" for message in talk.messages):
            return None
        said = [message["content"] for message in talk.messages if message["role"] == "user"]
        return next(
            (session for _, session, text in reversed(recent) if any(text in content for content in said)), None
        )

    # ---- comparisons that clients ask for --------------------------------------------------------------------------

    def _keep_outline(self, tenant: str, request_id: str, outline: Outline) -> None:
        self._answers[tenant, request_id] = outline
        while len(self._answers) > ANSWERS_MAX:
            self._answers.popitem(last=False)

    def outline_of(self, tenant: str, request_id: str) -> Outline | None:
        """The outline of the request that was answered under this id."""
        return self._answers.get((tenant, request_id))

    def _note(self, arrival: Arrival, what: str) -> None:
        arrival.inferred.append(what)
        self.counts[what] += 1


def _is_side_call(record: _Record | None, identity: Identity, clues: Clues, new: Outline) -> bool:
    """Whether a request is no turn of its session but asks something beside it: for a title, a topic, a summary.

    Before the first turn only the client and its words tell. Behind a turn with tools it is what comes without any: from a
    client that always has some in any case, from others unless it goes on from that turn's answer or, under the same system
    prompt, from an earlier point. So is what another model is asked under another system prompt, with no message in common."""
    if record is None:
        asks = clues.toolless or (clues.titles and identity.session is not None)
        return asks and clues.opening and identity.parent is None
    last = record.outline
    if not last.tools:
        return False
    same = shared_messages(last, new)
    if new.tools:
        return not same and new.model != last.model and new.system != last.system
    if clues.toolless:
        return True
    answered = same == len(last.messages) < len(new.messages) and new.messages[same][1] == "assistant"
    return not answered and (new.system != last.system or not same)


def _was_side_call(last: Outline, new: Outline) -> bool:
    """The other way round: the last request had no tools, this one has, and nothing of that one is in it."""
    return not last.tools and bool(new.tools) and last.system != new.system and not shared_messages(last, new)


def _compacted(record: _Record, arrival: Arrival) -> bool:
    """Whether this request begins a compacted context: by the client's own words, its window's number, or the generic
    rule (everything equal but a history that was cut short and begins otherwise)."""
    old, new = record.outline, arrival.outline
    if arrival.kind == "compaction":
        return False
    if arrival.clues.continues_summary and not record.clues.continues_summary:
        return True
    if arrival.clues.window is not None and record.clues.window is not None:
        return arrival.clues.window != record.clues.window
    change = arrival.change
    shrunk = new.tokens < _SHRUNK * old.tokens and len(new.messages) < len(old.messages)
    return change is not None and change.part == "messages" and not change.shorter and shrunk
