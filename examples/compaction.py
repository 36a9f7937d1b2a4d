"""Compaction: a long history is replaced by its summary, without paying for either prompt twice.

    python examples/compaction.py --base-url http://127.0.0.1:8000

The summary is asked for with the live prompt plus one message, so all of it is a cache hit; ``commit`` tells the server
which prompt comes next, so that it can be computed before the turn that needs it. A keepalive covers the person's pause.
"""

import argparse
import time

import tenuto

SYSTEM = "You keep notes for a developer. " + "Be brief and exact. " * 20


def main(base_url: str | None, model: str | None, think_s: float) -> None:
    with tenuto.connect_sync(base_url) as tn, tn.session(model=model, agent="notes") as session:
        messages: list[dict[str, object]] = [tenuto.system(SYSTEM)]
        for number in range(4):
            messages.append(tenuto.user(f"Note {number}: module {number} parses its input twice. " * 6))
            turn = session.chat(messages, max_tokens=16)
            messages.append(turn.message)
            print(f"turn {number}: {turn.usage.prompt_tokens} tokens, {turn.usage.cached_tokens} cached")

        with session.compaction(keep_messages=1) as compaction:
            ask = tenuto.user("Summarise all notes in one sentence.")
            summary = session.chat([*session.history, ask], max_tokens=32)
            print(f"summary call: {summary.usage.prompt_tokens} tokens, {summary.usage.cached_tokens} cached")
            messages = [tenuto.system(SYSTEM), tenuto.user(f"Notes so far: {summary.text}")]
            compaction.commit(messages)

        with session.pause("human"), session.keepalive(for_s=3600):
            time.sleep(think_s)

        turn = session.chat([*messages, tenuto.user("What should be fixed first?")], max_tokens=16)
        print(f"after compaction: {turn.usage.prompt_tokens} tokens, {turn.usage.by_tier}")
        for miss in turn.usage.misses:
            print(f"  recomputed {miss.tokens} tokens: {miss.label}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", help="default: TENUTO_BASE_URL, else http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the server's")
    parser.add_argument("--think-s", type=float, default=1.0, help="how long the person thinks, in seconds")
    args = parser.parse_args()
    main(args.base_url, args.model, args.think_s)
