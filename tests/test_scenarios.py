"""Every reported situation has a test that exists, or a reason (docs/scenarios.md)."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT.parent / "shared" / "reference"
ROW = re.compile(r"^\| ([CS]\d+) \| ([^|]+) \| (.+) \|$", re.MULTILINE)
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
REASONS = ("Cannot occur: ", "Not offered: ")


def rows() -> dict[str, str]:
    found = ROW.findall((ROOT / "docs" / "scenarios.md").read_text(encoding="utf-8"))
    assert len({number for number, _, _ in found}) == len(found), "a number stands twice"
    return {number: shown for number, _, shown in found}


@cache
def defined_in(path: str) -> frozenset[str]:
    file = ROOT / path
    if not file.is_file():
        return frozenset()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds) and node.name.startswith("test_"))


@pytest.mark.parametrize("number", rows())
def test_a_situation_is_tested_or_has_a_reason(number: str) -> None:
    shown = rows()[number]
    tests = NAMED.findall(shown)
    missing = [f"{path}::{name}" for path, name in tests if name not in defined_in(path)]
    assert not missing
    assert tests or (shown.startswith(REASONS) and len(shown) > 80)


def test_no_situation_is_left_out() -> None:
    if not REFERENCE.is_dir():
        pytest.skip("the collection of reported situations is not beside this checkout")
    clients = re.findall(
        r"^\| (C\d+) \|", (REFERENCE / "client_scenarios.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    engines = re.findall(r"^### (S\d+) ", (REFERENCE / "scenarios.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert clients
    assert engines
    assert set(rows()) == {*clients, *engines}
