"""Quickstart: two turns with a tool pause between them, and what the cache kept.

    python examples/quickstart.py --base-url http://127.0.0.1:8000

The pause tells the server that a command is running and, from this machine's own history, how long it should take.
"""

import argparse
import subprocess
import sys

import anyio

import tenuto

COMMAND = [sys.executable, "-c", "import this"]


async def main(base_url: str | None, model: str | None) -> None:
    async with tenuto.connect(base_url) as tn:
        async with tn.session("quickstart", model=model) as session:
            messages = [
                tenuto.system("You are a terse assistant that reads the output of commands."),
                tenuto.user("I am about to run a Python command. Say when you are ready."),
            ]
            turn = await session.chat(messages, max_tokens=24)
            print(f"assistant: {turn.text}")

            async with session.pause("tool", name="bash", command=COMMAND) as gap:
                print(f"pause: expected {gap.forecast.p50_s:.2f} s, nine times in ten under {gap.forecast.p90_s:.2f} s")
                result = await anyio.run_process(COMMAND, stderr=subprocess.STDOUT)
            print(f"pause: took {gap.duration_s:.2f} s")

            messages += [turn.message, tenuto.user(f"It printed:\n{result.stdout.decode()}\nSummarise in one line.")]
            turn = await session.chat(messages, max_tokens=24)
            print(f"assistant: {turn.text}")
            print(
                f"tokens by tier: {turn.usage.by_tier}; hit ratio of the session: {session.usage.cache_hit_ratio:.2f}"
            )
            for miss in turn.usage.misses:
                print(f"recomputed {miss.tokens} tokens: {miss.label}")
        print(f"hints: {tn.hints.stats}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", help="default: TENUTO_BASE_URL, else http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the server's")
    args = parser.parse_args()
    anyio.run(main, args.base_url, args.model)
