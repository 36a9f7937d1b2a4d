"""The smallest real model, held to a tool's schema: valid calls whatever it would rather say."""

import json

import openai
import pytest

from tenuto_server.commands import build_service
from tenuto_server.config import ServerConfig
from tenuto_server.errors import ModelError
from tenuto_server.model.load import resolve_model

pytestmark = [pytest.mark.model, pytest.mark.filterwarnings("ignore")]  # warnings of the library's own imports

UNITS, CITIES = ("celsius", "kelvin"), ("Rome", "Oslo", "Kyoto")
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": list(CITIES)},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "unit": {"type": "string", "enum": list(UNITS)},
    },
    "required": ["city", "days", "unit"],
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The forecast.", "parameters": WEATHER}}


@pytest.fixture(scope="module")
def client(site_class):
    pytest.importorskip("xgrammar", reason="the extra 'constrain' is not installed")
    try:
        resolve_model("smollm2-135m")
    except ModelError as missing:
        pytest.skip(str(missing))
    service = build_service(ServerConfig(model="smollm2-135m", device_bytes=48 * 2**20, host_bytes=0))
    site = site_class(service, None)
    site.start()
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key="x", max_retries=0) as client:
        yield client
    site.stop()


def check(text: str) -> None:
    found = json.loads(text)
    assert list(found) == ["city", "days", "unit"]
    assert found["city"] in CITIES
    assert type(found["days"]) is int
    assert 1 <= found["days"] <= 7
    assert found["unit"] in UNITS


def test_forced_calls_and_schemas_come_out_valid(client) -> None:
    talk = [{"role": "user", "content": "Will I need a coat in Oslo this week?"}]
    common = {"model": "smollm2-135m", "messages": talk, "max_tokens": 160, "seed": 3}
    forced = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    for temperature in (0.0, 1.5):
        choice = client.chat.completions.create(**common, **forced, temperature=temperature).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        [call] = choice.message.tool_calls
        assert call.function.name == "weather"
        check(call.function.arguments)
    schema = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": WEATHER, "strict": True}}
    choice = client.chat.completions.create(**common, response_format=schema, temperature=1.0).choices[0]
    assert choice.finish_reason == "stop"
    check(choice.message.content)
    # Cut off by the limit is the one way to get less than that, and it says so.
    short = client.chat.completions.create(**{**common, "max_tokens": 3}, response_format=schema).choices[0]
    assert short.finish_reason == "length"
