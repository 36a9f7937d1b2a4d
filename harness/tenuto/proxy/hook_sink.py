"""From hook events to the session tree: what only the client knows, added to what traffic tells. ``HookSink`` owns the
names by which hooks know sessions that name themselves nowhere on the wire.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from tenuto.proxy.hook_events import HookEvent, Moment, read_hook
from tenuto.proxy.json_text import parse
from tenuto.proxy.node import Node
from tenuto.proxy.tracker import Tracker
from tenuto.wire import AgentResumeSoon

ALIASES_MAX = 1024
# The request follows the event that announces it after this long (seen with several clients: 70 to 300 ms).
PROMPT_TO_REQUEST_S = 0.2
RESUME_TO_REQUEST_S = 0.4


class HookSink:
    """``keep_s``: how long KV is kept after a session that can be resumed has ended."""

    def __init__(self, tracker: Tracker, *, keep_s: float | None, one_run: bool = False) -> None:
        self.seen: dict[str, int] = {}
        self._tracker = tracker
        self._keep_s = keep_s
        self._one_run = one_run
        self._aliases: OrderedDict[str, Node] = OrderedDict()
        self._actions: dict[Moment, Callable[[HookEvent, Node], None]] = {
            "prompt": self._prompt,
            "tool_start": self._tool_start,
            "tool_end": self._tool_end,
            "permission": lambda event, node: node.begin_pause("permission"),
            "stop": self._stop,
            "subagent_start": self._subagent_start,
            "subagent_stop": self._subagent_stop,
            "compact_start": lambda event, node: node.compaction_began(),
            "session_end": self._session_end,
        }

    def __call__(self, path: str, body: bytes) -> None:
        """Takes one hook call. Never raises."""
        try:
            payload = parse(body)
            event = read_hook(payload) if isinstance(payload, dict) else None
            if event is not None:
                self.take(event)
        except Exception:  # a hook must never hurt the agent
            self._tracker.errors += 1

    def take(self, event: HookEvent) -> None:
        """Applies one event."""
        self.seen[event.moment] = self.seen.get(event.moment, 0) + 1
        if event.moment == "session_start":
            self._session_start(event)
            return
        node = self._find(event)
        action = self._actions.get(event.moment)
        if node is not None and action is not None:
            action(event, node)

    # -- which conversation -----------------------------------------------------------------------------------------

    def _find(self, event: HookEvent) -> Node | None:
        """The conversation that an event speaks of: its session, or the subagent of it that it names."""
        about_child = event.moment in ("tool_start", "tool_end", "permission") and event.agent is not None
        root = self._root(event)
        if root is None or not about_child:
            return root
        return self._tracker.node(root.scope, f"{root.name}/{event.agent}")

    def _root(self, event: HookEvent) -> Node | None:
        nodes = self._tracker.nodes.values()
        named = next((n for n in nodes if n.name == event.session), None)
        if named is not None:
            return named
        known = self._aliases.get(event.session)
        if known is not None and not known.session.closed:
            return known
        # Not a name of the wire: a tool call that both know joins them, or there is only one it can be.
        inferred = [n for n in nodes if n.inferred and n.parent is None]
        joined = [n for n in inferred if not n.calls.isdisjoint(event.calls)]
        if not joined and self._one_run:
            taken = set(map(id, self._aliases.values()))
            free = [n for n in inferred if id(n) not in taken]
            joined = free if len(free) == 1 else []
        if not joined:
            return None
        self._aliases[event.session] = joined[-1]
        while len(self._aliases) > ALIASES_MAX:
            self._aliases.popitem(last=False)
        return joined[-1]

    # -- moments ----------------------------------------------------------------------------------------------------

    def _session_start(self, event: HookEvent) -> None:
        """A known conversation that resumes may be fetched before its first request comes."""
        if event.source != "resume":
            return
        node = self._root(event)
        if node is None and event.gap_s is not None:
            node = self._tracker.announce(event.session)  # who says how long it slept also uses this name on the wire
        if node is not None:
            node.session.emit(AgentResumeSoon, in_s=RESUME_TO_REQUEST_S, rides=False)

    def _prompt(self, event: HookEvent, node: Node) -> None:
        node.resume_soon(PROMPT_TO_REQUEST_S)

    def _tool_start(self, event: HookEvent, node: Node) -> None:
        node.outstanding.update(event.calls)
        if node.pause is None and not node.running:
            node.begin_pause("tool", [(event.tool or "tool", event.args)])

    def _tool_end(self, event: HookEvent, node: Node) -> None:
        node.outstanding.difference_update(event.calls)
        if not node.outstanding:
            node.resume_soon(0.05)

    def _stop(self, event: HookEvent, node: Node) -> None:
        if node.running:
            return
        if event.waits_for == "nothing":
            node.children.clear()
        if event.waits_for in ("subagent", "background"):
            node.begin_pause(event.waits_for)
        else:
            node.begin_pause("subagent" if node.children else "human")

    def _subagent_start(self, event: HookEvent, node: Node) -> None:
        if event.agent is None:
            return
        if node.inferred:  # the child will speak without a name: keep this one for it
            if event.agent not in node.expected_names:
                node.expected_names.append(event.agent)
            node.expects = max(node.expects, len(node.expected_names))
        else:
            node.started(f"{node.name}/{event.agent}")

    def _subagent_stop(self, event: HookEvent, node: Node) -> None:
        if event.agent is not None:
            node.joined(f"{node.name}/{event.agent}")
            if event.agent in node.expected_names:
                node.expected_names.remove(event.agent)
                node.expects = max(0, node.expects - 1)

    def _session_end(self, event: HookEvent, node: Node) -> None:
        self._aliases.pop(event.session, None)
        self._tracker.end(node, None if event.source == "clear" else self._keep_s)

    def view(self) -> dict[str, Any]:
        """How many events of each kind came."""
        return dict(self.seen)
