"""From requests and answers to hints. ``Tracker`` owns the session tree that the proxy has seen.

A request passes in two steps: ``open`` names its session before it is forwarded, from headers alone where they tell, so
that it is not held up; ``study`` reads its body while the server works on the answer. Whatever fails here is counted and
otherwise ignored: the agent's call never notices.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tenuto.answers import read_ending
from tenuto.client import Client
from tenuto.headers import HINTS_HEADER, HeaderError, Identity, encode_hints, write_identity
from tenuto.proxy.bodies import Bodies, Body, Reading, decoded
from tenuto.proxy.chains import Chains, Prompt, prompt_of
from tenuto.proxy.node import Node
from tenuto.proxy.reading import (
    Content,
    client_of,
    dialect,
    identity_of_body,
    identity_of_headers,
    read_content,
    window_of,
)
from tenuto.wire import Envelope

NODES_MAX = 1024
CLIENTS_MAX = 64
# Clients that hold one conversation a process: a rewritten history is still that conversation.
ONE_CONVERSATION = frozenset({"qwen", "gemini", "pi"})

_log = logging.getLogger("tenuto.proxy")


@dataclass(frozen=True, slots=True)
class Guess:
    """Whose request this looks like from its beginning, None where that makes no difference to its head; the headers to add,
    and the hints among them."""

    node: Node | None = None
    extra: dict[str, str] = field(default_factory=dict)
    hints: Envelope | None = None


@dataclass(slots=True)
class Ticket:
    """One generation request on its way. ``body``: as it will be sent; empty when it is too big to be read."""

    form: str
    path: str
    headers: Mapping[str, str]
    body: Body
    scope: str
    client: str | None
    node: Node | None = None
    reading: Reading | None = None
    content: Content | None = None
    prompt: Prompt | None = None
    studied: bool = False
    counts: bool = False
    extra: dict[str, str] = field(default_factory=dict)


class Tracker:
    """``connect``: makes the SDK client that delivers hints for an API key. ``carry``: the server behind understands
    identity and hint headers of ours. ``one_run``: everything comes from one agent process, which was given ``run_key``."""

    def __init__(
        self,
        connect: Callable[[str | None], Client],
        *,
        carry: bool = True,
        one_run: bool = False,
        run_key: str | None = None,
    ) -> None:
        self.errors = 0
        self.nodes: OrderedDict[tuple[str, str], Node] = OrderedDict()
        self._connect = connect
        self._clients: OrderedDict[str, Client] = OrderedDict()
        self._carry = carry
        self._one_run = one_run
        self._run_key = run_key
        self.attended = True  # a person watches, as far as is known
        self.agent: str | None = None  # the agent of this run: what a session is called whose client does not say
        self._chains = Chains()
        self._bodies = Bodies()
        self._speakers: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._token = secrets.token_hex(3)
        self._made = 0

    # -- requests ---------------------------------------------------------------------------------------------------

    def guess(self, path: str, headers: Mapping[str, str], start: memoryview, run: str = "") -> Guess | None:
        """Whose request this is, as far as its headers or the beginning of its body tell; None when they do not. ``open``
        must follow."""
        form = dialect(path)
        if form is None or not self._carry:
            return Guess()
        with self._guard():
            scope = self._scope(headers, run)
            name = identity_of_headers(headers).session or self._bodies.begun(scope, form, start)
            node = self.nodes.get((scope, name)) if name is not None else None
            if node is not None and HINTS_HEADER not in headers and (scope, node.name) not in self._speakers:
                return Guess(node, *self._extra(node))
        return None

    def open(
        self, path: str, headers: Mapping[str, str], body: Body, run: str = "", guess: Guess | None = None
    ) -> Ticket | None:
        """Names the session of a request; None when it is no generation. ``run``: the part of the proxy's URL that tells
        one client from another. ``guess``: what was thought of its beginning."""
        form = dialect(path)
        if form is None:
            return None
        ticket = Ticket(form, path, headers, body, self._scope(headers, run), client_of(headers))
        with self._guard():
            self._name(ticket)
            right = guess is not None and guess.node is not None and guess.node is ticket.node
            if guess is not None and right:
                ticket.extra = guess.extra
            elif ticket.node is not None and self._carry:
                ticket.extra, _ = self._extra(ticket.node)
            if guess is not None and not right:
                self._lose(guess)
        return ticket

    def study(self, ticket: Ticket) -> None:
        """Reads a request that has been forwarded; a second call does nothing."""
        if ticket.studied:
            return
        ticket.studied = True
        with self._guard():
            content = self._content(ticket)
            node = ticket.node
            if node is None or content is None:
                if node is not None:
                    node.end_pause()
                return
            prompt = ticket.prompt or self._prompt(ticket, content)
            if content.kind in ("prewarm", "side") or (content.kind == "turn" and node.beside(content.tools, prompt)):
                return  # it shares the session's name, but is no turn of it
            if ticket.reading is not None:
                self._bodies.keep(ticket.scope, node.name, ticket.reading)
            window = window_of(ticket.headers)
            ticket.counts = True
            if node.parent is not None:
                node.parent.started(node.name)
            if content.kind == "compaction":
                node.compaction_began()
                node.running += 1
                node.end_pause()
                return
            node.check_compaction(prompt, window, content.continued)
            node.turn(content.model, content.tools, prompt, window)
            if node.inferred:
                self._chains.put(ticket.scope, node.name, prompt)

    def answered(self, ticket: Ticket, data: bytes, *, streamed: bool) -> None:
        """Reads an answer that has been passed on in full."""
        node = ticket.node
        if node is None or not ticket.counts:
            return
        with self._guard():
            ticket.counts = False
            node.running -= 1
            ending = read_ending(ticket.form, data, streamed=streamed)
            if ending is not None and not (ticket.content is not None and ticket.content.kind == "compaction"):
                node.answered(ending)

    def failed(self, ticket: Ticket) -> None:
        """The request failed or its client left: no pause begins on that, and the server keeps the prefix."""
        if ticket.counts and ticket.node is not None:
            ticket.counts = False
            ticket.node.running -= 1

    # -- the tree ---------------------------------------------------------------------------------------------------

    def node(self, scope: str, name: str) -> Node | None:
        """A conversation by its id."""
        return self.nodes.get((scope, name))

    def make(
        self, scope: str, key: str | None, identity: Identity, client: str | None, *, agent: str | None = None
    ) -> Node:
        """The conversation that ``identity`` names, which may be new."""
        name = identity.session or ""
        known = self.nodes.get((scope, name))
        if known is not None:
            self.nodes.move_to_end((scope, name))
            return known
        parent = self.nodes.get((scope, identity.parent)) if identity.parent else None
        kind = agent or ("subagent" if identity.parent else client or self.agent)
        session = self._client(scope, key).session(
            name, agent=kind, attended=self.attended and not identity.parent, parent=identity.parent
        )
        node = Node(session, client=client, scope=scope, parent=parent)
        self.nodes[scope, name] = node
        while len(self.nodes) > NODES_MAX:
            self.nodes.popitem(last=False)[1].end_pause(learn=False)
        return node

    def announce(self, name: str) -> Node | None:
        """A conversation that resumes in the agent of this run and has not spoken yet."""
        if not self._one_run:
            return None  # whose it is shows only when it speaks
        headers = {"authorization": f"Bearer {self._run_key}"} if self._run_key else {}
        return self.make(self._scope(headers, ""), self._run_key, Identity(name), None)

    def end(self, node: Node, keep_s: float | None) -> None:
        """The conversation is over, with all its subagents."""
        with self._guard():
            node.end_pause(learn=False)
            node.session.end(keep_s)
            self._chains.drop(node.name)
            self._bodies.drop(node.scope, node.name)
            self.nodes.pop((node.scope, node.name), None)
            for child in [n for n in self.nodes.values() if n.parent is node]:
                self.end(child, None)

    def close(self, keep_s: float | None = None, *, end: bool = True) -> None:
        """Ends every session where ``end``, delivers what waits, saves the pause history."""
        for node in list(self.nodes.values()):
            if end and node.parent is None and not node.session.closed:
                self.end(node, keep_s)
        for client in self._clients.values():
            with self._guard():
                client.close()
        self._clients.clear()

    def view(self) -> list[dict[str, Any]]:
        """What is known of every conversation, without any text of it."""
        return [
            {
                "session": node.name,
                "parent": node.session.parent,
                "agent": node.session.agent,
                "model": node.model,
                "turns": node.turns,
                "running": node.running,
                "pause": node.pause.kind if node.pause is not None else None,
                "children": sorted(node.children),
            }
            for node in self.nodes.values()
        ]

    def hint_counts(self) -> dict[str, int]:
        """Hints sent, carried on requests, and lost, over all API keys."""
        stats = [client.hints.stats for client in self._clients.values()]
        names = ("sent", "carried", "failed", "dropped")
        return {name: sum(getattr(s, name) for s in stats) for name in names}

    # -- inside -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except Exception:  # hints fail open: whatever is wrong here, the agent's call goes on
            self.errors += 1
            _log.debug("inference failed", exc_info=True)

    def _scope(self, headers: Mapping[str, str], run: str) -> str:
        """One tenant's clients never meet another's: their API key is part of every name."""
        key = api_key(headers) or ""
        return f"{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}/{run}"

    def _client(self, scope: str, key: str | None) -> Client:
        tenant = scope.partition("/")[0]
        client = self._clients.get(tenant)
        if client is None:
            client = self._clients[tenant] = self._connect(key)
            while len(self._clients) > CLIENTS_MAX:
                self._clients.popitem(last=False)[1].close()
        self._clients.move_to_end(tenant)
        return client

    def _content(self, ticket: Ticket) -> Content | None:
        if ticket.content is None and ticket.body:
            data = decoded(ticket.body, ticket.headers.get("content-encoding", ""))
            ticket.reading = self._bodies.read(ticket.scope, ticket.form, data) if data is not None else None
            if ticket.reading is not None:
                ticket.content = read_content(ticket.reading, ticket.headers, ticket.client, ticket.path)
        return ticket.content

    def _prompt(self, ticket: Ticket, content: Content) -> Prompt:
        assert ticket.reading is not None
        return prompt_of(ticket.reading.items, content.tools, content.system, len(ticket.reading.data))

    def _name(self, ticket: Ticket) -> None:
        identity = identity_of_headers(ticket.headers)
        if identity.session is None and not ticket.headers.get("content-encoding"):
            # One that has grown has the name that it had: what it says now can be read when it has been forwarded.
            name = self._bodies.grown(ticket.scope, ticket.form, ticket.body)
            identity = Identity(name if (ticket.scope, name) in self.nodes else None)
        if identity.session is None and ticket.body:
            if self._content(ticket) is None or ticket.reading is None:
                return
            identity = identity_of_body(ticket.reading.frame)
        key = api_key(ticket.headers)
        if self._speaks_for_itself(ticket, identity):
            return
        if identity.session is not None:
            ticket.node = self.make(ticket.scope, key, identity, ticket.client)
        elif ticket.content is not None and ticket.content.kind != "side":
            ticket.prompt = self._prompt(ticket, ticket.content)
            ticket.node = self._infer(ticket, ticket.prompt, key)

    def _speaks_for_itself(self, ticket: Ticket, identity: Identity) -> bool:
        """Whether a session's hints come from its own client, as those of Tenuto's SDK do: nothing is added to them."""
        speaker = (ticket.scope, identity.session or "")
        if HINTS_HEADER in ticket.headers:
            self._speakers[speaker] = None
            while len(self._speakers) > NODES_MAX:
                self._speakers.popitem(last=False)
        return speaker in self._speakers

    def _infer(self, ticket: Ticket, prompt: Prompt, key: str | None) -> Node:
        """The conversation of a request that names none: it continues a known one, was spawned by one, or is new."""
        scope = ticket.scope
        here = [n for n in self.nodes.values() if n.scope == scope and n.inferred]
        found = self._chains.find(scope, prompt)
        parent = next((n for n in reversed(here) if n.expects > 0), None)
        if found is None and parent is None and self._one_run and ticket.client in ONE_CONVERSATION:
            idle = [n.name for n in here if n.parent is None and not n.running]
            found = self._chains.idle_like(scope, prompt, idle)
        if found is not None and (scope, found) in self.nodes:
            return self.make(scope, key, Identity(found), ticket.client)
        self._made += 1
        if parent is not None:
            label = parent.expected_names.pop(0) if parent.expected_names else f"agent-{self._made}"
            identity = Identity(f"{parent.name}/{label}", parent.name)
        else:
            identity = Identity(f"{ticket.client or 'agent'}-{self._token}-{self._made}")
        node = self.make(scope, key, identity, ticket.client)
        node.inferred = True
        return node

    def _extra(self, node: Node) -> tuple[dict[str, str], Envelope | None]:
        """Headers to add: who speaks, and the hints that wait for this session."""
        headers = write_identity(node.name, node.session.parent)
        sender = node.session.services.sender
        envelope = sender.take(node.name, node.session.parent) if sender is not None else None
        if sender is not None and envelope is not None:
            try:
                headers[HINTS_HEADER] = encode_hints(envelope)
            except HeaderError:
                sender.lose_carried(envelope)
                envelope = None
        return headers, envelope

    def _lose(self, guess: Guess) -> None:
        """Hints went ahead with a request that was somebody else's."""
        sender = guess.node.session.services.sender if guess.node is not None else None
        if sender is not None and guess.hints is not None:
            sender.lose_carried(guess.hints)


def api_key(headers: Mapping[str, str]) -> str | None:
    """The key that a request carries, in either form."""
    bearer = headers.get("authorization", "")
    if bearer[:7].lower() == "bearer ":
        return bearer[7:].strip() or None
    return headers.get("x-api-key") or headers.get("x-goog-api-key") or None
