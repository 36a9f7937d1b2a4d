"""A disk directory outlives its server. What another model, precision or secret wrote there is never matched."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tenuto_server.cache.identity import chain
from tenuto_server.model.toy import toy_config, toy_digest, toy_weights
from tenuto_server.model.transformer import Transformer

PROMPT = [3 + (n * n + 7 * n) % 500 for n in range(150)]
FULL = 144
COUNT = 12
SECRET = b"another secret of the same kind."


def retrained(model: Any) -> Any:
    """A model of the same shape whose weights differ."""
    weights = toy_weights(seed=1)
    transformer = Transformer(toy_config(), weights, dtype=torch.float32, invariant=True)
    return dataclasses.replace(model, transformer=transformer, digest=toy_digest(weights))


@pytest.fixture
def written(labs: Any, kit: Any, load: Any, tmp_path: Path) -> Any:
    """A directory in which a server has left a prompt's blocks; returns (model, folder)."""
    model = load("toy", "fp32", True)
    lab = labs(kit.Verdict(kit.Reference(model), bitwise=True), model, tmp_path)
    lab.ask("a", PROMPT, COUNT)
    lab.place("a", (0, 99, "disk"))
    lab.close()
    return model, tmp_path


def ask(labs: Any, kit: Any, model: Any, folder: Path, **fields: Any) -> tuple[Any, Any]:
    """A server's first answer to the prompt, compared with that of its own model and no cache; and the server."""
    lab = labs(kit.Verdict(kit.Reference(model), bitwise=True), model, folder, **fields)
    return lab.ask("a", PROMPT, COUNT).done.report, lab


def test_the_same_server_finds_its_blocks(labs: Any, kit: Any, written: Any) -> None:
    report, lab = ask(labs, kit, *written)
    assert report.cached == {"disk": FULL}
    assert report.recomputed == {"cold": len(PROMPT) - FULL}
    assert lab.executor.disk.health()["blocks_read"] == FULL // kit.BLOCK


def test_another_weight_is_another_model(labs: Any, kit: Any, written: Any) -> None:
    model, folder = written
    report, lab = ask(labs, kit, retrained(model), folder)
    assert (report.cached, lab.count("disk_blocks_recovered_total")) == ({}, 0)
    report, _ = ask(labs, kit, model, folder)  # and the other one's blocks have suffered nothing
    assert report.cached == {"disk": FULL}


def test_another_precision(labs: Any, kit: Any, load: Any, written: Any) -> None:
    report, lab = ask(labs, kit, load("toy", "bf16", True), written[1])
    assert (report.cached, lab.count("disk_blocks_recovered_total")) == ({}, 0)


def test_another_secret(labs: Any, kit: Any, written: Any) -> None:
    report, lab = ask(labs, kit, *written, secret=SECRET)
    assert (report.cached, lab.count("disk_blocks_recovered_total")) == ({}, 0)


@pytest.mark.parametrize("other", ["weights", "secret"])
def test_a_directory_under_a_false_name(labs: Any, kit: Any, written: Any, other: str) -> None:
    """Names of directories only save looking: blocks that were put under another's name are found and match nothing."""
    model, folder = written
    (family,) = (path for path in folder.iterdir() if path.is_dir())
    if other == "weights":
        model = retrained(model)
    secret = {"secret": SECRET} if other == "secret" else {}
    probe = labs(kit.Verdict(kit.Reference(model)), model, folder / "probe", **secret)
    family.rename(folder / probe.identity.family())
    report, lab = ask(labs, kit, model, folder, **secret)
    assert lab.count("disk_blocks_recovered_total") >= FULL // kit.BLOCK
    assert report.cached == {}


def test_another_tenant_or_salt(labs: Any, kit: Any, written: Any) -> None:
    """The directory is shared by all tenants of a server; its blocks are not."""
    model, folder = written
    lab = labs(kit.Verdict(kit.Reference(model), bitwise=True), model, folder)
    for fields in ({"salt": "mine"}, {"tenant": "somebody else"}):
        turn = lab.submit("b", PROMPT, COUNT, **fields)
        lab.world.run()
        assert turn.done.report.cached == {}
        assert lab.verdict.same(PROMPT, turn.tokens, COUNT)
    assert lab.ask("a", PROMPT, COUNT).done.report.cached == {"disk": FULL}


def test_a_restart_finds_what_lies_behind_a_hole(labs: Any, kit: Any, written: Any) -> None:
    """The front of a prompt is the last to leave memory, so a crash leaves directories that lack it."""
    model, folder = written
    lab = labs(kit.Verdict(kit.Reference(model)), model, folder)
    hashes = chain(lab.identity.root("t"), np.array(PROMPT, np.int32), kit.BLOCK)
    slot_of = dict(zip(*lab.executor.disk.recovered(), strict=True))
    lab.executor.disk.forget([slot_of[hashes[16 * block : 16 * block + 16]] for block in (0, 1, 5)])
    left = len(lab.executor.disk.recovered()[0])
    lab.close()
    report, again = ask(labs, kit, model, folder)
    assert again.count("disk_blocks_recovered_total") == left == len(slot_of) - 3
    assert report.cached == {"disk": FULL - 3 * kit.BLOCK}
    assert report.recomputed == {"capacity": 3 * kit.BLOCK, "cold": len(PROMPT) - FULL}


def test_a_restart_finds_branches(labs: Any, kit: Any, load: Any, tmp_path: Path) -> None:
    """Agents share their first messages: the second to return finds its own blocks below those of the first."""
    model = load("toy", "fp32", True)
    prompts = {name: [*PROMPT[:100], *range(seed, seed + 60)] for name, seed in (("a", 10), ("b", 200), ("c", 400))}
    lab = labs(kit.Verdict(kit.Reference(model), bitwise=True), model, tmp_path)
    for name, prompt in prompts.items():
        lab.ask(name, prompt, COUNT)
        lab.place(name, (0, 99, "disk"))
    lab.close()
    lab = labs(kit.Verdict(kit.Reference(model), bitwise=True), model, tmp_path)
    for name, prompt in prompts.items():
        report = lab.ask(name, prompt, COUNT).done.report
        assert sum(report.cached.values()) >= len(prompt) // kit.BLOCK * kit.BLOCK - kit.BLOCK, name
        assert report.cached["disk"] >= 32, name
