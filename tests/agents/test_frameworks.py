"""Python frameworks against ``tenuto serve``: the same agent, as it is and with its adapter, streamed and not.

Each one makes a tool round trip and is spoken to once more. Seen from the server: one session, a pause for the tool and one
for the person, all of the history cached; seen from the client: no warning.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import tenuto

from .conftest import Server

MODEL = "scripted"
MORE = "and now?"
TOOL_S = 0.1
CLIENTS = ("openai", "anthropic", "agents", "pydantic_ai", "langchain", "langgraph", "httpx", "httpx2", "tenuto")
LOOP = asyncio.Runner()  # one for all: the libraries keep things for the loop that they first saw


def library(name: str) -> Any:
    """The library, or a skip; what it says about itself while it is imported is not this project's matter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"{name} is not installed")


@dataclass
class Talk:
    """What a framework is asked to do. ``session``: for its adapter; None leaves the framework as it is."""

    url: str
    streams: bool
    task: str
    session: Any = None

    def run_tests(self, command: str) -> str:
        """Runs tests."""
        time.sleep(TOOL_S)
        return f"ran {command}"


@pytest.fixture(scope="module", autouse=True)
def _loop() -> Iterator[None]:
    yield
    LOOP.close()


@pytest.fixture
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TENUTO_API_KEY", "TENUTO_DISABLED", "OPENAI_BASE_URL", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "TENUTO_HISTORY": "off",
        "OPENAI_API_KEY": "k",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "LANGSMITH_TRACING": "false",
    }.items():
        monkeypatch.setenv(name, value)


# -- the SDKs: the loop is the user's own ---------------------------------------------------------------------------------

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


def _client(talk: Talk, name: str) -> Any:
    if talk.session is not None:
        module = __import__(f"tenuto.adapters.{name}", fromlist=["client"])
        return module.client(talk.url, session=talk.session.id, max_retries=0)
    kind = {"openai": "OpenAI", "anthropic": "Anthropic"}[name]
    base = f"{talk.url}/v1" if name == "openai" else talk.url
    return getattr(library(name), kind)(base_url=base, api_key="k", max_retries=0)


def openai_chat(talk: Talk) -> list[str]:
    library("openai")
    function = {"name": "run_tests", "description": "Runs tests.", "parameters": PARAMETERS}
    options: dict[str, Any] = {"model": MODEL, "tools": [{"type": "function", "function": function}]}
    messages: list[Any] = []
    said = []
    with _client(talk, "openai") as client:
        for text in (talk.task, MORE):
            messages.append({"role": "user", "content": text})
            while True:
                if talk.streams:
                    with client.chat.completions.stream(messages=messages, **options) as stream:
                        message = stream.get_final_completion().choices[0].message
                else:
                    message = client.chat.completions.create(messages=messages, **options).choices[0].message
                messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
                for call in message.tool_calls or ():
                    result = talk.run_tests(**json.loads(call.function.arguments))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
                if not message.tool_calls:
                    break
            said.append(message.content)
    return said


def openai_responses(talk: Talk) -> list[str]:
    library("openai")
    tool = {"type": "function", "name": "run_tests", "description": "Runs tests.", "parameters": PARAMETERS}
    options: dict[str, Any] = {"model": MODEL, "tools": [{**tool, "strict": False}], "store": False}
    items: list[Any] = []
    said = []
    with _client(talk, "openai") as client:
        for text in (talk.task, MORE):
            items.append({"role": "user", "content": text})
            while True:
                if talk.streams:
                    with client.responses.stream(input=items, **options) as stream:
                        answer = stream.get_final_response()
                else:
                    answer = client.responses.create(input=items, **options)
                items += [item.model_dump(exclude_none=True) for item in answer.output]
                calls = [item for item in answer.output if item.type == "function_call"]
                for call in calls:
                    result = talk.run_tests(**json.loads(call.arguments))
                    items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
                if not calls:
                    break
            said.append(answer.output_text)
    return said


def anthropic(talk: Talk) -> list[str]:
    library("anthropic")
    tool = {"name": "run_tests", "description": "Runs tests.", "input_schema": PARAMETERS}
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "tools": [tool]}
    messages: list[Any] = []
    said = []
    with _client(talk, "anthropic") as client:
        for text in (talk.task, MORE):
            messages.append({"role": "user", "content": text})
            while True:
                if talk.streams:
                    with client.messages.stream(messages=messages, **options) as stream:
                        answer = stream.get_final_message()
                else:
                    answer = client.messages.create(messages=messages, **options)
                blocks = [block.model_dump(include={"type", "text", "id", "name", "input"}) for block in answer.content]
                messages.append({"role": "assistant", "content": blocks})
                calls = [block for block in answer.content if block.type == "tool_use"]
                if not calls:
                    break
                results = [
                    {"type": "tool_result", "tool_use_id": call.id, "content": talk.run_tests(**call.input)}
                    for call in calls
                ]
                messages.append({"role": "user", "content": results})
            said.append("".join(block.text for block in answer.content))
    return said


# -- the frameworks: the loop is theirs -----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _async_openai(talk: Talk) -> Any:
    """A client of the SDK that is closed again: the frameworks' own ones live as long as the process."""
    async with library("openai").AsyncOpenAI(base_url=f"{talk.url}/v1", api_key="k", max_retries=0) as sdk:
        yield sdk


def _openai_agents(talk: Talk, model_class: str) -> list[str]:
    agents = library("agents")
    from tenuto.adapters.openai_agents import run_options

    async def both() -> list[str]:
        async with _async_openai(talk) as sdk:
            model = getattr(agents, model_class)(model=MODEL, openai_client=sdk)
            tool = agents.function_tool(talk.run_tests)
            agent = agents.Agent(name="a", instructions="Be terse.", tools=[tool], model=model)
            said: list[str] = []
            items: Any = talk.task
            options = run_options(talk.session) if talk.session is not None else {}
            for _ in range(2):
                if talk.streams:
                    result = agents.Runner.run_streamed(agent, items, **options)
                    async for _event in result.stream_events():
                        pass
                else:
                    result = await agents.Runner.run(agent, items, **options)
                said.append(str(result.final_output))
                items = [*result.to_input_list(), {"role": "user", "content": MORE}]
            return said

    return LOOP.run(both())


def openai_agents_responses(talk: Talk) -> list[str]:
    return _openai_agents(talk, "OpenAIResponsesModel")


def openai_agents_chat(talk: Talk) -> list[str]:
    return _openai_agents(talk, "OpenAIChatCompletionsModel")


def _pydantic_ai(talk: Talk, model_class: str) -> list[str]:
    module, models = library("pydantic_ai"), library("pydantic_ai.models.openai")
    provider = library("pydantic_ai.providers.openai").OpenAIProvider
    from tenuto.adapters.pydantic_ai import capability

    async def watch(context: Any, events: Any) -> None:
        async for _event in events:
            pass

    async def both() -> list[str]:
        async with _async_openai(talk) as sdk:
            model = getattr(models, model_class)(MODEL, provider=provider(openai_client=sdk))
            more = [capability(talk.session)] if talk.session is not None else []
            agent = module.Agent(model, instructions="Be terse.", tools=[talk.run_tests], capabilities=more)
            said: list[str] = []
            history: Any = None
            for text in (talk.task, MORE):
                handler = watch if talk.streams else None
                done = await agent.run(text, message_history=history, event_stream_handler=handler)
                said.append(str(done.output))
                history = done.all_messages()
            return said

    return LOOP.run(both())


def pydantic_ai_chat(talk: Talk) -> list[str]:
    return _pydantic_ai(talk, "OpenAIChatModel")


def pydantic_ai_responses(talk: Talk) -> list[str]:
    return _pydantic_ai(talk, "OpenAIResponsesModel")


def _langchain(talk: Talk, *, responses: bool) -> list[str]:
    agents, chat = library("langchain.agents"), library("langchain_openai")
    tools = library("langchain_core.tools")
    http = library("httpx2" if int(library("openai").__version__.partition(".")[0]) >= 3 else "httpx")
    from tenuto.adapters.langchain import middleware

    with http.Client() as connection:
        model = chat.ChatOpenAI(
            model=MODEL,
            api_key="k",
            base_url=f"{talk.url}/v1",
            http_client=connection,
            max_retries=0,
            streaming=talk.streams,
            use_responses_api=responses,
        )
        more = [middleware(talk.session)] if talk.session is not None else []
        agent = agents.create_agent(model, [tools.tool(talk.run_tests)], system_prompt="Be terse.", middleware=more)
        said: list[str] = []
        messages: list[Any] = []
        for text in (talk.task, MORE):
            messages.append({"role": "user", "content": text})
            if talk.streams:
                for state in agent.stream({"messages": messages}, stream_mode="values"):
                    messages = state["messages"]
            else:
                messages = agent.invoke({"messages": messages})["messages"]
            said.append(messages[-1].text)
        return said


def langchain_chat(talk: Talk) -> list[str]:
    return _langchain(talk, responses=False)


def langchain_responses(talk: Talk) -> list[str]:
    return _langchain(talk, responses=True)


FRAMEWORKS: list[Callable[[Talk], list[str]]] = [
    openai_chat,
    openai_responses,
    anthropic,
    openai_agents_chat,
    openai_agents_responses,
    pydantic_ai_chat,
    pydantic_ai_responses,
    langchain_chat,
    langchain_responses,
]


def _check(server: Server, before: set[str], name: str | None) -> None:
    (root,) = [view for id, view in server.tree().items() if id not in before]
    assert name in (None, root["id"])
    assert "parent" not in root
    assert root["turns"] == 3
    assert server.pauses(root["id"]) == ["tool", "human"]
    last = root["last"]
    assert sum(last["cached"].values()) >= 0.7 * last["prompt_tokens"]  # the history; what is new is short
    assert set(last["recomputed"]) <= {"cold"}


def _complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and r.name.startswith(CLIENTS)]


@pytest.mark.usefixtures("_offline")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("run", FRAMEWORKS)
class TestAFramework:
    def test_as_it_is(
        self, server: Server, caplog: pytest.LogCaptureFixture, run: Callable[[Talk], list[str]], streams: bool
    ) -> None:
        """Nothing names the session: its growing prompt does."""
        before = set(server.tree())
        task = f"make a framework trip: {run.__name__}, {streams}"
        assert run(Talk(server.url, streams, task)) == ["All green.", "ok"]
        _check(server, before, None)
        assert _complaints(caplog) == []

    def test_with_its_adapter(
        self, server: Server, caplog: pytest.LogCaptureFixture, run: Callable[[Talk], list[str]], streams: bool
    ) -> None:
        before = set(server.tree())
        name = f"{run.__name__}-{streams}"
        with tenuto.connect_sync(server.url) as tn, tn.session(name) as session:
            assert run(Talk(server.url, streams, "make a framework trip", session)) == ["All green.", "ok"]
            _check(server, before, name)
        assert server.tree()[name]["state"] == "ended"
        assert _complaints(caplog) == []
