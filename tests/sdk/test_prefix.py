"""Divergence reports: each kind by a small prompt written by hand, and recorded requests of real agents."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tenuto
from tenuto.prefix import Fingerprint, divergence, fingerprint, shared_messages

RECORDINGS = Path(__file__).resolve().parents[3] / "shared" / "recordings"

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("bash", "read", "edit")
]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "Fix it"},
    {"role": "assistant", "content": "Looking"},
    {"role": "user", "content": "Well?"},
]


def test_growth_is_no_divergence() -> None:
    before = fingerprint(MESSAGES, TOOLS)
    after = fingerprint([*MESSAGES, {"role": "assistant", "content": "Done"}], TOOLS)
    assert divergence(before, before) is None
    assert divergence(before, after) is None
    assert shared_messages(before, after) == 3  # the system message is counted apart
    assert before.digest == after.head_digest(3)
    assert before.digest != after.digest


def test_what_does_not_reach_the_tokens_is_not_compared() -> None:
    marked = copy.deepcopy(MESSAGES)
    marked[1] = {
        "role": "user",
        "content": [{"type": "text", "text": "Fix it", "cache_control": {"type": "ephemeral"}}],
    }
    marked[2] = {"role": "assistant", "content": "Looking", "refusal": None, "id": "msg_1"}
    assert divergence(fingerprint(MESSAGES), fingerprint(marked)) is None
    line = "x-anthropic-billing-header: cc_version=1.2.3.abc;\n"
    system = [{"type": "text", "text": line}, {"type": "text", "text": "You are terse."}]
    assert divergence(fingerprint(MESSAGES), fingerprint(MESSAGES[1:], system=system)) is None


def change(index: int, message: dict[str, Any] | None) -> list[dict[str, Any]]:
    out = [*MESSAGES[:index], *([message] if message else []), *MESSAGES[index + 1 :]]
    return out


@pytest.mark.parametrize(
    ("messages", "tools", "part", "index", "kind"),
    [
        (change(0, {"role": "system", "content": "You are verbose."}), TOOLS, "system", 0, "changed"),
        (change(0, None), TOOLS, "system", 0, "truncated"),
        (change(2, {"role": "assistant", "content": "Other"}), TOOLS, "messages", 1, "changed"),
        (change(1, None), TOOLS, "messages", 0, "moved"),
        (MESSAGES[:3], TOOLS, "messages", 2, "truncated"),
        ([MESSAGES[0], MESSAGES[3], MESSAGES[2], MESSAGES[1]], TOOLS, "messages", 0, "order-only"),
        (MESSAGES, TOOLS[::-1], "tools", 0, "order-only"),
        (MESSAGES, TOOLS[:2], "tools", 2, "truncated"),
        (MESSAGES, [TOOLS[0], TOOLS[2]], "tools", 1, "moved"),
        (MESSAGES, [*TOOLS, {"type": "function", "function": {"name": "new"}}], "tools", 3, "changed"),
        (MESSAGES, None, "tools", 0, "truncated"),
        (MESSAGES, [{**t, "function": dict(reversed(t["function"].items()))} for t in TOOLS], "tools", 0, "order-only"),
    ],
)
def test_kinds(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, part: str, index: int, kind: str
) -> None:
    before = fingerprint(MESSAGES, TOOLS)
    report = divergence(before, fingerprint(messages, tools))
    assert report is not None
    assert (report.part, report.index, report.kind) == (part, index, kind)
    assert report.shared_chars + report.lost_chars == before.chars
    assert report.shared_messages == (index if part == "messages" else 0)
    assert f"{part}[{index}]" in str(report)
    assert kind in str(report)


def test_render_order_decides_what_is_lost() -> None:
    changed = change(0, {"role": "system", "content": "You are verbose."})
    system_first = divergence(fingerprint(MESSAGES, TOOLS), fingerprint(changed, TOOLS))
    order = ("tools", "system", "messages")
    tools_first = divergence(
        fingerprint(MESSAGES, TOOLS, order=order),
        fingerprint(changed, TOOLS, order=order),
    )
    assert system_first is not None
    assert tools_first is not None
    assert system_first.shared_chars == 0 < tools_first.shared_chars


def test_assert_prefix_stable() -> None:
    tenuto.assert_prefix_stable(MESSAGES[:2], MESSAGES, tools=TOOLS)
    with pytest.raises(tenuto.PrefixDivergedError, match=r"tools\[0\] \(tool\): order-only"):
        tenuto.assert_prefix_stable(MESSAGES[:2], MESSAGES, tools=TOOLS, new_tools=TOOLS[::-1])
    with pytest.raises(AssertionError, match="does not extend"):
        tenuto.assert_prefix_stable(fingerprint(MESSAGES), fingerprint(MESSAGES[:1]))


texts = st.text(max_size=10)
prompts = st.lists(st.builds(lambda r, t: {"role": r, "content": t}, st.sampled_from(["user", "assistant"]), texts))


@given(prompts, prompts)
def test_a_report_exactly_where_prompts_part(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> None:
    same = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    report = divergence(fingerprint(one), fingerprint(two))
    if same == len(one):
        assert report is None
    else:
        assert report is not None
        assert report.index == same


def recorded(name: str, order: tuple[Any, ...] = ("tools", "system", "messages")) -> tuple[Fingerprint, dict[str, Any]]:
    path = RECORDINGS / name
    if not path.exists():
        pytest.skip(f"needs the recorded requests beside the repository: {name}")
    body = json.loads(path.read_text("utf-8"))["body"]
    if "input" in body:
        return fingerprint(body["input"], body.get("tools"), body.get("instructions"), order=order), body
    return fingerprint(body["messages"], body.get("tools"), body.get("system"), order=order), body


CC = "claude-code-2.1.332"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"{CC}/tool_roundtrip/001.json", f"{CC}/tool_roundtrip/002.json"),
        (f"{CC}/resume_2/001.json", f"{CC}/compact_manual/001.json"),
        (f"{CC}/fork_subagent/001.json", f"{CC}/fork_subagent/003.json"),
        ("codex-0.171.0/tool_roundtrip/001.json", "codex-0.171.0/tool_roundtrip/002.json"),
        ("qwen-code-0.24.4/tool_roundtrip/001.json", "qwen-code-0.24.4/tool_roundtrip/002.json"),
    ],
)
def test_recorded_turns_extend_each_other(before: str, after: str) -> None:
    """Known from the recordings: turns, the summary call and a fork contain the prompt before them entirely."""
    assert divergence(recorded(before)[0], recorded(after)[0]) is None


@pytest.mark.parametrize(
    ("before", "after", "tool", "missing"),
    [
        (f"{CC}/subagent/002.json", f"{CC}/subagent/003.json", 4, "ListAgents"),
        ("codex-0.171.0/subagent_multi_agent_v2/001.json", "codex-0.171.0/subagent_multi_agent_v2/002.json", 6, None),
        ("opencode-1.18.33/subagent_chat/002.json", "opencode-1.18.33/subagent_chat/003.json", 7, "task"),
        (
            "qwen-code-0.24.4/subagent_background/001.json",
            "qwen-code-0.24.4/subagent_background/002.json",
            3,
            "get_goal",
        ),
    ],
)
def test_recorded_subagents_diverge_at_a_missing_tool(before: str, after: str, tool: int, missing: str | None) -> None:
    """Known from the recordings: a child lacks one of its parent's tools, the n-th in the list."""
    (old, old_body), (new, _) = recorded(before), recorded(after)
    report = divergence(old, new)
    assert report is not None
    assert (report.part, report.index + 1, report.kind) == ("tools", tool, "moved")
    if missing is not None:
        entry = old_body["tools"][report.index]
        assert (entry.get("name") or entry["function"]["name"]) == missing


def test_recorded_second_summary_request_shares_87_percent() -> None:
    report = divergence(
        recorded(f"{CC}/compact_manual/001.json")[0],
        recorded(f"{CC}/compact_manual/002.json")[0],
    )
    assert report is not None
    assert 100 * report.shared_chars / (report.shared_chars + report.lost_chars) == pytest.approx(87.4, abs=0.3)


def test_recorded_summary_of_codex_misses_everything_for_its_dropped_tools() -> None:
    """Known from the recordings: the summary request leaves all ten tools out; where the system prompt comes first, that stays."""
    before, after = (f"codex-0.171.0/auto_compact/{name}.json" for name in ("001", "002"))
    (old, old_body), (new, new_body) = recorded(before), recorded(after)
    assert (len(old_body["tools"]), new_body.get("tools") or []) == (10, [])
    report = divergence(old, new)
    assert report is not None
    assert (report.part, report.index, report.kind, report.shared_chars) == ("tools", 0, "truncated", 0)
    system_first = ("system", "tools", "messages")
    later = divergence(recorded(before, system_first)[0], recorded(after, system_first)[0])
    assert later is not None
    assert later.part == "tools"
    assert later.shared_chars > 0
