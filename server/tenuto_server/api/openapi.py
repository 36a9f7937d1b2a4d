"""The description of the API at ``/openapi.json``: what the routes take, from the models that they check requests with.

Holds no state. Bodies are read by our own code (for limits and for errors in the dialect's shape), so the framework does not
know them; they are added here, with the items of messages, inputs and tools as clients commonly send them. The server
accepts more than is described: unknown fields, blocks and items.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from tenuto.wire import ACTIONS, Envelope
from tenuto_server.api.chat_request import ROLES
from tenuto_server.api.messages_request import CountRequest, MessagesRequest
from tenuto_server.api.openai_completions import DetokenizeRequest, TokenizeRequest
from tenuto_server.api.responses_request import ResponsesRequest
from tenuto_server.api.schema import STOPS_MAX, ChatRequest, CompletionRequest

Json = dict[str, Any]


class SessionRequest(BaseModel):
    """``session_id``: the session; a new one may be opened without."""

    session_id: str


BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/compact": ResponsesRequest,
    "/v1/responses/input_tokens": ResponsesRequest,
    "/v1/kv_hints": Envelope,
    "/open_session": SessionRequest,
    "/close_session": SessionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
"""What each route takes with POST."""

_STRING: Json = {"type": "string"}
_OBJECT: Json = {"type": "object"}


def _object(required: Json, **optional: Json) -> Json:
    return {"type": "object", "required": list(required), "properties": {**required, **optional}}


def _content(*blocks: Json) -> Json:
    return {"anyOf": [_STRING, {"type": "array", "items": {"anyOf": list(blocks)}}]}


_TEXT = _object({"type": {"const": "text"}, "text": _STRING})
_USE = _object(
    {"type": {"const": "tool_use"}, "id": _STRING, "name": {"type": "string", "minLength": 1}, "input": _OBJECT}
)
_RESULT = _object({"type": {"const": "tool_result"}, "tool_use_id": _STRING, "content": _content(_TEXT)})
_THINKING = _object({"type": {"const": "thinking"}, "thinking": _STRING}, signature=_STRING)
_NAME: Json = {"type": "string", "minLength": 1, "maxLength": 64}
_FUNCTION = _object({"name": _NAME}, description=_STRING, parameters=_OBJECT)
_CALL = _object(
    {"id": _STRING, "type": {"const": "function"}, "function": _object({"name": _NAME, "arguments": _STRING})}
)
_INPUT_TEXT = _object({"type": {"enum": ["input_text", "output_text"]}, "text": _STRING})

_ITEMS: dict[str, dict[str, Json]] = {
    "ChatRequest": {
        "messages": _object(
            {"role": {"enum": list(ROLES)}, "content": {"anyOf": [*_content(_TEXT)["anyOf"], {"type": "null"}]}},
            tool_calls={"type": "array", "items": _CALL},
            tool_call_id=_STRING,
            name=_STRING,
        ),
        "tools": _object({"type": {"const": "function"}, "function": _FUNCTION}),
    },
    "MessagesRequest": {
        "messages": {
            "anyOf": [
                _object({"role": {"const": "user"}, "content": _content(_TEXT, _RESULT)}),
                _object({"role": {"const": "assistant"}, "content": _content(_TEXT, _USE, _THINKING)}),
            ]
        },
        "tools": _object({"name": _NAME, "input_schema": _OBJECT}, description=_STRING),
        "system": _TEXT,
    },
    "ResponsesRequest": {
        "input": {
            "anyOf": [
                _object(
                    {"role": {"enum": ["user", "assistant", "system", "developer"]}, "content": _content(_INPUT_TEXT)},
                    type={"const": "message"},
                ),
                _object({"type": {"const": "function_call"}, "call_id": _STRING, "name": _NAME, "arguments": _STRING}),
                _object({"type": {"const": "function_call_output"}, "call_id": _STRING, "output": _STRING}),
            ]
        },
        "tools": _object({"type": {"const": "function"}, "name": _NAME}, description=_STRING, parameters=_OBJECT),
    },
}
_ITEMS["Envelope"] = {
    "actions": _object(
        {"action_id": _NAME, "action_type": {"enum": sorted(ACTIONS)}},
        payload=_object({"session": _NAME}, seq={"type": "integer", "minimum": 0}),
    )
}
_ITEMS["CompletionRequest"] = {"prompt": {"type": "integer", "minimum": 0}}
_ITEMS["TokenizeRequest"] = _ITEMS["ChatRequest"]
_ITEMS["DetokenizeRequest"] = {"tokens": {"type": "integer", "minimum": 0}}
_ITEMS["CountRequest"] = _ITEMS["MessagesRequest"]

# Fields that are known and not implemented: only what says nothing is accepted.
_NEUTRAL: dict[str, list[Any]] = {
    "n": [1, None],
    "best_of": [1, None],
    "frequency_penalty": [0, None],
    "presence_penalty": [0, None],
    "repetition_penalty": [1, None],
    "min_p": [0, None],
    "logit_bias": [{}, None],
    "logprobs": [None],
    "top_logprobs": [0, None],
    "suffix": ["", None],
    "echo": [False, None],
    "background": [False, None],
    "modalities": [["text"], None],
}
_CHOICE: Json = {"anyOf": [{"enum": ["auto", "none", "required", None]}, _OBJECT]}
_STOP_FIELDS = ("stop", "stop_sequences")
_STOPS: Json = {"type": "array", "maxItems": STOPS_MAX, "items": {"type": "string", "minLength": 1}}

_ERROR = _object({"error": _object({"message": _STRING, "type": _STRING}, code={}, param={})})
_REFUSALS = ("400", "401", "404", "405", "413", "415", "429", "431", "500", "503")


def describe(app: FastAPI) -> None:
    """Makes ``app.openapi()`` the whole description."""

    def description() -> Json:
        if app.openapi_schema is None:
            app.openapi_schema = _description(app)
        return app.openapi_schema

    app.openapi = description  # type: ignore[method-assign]


def _description(app: FastAPI) -> Json:
    found = get_openapi(title=app.title, version="1", routes=app.routes)
    schemas: Json = found.setdefault("components", {}).setdefault("schemas", {})
    schemas["Error"] = _ERROR
    for model in BODIES.values():
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[model.__name__] = schema
        properties = schema["properties"]
        properties |= {name: {"enum": values} for name, values in _NEUTRAL.items() if name in properties}
        if "tool_choice" in properties and model not in (CountRequest, MessagesRequest):
            properties["tool_choice"] = _CHOICE
        properties |= {name: {"anyOf": [_STOPS, {"type": "null"}]} for name in _STOP_FIELDS if name in properties}
        for name, item in _ITEMS.get(model.__name__, {}).items():
            _set_items(properties[name], item)
    refusal = {"$ref": "#/components/schemas/Error"}
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            for status in _REFUSALS:
                told = {"description": "Refused.", "content": {"application/json": {"schema": refusal}}}
                operation["responses"].setdefault(status, told)
            if method == "post" and path in BODIES:
                body = {"$ref": f"#/components/schemas/{BODIES[path].__name__}"}
                operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return found


def _set_items(schema: Json, item: Json) -> None:
    """Says what stands in the arrays of a field."""
    for form in (schema, *schema.get("anyOf", ())):
        if form.get("type") == "array":
            form["items"] = item
