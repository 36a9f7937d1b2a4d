"""Policies by name; the baselines' decisions against hand calculations."""

from __future__ import annotations

from math import inf

import pytest

from tenuto_server.policy import POLICY_NAMES, PauseStats, Policy, make_policy
from tenuto_server.policy.decision import TurnView
from tenuto_server.policy.views import ExtentView, PauseView, SystemView

NAMES = tuple(name.replace("<seconds>", "300") for name in POLICY_NAMES)
STATS = PauseStats()


@pytest.mark.parametrize("name", NAMES)
def test_every_name_makes_its_policy(name: str, system: SystemView) -> None:
    policy: Policy = make_policy(name)
    assert policy.name == name
    assert policy.hears_hints == (name in ("tenuto", "tokencake", "kvflow"))
    found = policy.retention(PauseView("t", "tool", None, 1.0, context_tokens=160), STATS, system)
    assert found.rate >= 0.0
    assert policy.split(0, 10, "host", system) in range(11)
    assert policy.admission(TurnView(True, 0.0, 1.0, 10, 0)) < policy.admission(TurnView(False, 0.0, 1.0, 10, 0))


@pytest.mark.parametrize(
    "name", ["", "belady", "tenuto:psychic", "ttl", "ttl:", "ttl:soon", "ttl:-1", "ttl:nan", "ttl:inf"]
)
def test_an_unknown_name_lists_the_known(name: str) -> None:
    with pytest.raises(ValueError, match="unknown policy") as caught:
        make_policy(name)
    assert all(known in str(caught.value) for known in POLICY_NAMES)


def extent(last_used_s: float, rate: float = 0.0, on: tuple[str, ...] = ("device",)) -> ExtentView:
    return ExtentView(0, 10, 1, rate, last_used_s, 1, on)  # type: ignore[arg-type]


def test_lru_orders_by_last_use_and_cascades(system: SystemView) -> None:
    lru = make_policy("lru")
    assert lru.priority(extent(5.0, rate=9.0), "device", system) < lru.priority(extent(6.0), "device", system)
    assert lru.keep_below(extent(0.0), "device", system) == "host"
    assert lru.keep_below(extent(0.0, on=("host",)), "host", system) == "disk"
    assert lru.keep_below(extent(0.0, on=("disk",)), "disk", system) is None
    assert lru.keep_below(extent(0.0, on=("device", "host")), "device", system) is None
    assert not lru.offload_early(extent(0.0), system)
    assert lru.split(0, 100, "disk", system) == 0
    found = lru.retention(PauseView("t", "tool", None, 0.0), STATS, system)
    assert (found.rate, found.valid_s, found.lease_s, found.prefetch_s) == (0.0, inf, 0.0, None)


def test_a_ttl_protects_until_it_expires(system: SystemView) -> None:
    ttl = make_policy("ttl:300")
    found = ttl.retention(PauseView("t", "human", None, 100.0), STATS, system)
    assert found.valid_s == found.lease_s == 200.0
    protected, expired = extent(1.0, rate=found.rate), extent(1e6)
    assert ttl.priority(protected, "device", system) > ttl.priority(expired, "device", system)
    assert ttl.priority(protected, "device", system) < ttl.priority(
        protected._replace(last_used_s=2.0), "device", system
    )
    gone = ttl.retention(PauseView("t", "human", None, 300.0), STATS, system)
    assert (gone.rate, gone.valid_s) == (0.0, inf)


def test_class_ttl_gives_people_longer(system: SystemView) -> None:
    policy = make_policy("class-ttl")
    tool = policy.retention(PauseView("t", "tool", None, 0.0), STATS, system)
    human = policy.retention(PauseView("t", "human", None, 0.0), STATS, system)
    assert (tool.lease_s, human.lease_s) == (180.0, 3600.0)
