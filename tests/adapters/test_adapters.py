"""Each adapter with the real library, against the fake server: a tool round trip, its hints, and the same without them.

A library that is not installed skips its tests; nothing of a library is doubled.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import tenuto
from tenuto.client import Client
from tenuto.fake_server import FakeServer


def library(name: str) -> Any:
    """The library, or a skip; what it says about itself while it is imported is not this project's matter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"{name} is not installed")


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
LOOP = asyncio.Runner()  # one for all: the libraries keep things for the loop that they first saw
TOOL_S = 0.15  # long enough for the hint to be on its way before the pause is over
CALL = ("run_tests", {"command": "pytest -q"})


@pytest.fixture(scope="module", autouse=True)
def _loop() -> Iterator[None]:
    yield
    LOOP.close()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    with FakeServer() as server:
        monkeypatch.setenv("TENUTO_BASE_URL", server.url)
        monkeypatch.setenv("TENUTO_HISTORY", "off")
        for name in ("TENUTO_API_KEY", "TENUTO_DISABLED"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
        monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
        monkeypatch.setenv("LANGSMITH_TRACING", "false")
        yield server


@contextlib.contextmanager
def _async_client() -> Iterator[Any]:
    """A client of the SDK that is closed again: the libraries' own ones live as long as the process."""
    sdk = library("openai").AsyncOpenAI()
    try:
        yield sdk
    finally:
        LOOP.run(sdk.close())


def _http() -> Any:
    """The HTTP library that the installed SDK is built on."""
    return library("httpx2" if int(library("openai").__version__.partition(".")[0]) >= 3 else "httpx")


def openai_agents(session: Any) -> str:
    agents = library("agents")
    adapter = importlib.import_module("tenuto.adapters.openai_agents")

    @agents.function_tool
    def run_tests(command: str) -> str:
        """Runs tests."""
        time.sleep(TOOL_S)
        return f"ran {command}"

    with _async_client() as sdk:
        model = agents.OpenAIResponsesModel(model="fake", openai_client=sdk)
        agent = agents.Agent(name="a", instructions="Be terse.", tools=[run_tests], model=model)
        result = LOOP.run(agents.Runner.run(agent, "fix it", **adapter.run_options(session)))
        return str(result.final_output)


def pydantic_ai(session: Any) -> str:
    module = library("pydantic_ai")
    library("openai")
    models = library("pydantic_ai.models.openai")
    adapter = importlib.import_module("tenuto.adapters.pydantic_ai")
    provider = library("pydantic_ai.providers.openai").OpenAIProvider

    def run_tests(command: str) -> str:
        """Runs tests."""
        time.sleep(TOOL_S)
        return f"ran {command}"

    with _async_client() as sdk:
        model = models.OpenAIChatModel("fake", provider=provider(openai_client=sdk))
        agent = module.Agent(model, tools=[run_tests], capabilities=[adapter.capability(session)])
        return str(LOOP.run(agent.run("fix it")).output)


def langchain(session: Any) -> str:
    agents, chat = library("langchain.agents"), library("langchain_openai")
    tools = library("langchain_core.tools")
    adapter = importlib.import_module("tenuto.adapters.langchain")

    @tools.tool
    def run_tests(command: str) -> str:
        """Runs tests."""
        time.sleep(TOOL_S)
        return f"ran {command}"

    with _http().Client() as http:
        model = chat.ChatOpenAI(model="fake", api_key="k", http_client=http)
        agent = agents.create_agent(model, [run_tests], middleware=[adapter.middleware(session)])
        answer = agent.invoke({"messages": [{"role": "user", "content": "fix it"}]})
        return str(answer["messages"][-1].content)


def langchain_async(session: Any) -> str:
    agents, chat = library("langchain.agents"), library("langchain_openai")
    tools = library("langchain_core.tools")
    adapter = importlib.import_module("tenuto.adapters.langchain")

    @tools.tool
    async def run_tests(command: str) -> str:
        """Runs tests."""
        time.sleep(TOOL_S)
        return f"ran {command}"

    async def ask() -> Any:
        async with _http().AsyncClient() as http:
            with _http().Client() as unused:
                model = chat.ChatOpenAI(model="fake", api_key="k", http_async_client=http, http_client=unused)
                agent = agents.create_agent(model, [run_tests], middleware=[adapter.middleware(session)])
                return await agent.ainvoke({"messages": [{"role": "user", "content": "fix it"}]})

    return str(LOOP.run(ask())["messages"][-1].content)


FRAMEWORKS: list[Callable[[Any], str]] = [openai_agents, pydantic_ai, langchain, langchain_async]


@pytest.mark.parametrize("run", FRAMEWORKS)
def test_a_tool_round_trip_is_told(fake: FakeServer, run: Callable[[Any], str]) -> None:
    fake.reply("", CALL)
    fake.reply("all green")
    with Client() as tn, tn.session("fix-42") as session:
        assert run(session) == "all green"
        told = fake.hints.wait_for("agent.pause", 2)
        assert tn.hints.flush(5.0)
    assert [(p.kind, p.tool, p.program) for p in told] == [("tool", "run_tests", "pytest"), ("human", None, None)]
    assert {p.session for p in told} == {"fix-42"}
    assert [r.headers.get("x-session-id") for r in fake.chats] == ["fix-42"] * 2
    last = json.dumps(fake.chats[-1].body)
    assert "ran pytest -q" in last
    fake.hints.wait_for("agent.end")


@pytest.mark.parametrize("run", FRAMEWORKS)
def test_hints_lost_change_nothing(fake: FakeServer, run: Callable[[Any], str]) -> None:
    fake.faults.hint_status = 500
    fake.reply("", CALL)
    fake.reply("all green")
    with Client() as tn, tn.session("fix-42") as session:
        assert run(session) == "all green"
    assert fake.hints.seen == []
    assert len(fake.chats) == 2


@pytest.mark.parametrize("run", FRAMEWORKS)
def test_a_tool_that_fails_ends_its_pause(fake: FakeServer, run: Callable[[Any], str]) -> None:
    """The arguments do not fit the tool: the framework reports that to the model, and nothing stays open."""
    fake.reply("", ("run_tests", {"wrong": 1}))
    fake.reply("gave up")
    with Client() as tn, tn.session("fix-43") as session:
        assert run(session) == "gave up"
        assert [p.kind for p in session.open_pauses] == ["human"]


@pytest.mark.parametrize(
    ("sdk", "path"), [("openai", "/v1/chat/completions"), ("anthropic", "/v1/messages")], ids=["openai", "anthropic"]
)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_the_sdks_own_clients(fake: FakeServer, sdk: str, path: str, asynchronous: bool) -> None:
    module = library(sdk)
    adapter = importlib.import_module(f"tenuto.adapters.{sdk}")
    fake.reply("", CALL)
    made = (adapter.async_client if asynchronous else adapter.client)()
    expected = {"openai": ("OpenAI", "AsyncOpenAI"), "anthropic": ("Anthropic", "AsyncAnthropic")}[sdk][asynchronous]
    assert type(made) is getattr(module, expected)

    def ask(*more: dict[str, str]) -> Any:
        messages = [{"role": "user", "content": "fix it"}, *more]
        if sdk == "openai":
            return made.chat.completions.create(model="fake", messages=messages)
        return made.messages.create(model="fake", messages=messages, max_tokens=100)

    more = [{"role": "assistant", "content": "running"}, {"role": "user", "content": "and?"}]

    async def both() -> None:
        await ask()
        await asyncio.sleep(TOOL_S)
        await ask(*more)
        await made.close()

    if asynchronous:
        LOOP.run(both())
    else:
        ask()
        time.sleep(TOOL_S)
        ask(*more)
        made.close()
    assert [r.path for r in fake.chats] == [path] * 2
    sessions = {r.headers["x-session-id"] for r in fake.chats}
    assert len(sessions) == 1
    told = fake.hints.wait_for("agent.pause", 1)
    assert (told[0].kind, told[0].tool, told[0].program) == ("tool", "run_tests", "pytest")


def test_without_a_session_the_running_one_is_used(fake: FakeServer) -> None:
    from tenuto.adapters.gaps import Gaps

    with Client() as tn, tn.session("running") as session:
        assert Gaps(None, "x").session is session
    assert tenuto.current_session() is None


class Model:
    """The part of a mini-swe-agent model that its protocol asks for, recording what it is given."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(model_name="m", model_kwargs={"temperature": 0})
        self.asked: list[Any] = []
        self.n_calls = 0

    def query(self, messages: list[Any], **kwargs: Any) -> dict[str, Any]:
        self.asked.append(messages)
        return {"role": "assistant", "content": "ok"}


class Environment:
    def __init__(self) -> None:
        self.config = SimpleNamespace(cwd="/")

    def execute(self, action: Any, cwd: str = "") -> dict[str, Any]:
        if action == {"command": "false"}:
            raise RuntimeError("no")
        return {"output": str(action), "returncode": 0}


def test_mini_swe_agent_by_its_protocols(fake: FakeServer) -> None:
    """Structural: the package itself runs in the tests of real agents."""
    from tenuto.adapters.mini_swe_agent import wrap_env, wrap_model

    with Client() as tn, tn.session("mini") as session:
        inner = Model()
        model, env = wrap_model(inner, session), wrap_env(Environment(), session)
        assert model.query([{"role": "user"}], stop=1) == {"role": "assistant", "content": "ok"}
        assert env.execute({"command": "make test"}) == {"output": "{'command': 'make test'}", "returncode": 0}
        with pytest.raises(RuntimeError, match="no"):
            env.execute({"command": "false"})
        assert session.open_pauses == []
        model.n_calls = 3
        assert inner.n_calls == 3
        assert model.config is inner.config
        assert inner.config.model_kwargs["extra_headers"] == {"x-session-id": "mini"}
        assert tn.hints.flush(5.0)
    assert [e.key.program for e in [session.pause("tool", name="bash", command="make test")]] == ["make"]


def test_openhands_events_by_their_names(fake: FakeServer) -> None:
    from tenuto.adapters.openhands import callback

    def event(name: str, **fields: Any) -> Any:
        return type(name, (), fields)()

    with Client() as tn, tn.session("conversation") as session:
        tell = callback(session)
        tell(event("MessageEvent", source="user"))
        tell(event("ActionEvent", tool_call_id="1", tool_name="terminal", action=event("A", command="make test")))
        assert [(p.kind, p.key.tool, p.key.program) for p in session.open_pauses] == [("tool", "terminal", "make")]
        tell(event("ObservationEvent", tool_call_id="1"))
        assert session.open_pauses == []
        tell(event("ActionEvent", tool_call_id="2", tool_name="finish"))
        assert session.open_pauses == []  # an answer, not a tool that runs
        tell(event("ObservationEvent", tool_call_id="2", tool_name="finish"))
        assert [p.kind for p in session.open_pauses] == ["human"]
        tell(event("CondensationRequest"))
        tell(event("Condensation"))
        tell(event("PauseEvent"))
        tell(event("MessageEvent", source="agent"))
        assert [p.kind for p in session.open_pauses] == ["human"]
        assert [c.phase for c in fake.hints.wait_for("agent.compaction", 2)] == ["begin", "commit"]


def test_adapters_import_no_library_of_their_own_accord() -> None:
    names = ("openai", "anthropic", "openai_agents", "pydantic_ai", "langchain", "mini_swe_agent", "openhands")
    code = f"import sys\nfor name in {names!r}:\n    __import__('tenuto.adapters.' + name)\nprint(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"openai", "anthropic", "agents", "pydantic_ai", "langchain", "minisweagent", "openhands"} & set(loaded)
