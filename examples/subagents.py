"""Subagents: one session forks three children that start on its prefix, side by side, and joins their reports.

    python examples/subagents.py --base-url http://127.0.0.1:8000

``fan_out`` tells the server which prompt the children will share, so that it is kept and computed once.
"""

import argparse

import anyio

import tenuto

QUESTIONS = {
    "callers": "Which functions call parse()?",
    "tests": "Which tests cover parse()?",
    "docs": "Where is parse() documented?",
}
SOURCE = "\n".join(f"def parse_{i}(text): return text.split({i!r})" for i in range(40))


async def explore(child: tenuto.AsyncSession, question: str, reports: dict[str, str]) -> None:
    async with child:  # leaving the block ends the child and tells its parent's KV that it has joined
        turn = await child.chat([*child.history, tenuto.user(question)], max_tokens=24)
        reports[question] = turn.text
        print(f"{child.agent}: {turn.usage.cached_tokens} of {turn.usage.prompt_tokens} tokens were the parent's")


async def main(base_url: str | None, model: str | None) -> None:
    async with tenuto.connect(base_url) as tn, tn.session(model=model, agent="lead") as lead:
        messages = [
            tenuto.system(f"You review this module:\n{SOURCE}"),
            tenuto.user("Read the module. Three colleagues will then look into it."),
        ]
        turn = await lead.chat(messages, max_tokens=24)
        messages.append(turn.message)

        reports: dict[str, str] = {}
        children = lead.fan_out(list(QUESTIONS))
        async with lead.pause("subagent"), anyio.create_task_group() as tasks:
            for child, question in zip(children, QUESTIONS.values(), strict=True):
                tasks.start_soon(explore, child, question, reports)

        summary = "\n".join(f"{question} {answer}" for question, answer in reports.items())
        turn = await lead.chat([*messages, tenuto.user(f"They report:\n{summary}\nConclude.")], max_tokens=24)
        print(f"lead: {turn.text}\nlead: {turn.usage.by_tier}, hit ratio {lead.usage.cache_hit_ratio:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", help="default: TENUTO_BASE_URL, else http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the server's")
    args = parser.parse_args()
    anyio.run(main, args.base_url, args.model)
