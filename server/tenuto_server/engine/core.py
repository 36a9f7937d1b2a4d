"""What the parts of the engine share: settings, tables, costs, journal, counters, and the time of the current step.

Owner: ``Engine``. The doors between cache and policy are here, since only the engine knows both.
"""

from __future__ import annotations

from collections import defaultdict

from tenuto_server.cache.extent import DEVICE, DISK, HOST, RATE_PARTS, TIERS, Extent, LostLabel, TierName
from tenuto_server.cache.manager import CacheManager
from tenuto_server.config import EngineConfig
from tenuto_server.engine.costs import Costs
from tenuto_server.engine.fallen import Fallen
from tenuto_server.engine.journal import Journal
from tenuto_server.engine.plan import Output
from tenuto_server.engine.session import Pause, Session, SessionTable
from tenuto_server.policy.calibration import PauseStats
from tenuto_server.policy.decision import Policy
from tenuto_server.policy.learned import Learned
from tenuto_server.policy.safeguard import Safeguard
from tenuto_server.policy.views import CostView, ExtentView, SystemView, TierView

# A lost extent can have many sessions below it; beyond this many nodes the label is decided by those looked at.
_LABEL_NODES_MAX = 256
# What LRU itself would use of each tier: over lower tiers some device blocks are always free ahead of need or reserved for
# copies on their way, and lower ones hold second copies of what came back up. Measured with LRU, which must not fall behind its
# own shadow.
_KEPT_SHARES = (0.9, 0.7, 0.7)
_FALLEN_MAX = 256
# Between tenants it must be told what is wanted from what is not, which plain LRU does not: there the index fades to the time
# since the last use, but not away.
_TRUST_SHARED = 0.05
# What ``ExtentView(...)`` does, without the call in between: one is made for every extent whose order is asked.
_view = tuple.__new__
_ON = tuple(tuple(tier for at, tier in enumerate(TIERS) if bits >> at & 1) for bits in range(8))


class Core:
    """See the module."""

    def __init__(self, config: EngineConfig, policy: Policy, journal: Journal) -> None:
        self.config = config
        self.policy = policy
        self.journal = journal
        self.now_ns = 0
        self.cache = CacheManager(config.cache, self._priority, self._below, self._label)
        # Tenants by number, as the cache knows them; 0 is nobody's.
        self._owners: dict[str, int] = {}
        self.sessions = SessionTable(config.sessions_per_tenant_max)
        self.knowledge = PauseStats()
        self.learned: Learned | None = None
        self.costs = Costs(config)
        self.safeguard = Safeguard(*self._shadowed(config))
        self.fallen = Fallen(_FALLEN_MAX)
        # When the last copy to the device ended.
        self.loaded_ns = 0
        self.outputs: list[Output] = []
        self.counters: defaultdict[str, int] = defaultdict(int)
        self.labelled: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.writable = {DEVICE: True, HOST: True, DISK: True}
        self._cost: CostView | None = None
        self._system: SystemView | None = None
        self._system_before: SystemView | None = None

    def _shadowed(self, config: EngineConfig) -> list[int]:
        """Tokens that plain LRU would hold on the device, there and on the host, there and on the disk."""
        cache = config.cache
        if not self.cache.tiers.tiered:
            return [cache.device_blocks * cache.block_tokens]
        held, total = [], 0.0
        for blocks, share in zip(
            (cache.device_blocks, cache.host_blocks, cache.disk_blocks), _KEPT_SHARES, strict=True
        ):
            total += share * blocks
            held.append(int(total) * cache.block_tokens)
        return held

    def guard(self, session: Session, prompt: int, known: int, cached: dict[TierName, int]) -> None:
        """Tells the safeguard what a turn found on each tier, and what a token there saves of its recompute."""
        if not self.policy.learns:
            return  # nobody asks how far the index is to be trusted
        size = self.config.cache.block_tokens
        token_s = self.costs.prefill_s(0, prompt) / prompt
        worth = [max(0.0, 1.0 - self.costs.load_s_per_block(tier) / size / token_s) for tier in (DEVICE, HOST, DISK)]
        found = [cached.get(tier, 0) for tier in TIERS]
        self.safeguard.turn(session.handle, prompt, known, found, worth, self.owner(session.tenant))

    @property
    def now_s(self) -> float:
        """The step's time in seconds."""
        return self.now_ns / 1e9

    def begin_step(self, now_ns: int) -> None:
        """Time moves (never backwards); views are built afresh."""
        self.now_ns = max(self.now_ns, now_ns)
        if self._system is not None:
            self._system, self._system_before = None, self._system
        self.outputs = []

    def owner(self, tenant: str) -> int:
        """The number of a tenant."""
        return self._owners.setdefault(tenant, len(self._owners) + 1)

    def count(self, name: str, amount: int = 1, label: str | None = None) -> None:
        """Adds to a counter, or to one label of it."""
        if label is None:
            self.counters[name] += amount
        else:
            self.labelled[name][label] += amount

    def open_session(self, tenant: str, name: str | None, root: bytes) -> Session | None:
        """The session of that name, new if need be; None when the tenant is at its limit with all of them at work."""
        if self.learned is not None:
            self.learned.heard(tenant)
        opened = self.sessions.open(tenant, name, root)
        if opened is None:
            return None
        session, forgotten = opened
        for other in forgotten:
            self.count("sessions_forgotten")
            if other.pause is not None:
                self.give_up(other, other.pause)
            self.cache.set_tip(other.handle, None)
            self.safeguard.end(other.handle)
        return session

    def give_up(self, session: Session, pause: Pause) -> None:
        """Counts an open pause as one that never ends, once: where somebody said so that was true, else nobody did."""
        if session.ended:
            if pause.end_keep_s == 0.0 and not pause.end_proved:
                pause.end_proved = True
                self.knowledge.observe_end(session.tenant, pause.kind, pause.key, pause.said)
            return
        if pause.given_up:
            return
        pause.given_up = True
        if self.policy.learns:
            self.knowledge.observe_censored(
                session.tenant,
                pause.kind,
                pause.elapsed_s(self.now_ns),
                pause.key,
                pause.said,
                rhythm=session.rhythm(pause.kind),
                traits=session.traits(pause.kind),
            )

    # ---- views ---------------------------------------------------------------------------------------------------

    def prices(self) -> dict[str, float]:
        """The tiers' prices when a decision last asked for them. To look must change nothing: working a price out files
        extents by the costs of the moment, and what is filed when decides what is evicted."""
        system = self._system or self._system_before
        known = {view.tier: view.price for view in system.tiers} if system is not None else {}
        return {tier: known.get(tier, 0.0) for tier in TIERS}

    def system(self) -> SystemView:
        """Tiers and costs as of this step."""
        if self._system is None:
            tiers = self.cache.tiers
            views = []
            for tier in (DEVICE, HOST, DISK):
                pool = tiers.pools[tier]
                if pool.capacity and self.writable[tier]:
                    views.append(
                        TierView(
                            TIERS[tier],
                            pool.capacity,
                            pool.free,
                            tiers.price(tier),
                            self.costs.load_s_per_block(tier),
                            tiers.evicted_priority[tier],
                            tiers.clearing[tier].level(self.now_ns),
                        )
                    )
            trust = self.safeguard.trust
            if trust < _TRUST_SHARED and tiers.shares.contended:
                trust = _TRUST_SHARED
            self._system = SystemView(tuple(views), self._costs_now(), trust)
        return self._system

    def _costs_now(self) -> CostView:
        costs, config, last = self.costs, self.config, self._cost
        now = (costs.prefill_a_s, costs.prefill_b_s, costs.waiting)
        if last is None or now != (last.prefill_a_s, last.prefill_b_s, last.waiting):
            rest = (config.cache.block_tokens, config.block_bytes, config.step_overhead_s)
            self._cost = last = CostView(*now, *rest)
        return last

    def view(self, extent: Extent, leaving: int | None = None) -> ExtentView:
        """An extent as a policy sees it; ``leaving``: as if it had left that tier already."""
        device, host, disk = extent.slots
        held = (device is not None) + 2 * (host is not None) + 4 * (disk is not None)
        if leaving is not None:
            held &= ~(1 << leaving)
        cache = self.cache
        over = cache.tiers.shares.crowding
        return _view(
            ExtentView,
            (
                extent.start * cache.block_tokens,
                extent.blocks,
                extent.users,
                extent.rate / RATE_PARTS,
                extent.last_used_s,
                extent.uses,
                _ON[held],
                _ON[over.get(extent.owner, 0)] if over else (),
            ),
        )

    # ---- doors ---------------------------------------------------------------------------------------------------

    def _priority(self, extent: Extent, tier: int, leaving: int | None) -> float:
        # Prices follow from priorities: while this step's are being worked out, the last step's view serves.
        system = self._system or self._system_before or self.system()
        return self.policy.priority(self.view(extent, leaving), TIERS[tier], system)

    def _below(self, extent: Extent, tier: int) -> int | None:
        view = self.view(extent)
        while (name := self.policy.keep_below(view, TIERS[tier], self.system())) is not None:
            target = TIERS.index(name)
            if target <= tier:
                return None
            if self.writable[target] and not extent.refused & (1 << target):
                return target
            tier = target  # it would go there but cannot: what is the next best?
        return None

    def _label(self, extent: Extent, tier: int) -> LostLabel:
        """Why an extent loses its copy on a tier; breaks the leases that promised it."""
        label: LostLabel = "capacity"
        promised = expired = False
        for session in self._users(extent):
            if tier == DEVICE and session.pause is not None and self.cache.tiers.tiered:
                self.fallen.fell(session.handle, session.retention.rate if session.retention is not None else 0.0)
            if session.leased(self.now_ns) and session.retention is not None:
                left = [other for other, slots in enumerate(extent.slots) if slots is not None and other != tier]
                if not left or left[0] > TIERS.index(session.lease_tier):
                    promised = True
                    session.lease_broken = True
                    self.count("leases_broken")
                    self.journal.write(
                        self.now_ns, "lease_broken", session=session.id, lease=session.lease_id, tier=TIERS[tier]
                    )
            elif session.ended or (session.pause is not None and session.lease_id):
                expired = True
        if expired and not promised:
            label = "retention"
        return label

    def _users(self, extent: Extent) -> list[Session]:
        found: list[Session] = []
        stack, seen = [extent], 0
        while stack and seen < _LABEL_NODES_MAX:
            node = stack.pop()
            seen += 1
            for handle in sorted(node.tips) if len(node.tips) > 1 else node.tips:
                if (session := self.sessions.by_handle.get(handle)) is not None:
                    found.append(session)
            if node.children:
                stack.extend(child for child in node.children.values() if child.users)
            if node.tails:
                stack.extend(tail for tail in node.tails if tail.users)
        return found
