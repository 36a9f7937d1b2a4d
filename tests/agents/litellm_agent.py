"""A tool loop on LiteLLM, run by its own interpreter, whole and then streamed. Prints what was said."""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Any

import litellm

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOL = {"type": "function", "function": {"name": "run_tests", "description": "Runs tests.", "parameters": PARAMETERS}}


def ask(messages: list[Any], *, streams: bool) -> Any:
    """One answer, put together from its pieces where it is streamed."""
    options: dict[str, Any] = {
        "model": "openai/scripted",
        "api_base": f"{os.environ['URL']}/v1",
        "api_key": "k",
        "tools": [TOOL],
        "num_retries": 0,
    }
    if not streams:
        return litellm.completion(messages=messages, **options).choices[0].message
    pieces = list(litellm.completion(messages=messages, stream=True, **options))
    return litellm.stream_chunk_builder(pieces, messages=messages).choices[0].message


def talk(task: str, *, streams: bool) -> list[str]:
    """A task and one more question."""
    messages: list[Any] = []
    said = []
    for text in (task, "and now?"):
        messages.append({"role": "user", "content": text})
        while True:
            message = ask(messages, streams=streams)
            messages.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
            for call in message.tool_calls or ():
                time.sleep(0.1)
                result = f"ran {json.loads(call.function.arguments)['command']}"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not message.tool_calls:
                break
        said.append(message.content)
    return said


def main() -> None:
    """Two conversations; what LiteLLM warns of goes to stderr."""
    logging.basicConfig(level=logging.WARNING)
    litellm.suppress_debug_info = True  # links for models that its price list does not have
    kinds = {"whole": False, "streamed": True}
    print(json.dumps([talk(f"make a framework trip: {kind}", streams=streams) for kind, streams in kinds.items()]))


if __name__ == "__main__":
    main()
