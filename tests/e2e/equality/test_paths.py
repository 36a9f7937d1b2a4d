"""The equality test: greedy tokens do not depend on where the prefix has been, on what was lost, or on what was hinted.

Each case is one conversation whose cached prefix is treated in one way between two turns; the second answer must be that of
an empty cache. In fp32 with the invariant mode the KV is compared too, bit by bit. In bf16, KV written by decode differs from
KV recomputed by prefill within rounding, so a token may differ where the reference's own lead is below ``EPSILON``; how often
that was needed is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tenuto.wire import (
    AgentCompaction,
    AgentEnd,
    AgentFork,
    AgentKeepalive,
    AgentPause,
    AgentResumeSoon,
    Forecast,
    KvDemote,
    KvRelease,
    Shared,
    Target,
)

EPSILON = 0.15
"""Logits of an answer after KV that was written by decode, and after the same KV recomputed, were seen to differ by up to
0.053 in bf16 (leads of the best token: 1 to 8). A token can flip where its lead is below twice such a difference."""
ESCAPES_SHARE_MAX = 0.05
SPLIT_COPY_S = 0.02

TEXT = '''You are a careful engineer. Read the function, run the tests, and say what is wrong with it before you change it.

def merge(left, right):
    """Merge two sorted lists into one sorted list."""
    merged, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            merged.append(left[i])
            i += 1
        else:
            merged.append(right[j])
            j += 1
    return merged + left[i:]

The tests say that the result is too short when the second list is the longer one. Explain where the rest of it went, name
the line at fault, and propose the smallest change that keeps the order of equal elements. Then list two further tests.
'''
RESULT = "\nThe tool says: two failed, seven passed. The last assertion compares [1, 2, 3] with [1, 2]. What now?\n"
OTHER = "\nA second agent looks only at the documentation: which words of the docstring are not true, and why?\n"

TOYS = ["toy-fp32-invariant", "toy-fp32"]
REAL = ["smollm2-135m-fp32-invariant", "smollm2-135m-bf16"]


def cases(table: dict[str, Any], real: Iterable[str]) -> pytest.MarkDecorator:
    """Every row of a table with the toys, and the rows named ``real`` with the real model, which takes its time."""
    found = [pytest.param(variant, row, id=f"{variant}: {name}") for variant in TOYS for name, row in table.items()]
    for variant in REAL:
        found += [pytest.param(variant, table[n], id=f"{variant}: {n}", marks=pytest.mark.model) for n in real]
    return pytest.mark.parametrize(("variant", "case"), found, indirect=["variant"])


every_variant = pytest.mark.parametrize(
    "variant", [*TOYS, *(pytest.param(name, marks=pytest.mark.model) for name in REAL)], indirect=True
)


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Any]:
    return {}


@pytest.fixture(scope="module")
def variant(request: pytest.FixtureRequest, load: Any, kit: Any, verdicts: dict[str, Any]) -> tuple[Any, Any]:
    """A model in one precision, and its verdict over all cases."""
    name, dtype = next((request.param.partition(f"-{d}")[0], d) for d in ("fp32", "bf16") if d in request.param)
    invariant = request.param.endswith("invariant")
    model = load(name, dtype, invariant)
    if request.param not in verdicts:
        epsilon = EPSILON if dtype == "bf16" else None
        verdicts[request.param] = kit.Verdict(kit.Reference(model), epsilon, bitwise=invariant)
    return model, verdicts[request.param]


@pytest.fixture
def count(variant: tuple[Any, Any]) -> int:
    """Tokens of an answer: fewer where every byte of KV is compared with a slow model."""
    model, verdict = variant
    return 8 if verdict.bitwise and model.name != "toy" else 16


@pytest.fixture
def lab(variant: Any, labs: Any, tmp_path: Any) -> Callable[..., Any]:
    model, verdict = variant
    return lambda **fields: labs(verdict, model, tmp_path, **fields)


@pytest.fixture
def words(variant: Any) -> Callable[[str, int], list[int]]:
    """The first tokens of a text."""
    return lambda text, count: list(variant[0].tokenizer.encode(text))[:count]


def first_turn(lab: Any, words: Any, count: int) -> list[int]:
    """A prompt of eight and a half blocks and its answer: the context that the second turn extends."""
    prompt = words(TEXT, 136)
    return [*prompt, *lab.ask("a", prompt, count).tokens]


PLACES: dict[str, list[tuple[int, int, str | None]]] = {
    "resident": [],
    "host": [(0, 99, "host")],
    "disk": [(0, 99, "disk")],
    "evicted": [(0, 99, None)],
    "holes": [(1, 2, None), (4, 7, None)],
    "front lost": [(0, 3, None)],
    "tail lost": [(6, 99, None)],
    "every other block": [(n, n + 1, None) for n in range(0, 9, 2)],
    "patchwork": [(0, 1, "host"), (1, 3, None), (3, 4, "disk"), (5, 7, None), (7, 8, "host")],
}


@cases(PLACES, ["resident", "host", "disk", "evicted", "every other block", "patchwork"])
def test_wherever_the_prefix_is(lab: Any, words: Any, count: int, case: list[tuple[int, int, str | None]]) -> None:
    site = lab()
    context = first_turn(site, words, count)
    site.place("a", *case)
    there = site.resident("a")
    prompt = [*context, *words(RESULT, 24)]
    report = site.ask("a", prompt, count).done.report
    # All that was resident was used, and nothing else: the answer did take the path that it is a test of.
    assert report.cached == {tier: tokens for tier, tokens in there.items() if tokens}
    assert sum(there.values()) + sum(report.recomputed.values()) == len(prompt)
    assert all(name is None or name in report.cached for _, _, name in case)
    assert site.kv("a") is not None, "all of it is on the device now, so all of it was compared where bits count"


@every_variant
def test_split_restore(lab: Any, words: Any, count: int) -> None:
    """The front is computed while the tail loads."""
    site = lab(policy="tenuto", copy_s={"host": SPLIT_COPY_S})
    context = first_turn(site, words, count)
    site.place("a", (0, 99, "host"))
    report = site.ask("a", [*context, *words(RESULT, 24)], count).done.report
    assert (site.count("split_restores_total"), site.count("computed_instead_of_loaded_total") > 0) == (1, True)
    assert 0 < report.cached["host"] < len(context) - 1


@pytest.mark.parametrize("variant", TOYS, indirect=True)
def test_late_restore(lab: Any, words: Any, count: int) -> None:
    """A copy that takes too long is computed instead, and does no harm when it arrives after all."""
    site = lab(copy_s={"disk": 1000.0}, disk_bytes_per_s=1e9)
    context = first_turn(site, words, count)
    site.place("a", (3, 7, "disk"))
    site.ask("a", [*context, *words(RESULT, 24)], count)
    assert site.count("restores_late_total") > 0
    site.ask("a", [*context, *words(OTHER, 20)], count)


@cases({"host": "host", "disk": "disk"}, ["disk"])
def test_damaged_below(lab: Any, words: Any, count: int, case: str) -> None:
    """Bytes that changed while they lay on a lower tier are told, counted and computed again."""
    site = lab()
    context = first_turn(site, words, count)
    site.place("a", (0, 99, case))
    if case == "host":
        site.executor.store.host_bytes[2:4, ::97] ^= 1
    else:
        (segment,) = site.executor.disk.folder.glob("segment-*")
        data = bytearray(segment.read_bytes())
        data[len(data) // 2] ^= 1
        segment.write_bytes(data)
    site.ask("a", [*context, *words(RESULT, 24)], count)
    assert site.count("corrupt_blocks_total") > 0


@every_variant
def test_forked(lab: Any, words: Any, count: int) -> None:
    """Children and parent go on at the same time from one prefix; the block that they share in part is copied."""
    site = lab(policy="tenuto")
    context = first_turn(site, words, count)
    site.hint(AgentFork(session="a", child="b"), AgentFork(session="a", child="c"))
    prompts = {
        "a": [*context, *words(RESULT, 24)],
        "b": [*context, *words(OTHER, 21)],
        "c": [*context[:-3], *words(OTHER, 9)],
    }
    turns = {name: site.submit(name, prompt, count) for name, prompt in prompts.items()}
    site.world.run()
    for name, prompt in prompts.items():
        site.judge(turns[name], prompt, count)
        assert turns[name].done.report.cached["device"] >= len(context) - 4
    assert site.count("copied_blocks_total") > 0


@cases({told: told for told in ("begin and commit", "begin only", "nothing")}, ["begin and commit"])
def test_compacted(lab: Any, words: Any, count: int, case: str) -> None:
    site = lab(policy="tenuto")
    context = first_turn(site, words, count)
    if case != "nothing":
        site.hint(AgentCompaction(session="a", seq=1, phase="begin"))
    asked = [*context, *words(OTHER, 12)]
    summary = site.ask("a", asked, count).tokens
    if case == "begin and commit":
        keep = Shared(tokens=64)
        (receipt,) = site.hint(AgentCompaction(session="a", seq=2, phase="commit", keep=keep))
        assert receipt.outcome == "accepted"
    prompt = [*context[:64], *summary, *words(RESULT, 20)]
    report = site.ask("a", prompt, count).done.report
    assert report.cached == {"device": 64}


@every_variant
def test_preempted(lab: Any, words: Any) -> None:
    """Two turns that do not fit together: one is thrown out in the middle of its answer and comes back."""
    site = lab(device=10, host=0, disk=0, reserve_tokens_max=1)
    texts = {"a": words(TEXT, 61), "b": words(TEXT[200:], 60)}
    turns = {name: site.submit(name, prompt, 24) for name, prompt in texts.items()}
    site.world.run()
    assert site.count("preemptions_total") > 0
    for name, prompt in texts.items():
        site.judge(turns[name], prompt, 24)


HOUR = 3600.0
LIES: dict[str, list[Any]] = {
    "never returns": [AgentPause(session="a", kind="human", forecast=Forecast(p50_s=HOUR, p_return=0.0))],
    "ended": [AgentEnd(session="a")],
    "back at once": [AgentPause(session="a", kind="tool", forecast=Forecast(p50_s=0.0)), AgentResumeSoon(session="a")],
    "kept for ever": [AgentKeepalive(session="a", for_s=24 * HOUR)],
    "compacted to nothing": [AgentCompaction(session="a", phase="commit", keep=Shared(tokens=0))],
    "compacted in a block": [AgentCompaction(session="a", phase="commit", keep=Shared(tokens=75))],
    "released": [KvRelease(session="a"), KvDemote(session="a", tier="disk")],
    "demoted in part": [KvDemote(session="a", target=Target(start=20, end=90)), AgentResumeSoon(session="a", in_s=9.0)],
    "forked to nobody": [AgentFork(session="a", child=f"ghost-{n}") for n in range(5)],
}


@cases(LIES, ["ended", "compacted in a block", "demoted in part"])
def test_wrongly_hinted(lab: Any, words: Any, count: int, case: list[Any]) -> None:
    """Whatever was said about the pause; another session presses meanwhile, so that what was said has consequences."""
    site = lab(policy="tenuto", device=20, host=10, disk=12)
    context = first_turn(site, words, count)
    for number, lie in enumerate(case):
        site.hint(lie.model_copy(update={"seq": number + 1}))
    site.wait(2.0)
    site.ask("other", words(TEXT[150:], 110), 2)
    site.wait(10.0)
    site.ask("a", [*context, *words(RESULT, 24)], count)


@cases({policy: policy for policy in ("lru", "tenuto:none", "tenuto")}, ["tenuto"])
def test_hints_lost(lab: Any, words: Any, count: int, case: str) -> None:
    """The same conversation and the same pressure, nothing said."""
    site = lab(policy=case, device=20, host=10, disk=12)
    context = first_turn(site, words, count)
    site.wait(2.0)
    site.ask("other", words(TEXT[150:], 110), 2)
    site.wait(10.0)
    site.ask("a", [*context, *words(RESULT, 24)], count)


@pytest.mark.model
def test_the_escape_of_bf16_is_rare(verdicts: dict[str, Any]) -> None:
    """Last, since it judges the cases above."""
    verdict = verdicts.get("smollm2-135m-bf16")
    if verdict is None:
        pytest.skip("no bf16 case was run beside this one")
    print(
        f"{len(verdict.escapes)} escapes in {verdict.answers} answers, {verdict.tokens} tokens; leads {verdict.escapes}"
    )
    assert len(verdict.escapes) <= ESCAPES_SHARE_MAX * verdict.answers
