"""The wire protocol: hint envelope, actions, receipts, session views, and what an answer tells about its cache.

Everything here is a frozen value. Unknown fields are ignored on read, unknown action types parse to ``None`` and earn a
``rejected`` receipt, durations are seconds, and ``seq`` orders the hints of one session so that late or duplicate ones
are harmless. No prompt text and no secret belongs in any of these objects.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

PROTOCOL_VERSION = "0.1"

PauseKind = Literal["tool", "human", "subagent", "permission", "background", "unknown"]
Tier = Literal["device", "host", "disk"]
MissLabel = Literal["cold", "mutation", "retention", "capacity"]
Outcome = Literal["accepted", "clipped", "deferred", "rejected", "missing"]

Seconds = Annotated[float, Field(ge=0.0, le=31 * 86400.0, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Count = Annotated[int, Field(ge=0, le=1 << 40)]
Priority = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Children = Annotated[int, Field(ge=1, le=1024)]


class Wire(BaseModel):
    """Base of every wire object: frozen, unknown fields ignored on read."""

    # A validator is compiled when it is first used: all of them together take longer than everything else at start.
    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


class Forecast(Wire):
    """A forecast of a pause: quantiles of its length given that it ends, and how likely it is to end at all.

    ``p50_s``/``p90_s``: seconds. ``p_return``: probability that the session ever returns. ``confidence``: the sender's
    own weight in 0..1; the server calibrates regardless.
    """

    p50_s: Seconds
    p90_s: Seconds | None = None
    p_return: Probability | None = None
    confidence: Probability | None = None


class Shared(Wire):
    """How much of a prompt is meant: the first ``messages`` messages, ``tokens`` tokens, or a client fingerprint."""

    messages: Count | None = None
    tokens: Count | None = None
    fingerprint: Name | None = None


class Target(Wire):
    """What a direct ``kv.*`` command addresses: a session (default: the action's own), a token range of it, or block
    hashes (hex)."""

    session: Name | None = None
    start: Count | None = None
    end: Count | None = None
    block_hashes: Annotated[tuple[Name, ...], Field(max_length=4096)] | None = None


class Action(Wire):
    """Fields that every action carries. ``at_s``: it happened this many seconds ago."""

    TYPE: ClassVar[str] = ""

    session: Name
    seq: Count = 0
    at_s: Seconds = 0.0


class AgentSession(Action):
    """Opens or describes a session. ``attended=False`` lets the server trade latency for throughput."""

    TYPE: ClassVar[str] = "agent.session"
    parent: Name | None = None
    agent: Name | None = None
    model: Name | None = None
    priority: Priority | None = None
    attended: bool | None = None


class AgentPause(Action):
    """A pause began."""

    TYPE: ClassVar[str] = "agent.pause"
    kind: PauseKind
    tool: Name | None = None
    program: Name | None = None
    forecast: Forecast | None = None


class AgentPauseUpdate(Action):
    """Sharper knowledge while a pause runs. ``progress``: fraction done, 0..1."""

    TYPE: ClassVar[str] = "agent.pause_update"
    forecast: Forecast | None = None
    progress: Probability | None = None


class AgentResumeSoon(Action):
    """The next turn is about to come, in about ``in_s`` seconds: prefetch."""

    TYPE: ClassVar[str] = "agent.resume_soon"
    in_s: Seconds = 0.0


class AgentKeepalive(Action):
    """The harness is alive and still wants its KV, for the next ``for_s`` seconds."""

    TYPE: ClassVar[str] = "agent.keepalive"
    for_s: Seconds


class AgentFork(Action):
    """Subagents will start on this session's prefix: keep it, warm it."""

    TYPE: ClassVar[str] = "agent.fork"
    child: Name | None = None
    children: tuple[Name, ...] = Field(default=(), max_length=1024)
    shared: Shared | None = None
    count: Children | None = None
    when_s: Seconds | None = None


class AgentJoin(Action):
    """A subagent ended; its private suffix is worthless unless ``keep``."""

    TYPE: ClassVar[str] = "agent.join"
    child: Name
    keep: bool = False


class AgentCompaction(Action):
    """``begin``: keep the old prefix for the summary call; ``commit``: demote what is superseded, warm the new one."""

    TYPE: ClassVar[str] = "agent.compaction"
    phase: Literal["begin", "commit", "abort"]
    keep: Shared | None = None
    expect_tokens: Count | None = None
    request: dict[str, Any] | None = None


class AgentModelSwitch(Action):
    """The next turns use another model; ``back_in_s``: expected return to this one."""

    TYPE: ClassVar[str] = "agent.model_switch"
    model: Name
    back_in_s: Seconds | None = None


class AgentEnd(Action):
    """The session is over: release its KV, or keep it ``keep_s`` seconds for a possible resume."""

    TYPE: ClassVar[str] = "agent.end"
    keep_s: Seconds | None = None


class KvCommand(Action):
    """A direct command for orchestrators: soft, budgeted, expiring. There is no hard pin."""

    target: Target = Field(default_factory=Target)
    priority: Priority | None = None
    duration_s: Seconds | None = None
    tier: Tier | None = None


class KvRetain(KvCommand):
    TYPE: ClassVar[str] = "kv.retain"


class KvDemote(KvCommand):
    TYPE: ClassVar[str] = "kv.demote"


class KvRelease(KvCommand):
    TYPE: ClassVar[str] = "kv.release"


class KvPrefetch(KvCommand):
    TYPE: ClassVar[str] = "kv.prefetch"


AnyAction: TypeAlias = (
    AgentSession
    | AgentPause
    | AgentPauseUpdate
    | AgentResumeSoon
    | AgentKeepalive
    | AgentFork
    | AgentJoin
    | AgentCompaction
    | AgentModelSwitch
    | AgentEnd
    | KvRetain
    | KvDemote
    | KvRelease
    | KvPrefetch
)

ACTIONS: dict[str, type[AnyAction]] = {
    cls.TYPE: cls
    for cls in (
        AgentSession,
        AgentPause,
        AgentPauseUpdate,
        AgentResumeSoon,
        AgentKeepalive,
        AgentFork,
        AgentJoin,
        AgentCompaction,
        AgentModelSwitch,
        AgentEnd,
        KvRetain,
        KvDemote,
        KvRelease,
        KvPrefetch,
    )
}


class EnvelopeAction(Wire):
    """One action as it travels: its type names the model of ``payload``."""

    action_id: Name
    action_type: Name
    action_version: str = "1.0"
    payload: dict[str, Any] = Field(default_factory=dict)

    def parse(self) -> AnyAction | None:
        """The typed action; ``None`` for a type or major version that this side does not know.

        Raises ``pydantic.ValidationError`` when the payload does not fit its type.
        """
        model = ACTIONS.get(self.action_type)
        if model is None or self.action_version.split(".")[0] != "1":
            return None
        return model.model_validate(self.payload)


class Envelope(Wire):
    """A batch of actions, the shape that other engines' KV-hint envelopes share."""

    protocol_version: str = PROTOCOL_VERSION
    message_id: Name = Field(default_factory=lambda: secrets.token_hex(8))
    actions: tuple[EnvelopeAction, ...] = ()

    @classmethod
    def of(cls, actions: Iterable[AnyAction]) -> Envelope:
        """Wraps typed actions; each gets a fresh ``action_id``."""
        return cls(
            actions=tuple(
                EnvelopeAction(
                    action_id=secrets.token_hex(6),
                    action_type=action.TYPE,
                    payload=action.model_dump(mode="json", exclude_none=True, exclude_defaults=False),
                )
                for action in actions
            )
        )


class Lease(Wire):
    """The server's promise: ``tokens`` tokens stay on ``tier`` or above for ``until_s`` seconds from now."""

    until_s: Finite
    tier: Tier
    tokens: int
    id: str | None = None


class Receipt(Wire):
    """What the server did about one action."""

    action_id: str
    outcome: Outcome
    reason: str = ""
    lease: Lease | None = None


class Receipts(Wire):
    """The answer to ``POST /v1/kv_hints``."""

    protocol_version: str = PROTOCOL_VERSION
    message_id: str = ""
    receipts: tuple[Receipt, ...] = ()


class Divergence(Wire):
    """Where a prompt left the session's previous one, and what that cost. ``token``: first differing token."""

    token: int
    tokens_lost: int
    message: int | None = None
    role: str | None = None
    part: Literal["system", "tools", "message"] | None = None


class CacheReport(Wire):
    """The ``tenuto`` object of every answer: where the prompt's tokens came from.

    ``cached``: tokens reused, by the tier they were on. ``recomputed``: tokens prefilled although they had been
    computed before (retention, capacity, mutation), and ``cold`` for those never seen. Times are seconds.
    """

    session: str | None = None
    prompt_tokens: int = 0
    cached: dict[Tier, int] = Field(default_factory=dict)
    recomputed: dict[MissLabel, int] = Field(default_factory=dict)
    restore_wait_s: Finite = 0.0
    queue_wait_s: Finite = 0.0
    ttft_s: Finite | None = None
    lease: Lease | None = None
    divergence: Divergence | None = None
    receipts: tuple[Receipt, ...] = ()

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed again, over all tiers."""
        return sum(self.cached.values())


class SessionView(Wire):
    """One node of ``GET /v1/sessions``. Residency is in tokens by tier; ages and waits are seconds. ``drafted``,
    ``confirmed``: tokens of its answers that were guessed ahead, and those of them that were right."""

    id: str
    parent: str | None = None
    children: tuple[str, ...] = ()
    agent: str | None = None
    model: str | None = None
    state: Literal["new", "waiting", "running", "paused", "ended"] = "new"
    attended: bool = True
    turns: int = 0
    context_tokens: int = 0
    pause_kind: PauseKind | None = None
    pause_age_s: Finite | None = None
    forecast: Forecast | None = None
    resident: dict[Tier, int] = Field(default_factory=dict)
    lease: Lease | None = None
    drafted: int = 0
    confirmed: int = 0
    last: CacheReport | None = None


def describe_error(error: ValidationError) -> str:
    """A validation error as one line: the field and what is wrong with it, without echoing values."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "payload"
    return f"{where}: {first['msg']}"
