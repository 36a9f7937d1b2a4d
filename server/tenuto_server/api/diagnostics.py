"""Why a prefix was not reused, in the fields that other APIs have for it. Holds no state.

What changed comes from comparing outlines (``outline``), what it cost from the cache report.
"""

from __future__ import annotations

from typing import Any

from tenuto_server.api.generation import Generation

_MESSAGES_REASONS = {
    "model": "model_changed",
    "system": "system_changed",
    "tools": "tools_changed",
    "messages": "messages_changed",
}
_RESPONSES_REASONS = {
    "model": "model_changed",
    "system": "input_changed",
    "tools": "tools_changed",
    "messages": "input_changed",
}


def messages_diagnostics(generation: Generation, previous: Any) -> dict[str, Any] | None:
    """The ``diagnostics`` of a message, compared with the answer ``previous``; None: nothing diverged."""
    if not isinstance(previous, str):
        return None
    try:
        change = generation.change_since(previous)
    except KeyError:
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    missed = missed_tokens(generation)
    if change is not None:
        reason = {"type": _MESSAGES_REASONS[change.part], "cache_missed_input_tokens": missed}
    elif missed:
        reason = {"type": "unavailable"}  # lost to time or pressure, which this field has no word for
    else:
        return None
    return {"cache_miss_reason": reason}


def responses_diagnostics(generation: Generation, previous: Any) -> dict[str, Any] | None:
    """The ``prompt_cache_diagnostics`` of a response, compared with the response ``previous``; None if not asked for."""
    if not isinstance(previous, str):
        return None
    try:
        change = generation.change_since(previous)
    except KeyError:
        return {"type": "comparison_response_not_found"}
    missed = missed_tokens(generation)
    if change is None:
        return {"type": "unavailable"} if missed else {"type": "cache_hit"}
    compacted = generation.inferred("compaction")
    reason = "context_compacted" if compacted else _RESPONSES_REASONS[change.part]
    reusable = generation.report.cached_tokens + missed
    return {
        "type": "cache_miss",
        "reason": reason,
        "cache_missed_tokens": missed,
        "comparison_reusable_tokens": reusable,
    }


def missed_tokens(generation: Generation) -> int:
    """Tokens of the prompt that had been computed before and were not there, or not where they could be used."""
    return sum(count for label, count in generation.report.recomputed.items() if label != "cold")
