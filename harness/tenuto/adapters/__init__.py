"""One line for each framework: hints for an agent that keeps its own library. Nothing is imported until it is used.

    openai, anthropic       client(), async_client(): the SDK's own client, pointed at the server and wrapped
    openai_agents           Runner.run(agent, task, **run_options(session))
    pydantic_ai             Agent(model, capabilities=[capability(session)])
    langchain               create_agent(model, tools, middleware=[middleware(session)])
    mini_swe_agent          DefaultAgent(wrap_model(model, session), wrap_env(env, session))
    openhands               Conversation(agent, callbacks=[callback(session)])

``session`` is a session of a ``tenuto`` client; without one, the session whose ``with`` block is running, else a new one
on the server that ``TENUTO_BASE_URL`` names. Hints fail open here as everywhere: no adapter raises into a run.
"""
