"""A small coding agent: streamed turns, real commands, a pause around every command.

    python examples/coding_agent.py --base-url http://127.0.0.1:8000 "How many tests are there?"

The agent may only read. Small models seldom call tools by themselves; then the commands of PLAN stand in for them.
"""

import argparse
import json
import shlex
import subprocess
from pathlib import Path

import tenuto

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = {"ls", "grep", "wc", "head", "cat"}
PLAN = ["ls examples", "grep -c session examples/quickstart.py", "wc -l examples/quickstart.py"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": f"Run one read-only command in the repository: {', '.join(sorted(ALLOWED))}.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]


def run(command: str) -> str:
    words = shlex.split(command)
    if not words or words[0] not in ALLOWED:
        return f"refused: only {', '.join(sorted(ALLOWED))}"
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return (done.stdout + done.stderr)[:2000] or "(no output)"


def planned(turn: tenuto.Turn, step: int) -> tuple[dict[str, object], list[tenuto.ToolCall]]:
    """The assistant message and tool calls of a turn; those of the plan when the model called none."""
    if turn.tool_calls or step >= len(PLAN):
        return turn.message, list(turn.tool_calls)
    raw = json.dumps({"command": PLAN[step]})
    call = tenuto.ToolCall(f"plan-{step}", "bash", {"command": PLAN[step]}, raw)
    spoken = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": raw}}
    return {**turn.message, "tool_calls": [spoken]}, [call]


def main(base_url: str | None, model: str | None, task: str) -> None:
    with tenuto.connect_sync(base_url) as tn, tn.session(model=model, agent="coding-agent") as session:
        messages: list[dict[str, object]] = [tenuto.system("You are a coding agent."), tenuto.user(task)]
        for step in range(len(PLAN) + 3):
            with session.stream(messages, tools=TOOLS, max_tokens=64) as stream:
                for event in stream:
                    print(event.text, end="", flush=True)
            message, calls = planned(stream.turn, step)
            messages.append(message)
            usage = stream.turn.usage
            print(f"\n  [turn {step}: first token after {stream.turn.ttft_s or 0:.3f} s, {usage.by_tier}]")
            if not calls:
                break
            for call in calls:
                with session.pause("tool", call) as gap:
                    output = run(str(call.arguments.get("command", "")))
                print(f"  $ {call.arguments.get('command')}  [{gap.duration_s:.3f} s]")
                messages.append(tenuto.tool_result(call, output))
        print(f"hit ratio {session.usage.cache_hit_ratio:.2f}, misses {session.usage.misses}, hints {tn.hints.stats}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", default="How long is the quickstart?")
    parser.add_argument("--base-url", help="default: TENUTO_BASE_URL, else http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the server's")
    args = parser.parse_args()
    main(args.base_url, args.model, args.task)
