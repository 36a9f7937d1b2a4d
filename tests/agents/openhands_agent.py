"""An agent on the OpenHands SDK, run by its own interpreter: one task, with Tenuto's callback where ``ADAPTER`` is set."""

from __future__ import annotations

import os
import uuid

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.terminal import TerminalTool
from pydantic import SecretStr

TASK = "make an openhands trip"


def main() -> None:
    """Prints how the conversation ended."""
    url, key = os.environ["LLM_BASE_URL"], SecretStr(os.environ["LLM_API_KEY"])
    llm = LLM(model=os.environ["LLM_MODEL"], api_key=key, base_url=url, usage_id="agent", num_retries=0)
    agent = Agent(llm=llm, tools=[Tool(name=TerminalTool.name)])
    name = uuid.uuid4()
    options = {"agent": agent, "workspace": os.getcwd(), "conversation_id": name, "visualizer": None}
    if not os.environ.get("ADAPTER"):
        talk = Conversation(**options)
        talk.send_message(TASK)
        talk.run()
    else:
        import tenuto
        from tenuto.adapters.openhands import callback

        with tenuto.connect_sync(url.removesuffix("/v1")) as tn, tn.session(str(name), agent="openhands") as session:
            talk = Conversation(**options, callbacks=[callback(session)])
            talk.send_message(TASK)
            talk.run()
            print("open", [pause.kind for pause in session.open_pauses])
            assert tn.hints.flush(5.0)
    print(talk.state.execution_status.value)
    talk.close()


if __name__ == "__main__":
    main()
