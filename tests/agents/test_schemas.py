"""Frameworks that force a schema, against the smallest real model: what comes back is valid whatever it would rather say."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import pytest
from pydantic import BaseModel, Field

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
MODEL = "smollm2-135m"
ASK = "Will I need a coat in Oslo this week?"


class City(Enum):
    ROME = "Rome"
    OSLO = "Oslo"


class Weather(BaseModel):
    """The forecast to look up."""

    city: City
    days: int = Field(ge=1, le=7)


def library(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"{name} is not installed")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("xgrammar", reason="the extra 'constrain' is not installed")
    load = pytest.importorskip("tenuto_server.model.load", reason="the server is not installed")
    from tenuto_server.errors import ModelError

    try:
        load.resolve_model(MODEL)
    except ModelError as missing:
        pytest.skip(str(missing))
    folder = tmp_path_factory.mktemp("server")
    port, log = folder / "port", folder / "log"
    words = ["serve", "--model", MODEL, "--port", "0", "--port-file", str(port), "--device-bytes", "64MiB"]
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, "-m", "tenuto", *words], stdout=out, stderr=subprocess.STDOUT)
    try:
        give_up = time.monotonic() + 180
        while not port.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < give_up, log.read_text()
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port.read_text().strip()}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def openai_parse(url: str) -> Any:
    with library("openai").OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
        messages = [{"role": "user", "content": ASK}]
        answer = client.chat.completions.parse(
            model=MODEL, messages=messages, response_format=Weather, max_tokens=80, temperature=0
        )
        return answer.choices[0].message.parsed


def openai_responses_parse(url: str) -> Any:
    with library("openai").OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
        answer = client.responses.parse(
            model=MODEL, input=ASK, text_format=Weather, max_output_tokens=80, temperature=0
        )
        return answer.output_parsed


def anthropic_forced_tool(url: str) -> Any:
    tool = {"name": "weather", "description": "The forecast.", "input_schema": Weather.model_json_schema()}
    with library("anthropic").Anthropic(base_url=url, api_key="k", max_retries=0) as client:
        answer = client.messages.create(
            model=MODEL,
            max_tokens=80,
            extra_body={"temperature": 0},
            messages=[{"role": "user", "content": ASK}],
            tools=[tool],
            tool_choice={"type": "tool", "name": "weather"},
        )
        (block,) = answer.content
        assert (block.type, block.name, answer.stop_reason) == ("tool_use", "weather", "tool_use")
        return Weather.model_validate(block.input)


@contextlib.asynccontextmanager
async def _sdk(url: str) -> Any:
    async with library("openai").AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as sdk:
        yield sdk


def openai_agents_output(url: str) -> Any:
    agents = library("agents")

    async def ask() -> Any:
        async with _sdk(url) as sdk:
            model = agents.OpenAIChatCompletionsModel(model=MODEL, openai_client=sdk)
            settings = agents.ModelSettings(temperature=0, max_tokens=80)
            agent = agents.Agent(name="a", model=model, output_type=Weather, model_settings=settings)
            return (await agents.Runner.run(agent, ASK, max_turns=1)).final_output

    return asyncio.run(ask())


def _pydantic_ai(url: str, output: Callable[[Any], Any]) -> Any:
    module, models = library("pydantic_ai"), library("pydantic_ai.models.openai")
    provider = library("pydantic_ai.providers.openai").OpenAIProvider

    async def ask() -> Any:
        async with _sdk(url) as sdk:
            model = models.OpenAIChatModel(MODEL, provider=provider(openai_client=sdk))
            agent = module.Agent(model, output_type=output(module), model_settings={"temperature": 0, "max_tokens": 80})
            return (await agent.run(ASK)).output

    return asyncio.run(ask())


def pydantic_ai_tool_output(url: str) -> Any:
    return _pydantic_ai(url, lambda module: module.ToolOutput(Weather))


def pydantic_ai_native_output(url: str) -> Any:
    return _pydantic_ai(url, lambda module: module.NativeOutput(Weather))


def _langchain(url: str, method: str) -> Any:
    chat = library("langchain_openai")
    http = library("httpx2" if int(library("openai").__version__.partition(".")[0]) >= 3 else "httpx")
    with http.Client() as connection:
        model = chat.ChatOpenAI(
            model=MODEL,
            api_key="k",
            base_url=f"{url}/v1",
            http_client=connection,
            max_retries=0,
            max_tokens=80,
            temperature=0,
        )
        return model.with_structured_output(Weather, method=method).invoke(ASK)


def langchain_schema(url: str) -> Any:
    return _langchain(url, "json_schema")


def langchain_tool(url: str) -> Any:
    return _langchain(url, "function_calling")


FORCED: list[Callable[[str], Any]] = [
    openai_parse,
    openai_responses_parse,
    anthropic_forced_tool,
    openai_agents_output,
    pydantic_ai_tool_output,
    pydantic_ai_native_output,
    langchain_schema,
    langchain_tool,
]


@pytest.mark.parametrize("run", FORCED)
def test_a_forced_schema_comes_out_valid(url: str, monkeypatch: pytest.MonkeyPatch, run: Callable[[str], Any]) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    found = run(url)
    assert isinstance(found, Weather)
    assert found.city in City
    assert 1 <= found.days <= 7
    assert json.loads(found.model_dump_json())
