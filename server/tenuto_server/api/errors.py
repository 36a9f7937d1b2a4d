"""Every refusal of the HTTP surface, in the error shape of the dialect that was spoken. Holds no state.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}           OpenAI, and everything of ours
    {"type": "error", "error": {"type": ..., "message": ...}, "request_id": ...}  Anthropic Messages

``message`` names the field and the limit, ``param`` the field as a path, ``code`` is stable and for programs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
}

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_MESSAGES_PATH = "/v1/messages"
_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}

# Parts of an error's location that name a branch of a union, not a field.
_BRANCHES = frozenset({"str", "int", "float", "bool", "list", "dict"})


class ApiError(Exception):
    """A refusal with its HTTP status. Raise it anywhere below a route. ``messages_text``: the message in the words that
    clients of the Messages API look for."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        messages_text: str | None = None,
    ) -> None:
        super().__init__(message)
        self.messages_text = messages_text
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def messages_body(self, request_id: str = "") -> dict[str, Any]:
        """The JSON object in the shape of the Messages API."""
        kind = _MESSAGES_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        error = {"type": kind, "message": self.messages_text or self.message, "code": self.code}
        return {"type": "error", "error": error, "request_id": request_id}

    def response(self, path: str = "", request_id: str = "") -> Response:
        """The whole answer, in the dialect of ``path``."""
        body = self.messages_body(request_id) if path.startswith(_MESSAGES_PATH) else self.body()
        return Response(encode_json(body), self.status, self.headers, "application/json")


def encode_json(value: Any) -> bytes:
    """Compact UTF-8 JSON. A lone surrogate, which a client's escape can smuggle into a message, becomes ``?``."""
    return _ENCODER.encode(value).encode("utf-8", "replace")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request says something that cannot be done; ``param`` names the field."""
    return ApiError(400, message, param=param, code=code)


def too_long(field: str, have: int, room: int) -> ApiError:
    """400: the prompt leaves no room to answer."""
    message = f"this model's context is {room} tokens, of which at least one is for the answer; the prompt has {have}"
    return ApiError(
        400,
        f"{field}: {message}",
        param=field,
        code="context_length_exceeded",
        messages_text=f"prompt is too long: {have} tokens > {room - 1} maximum",
    )


def unsupported(param: str, message: str) -> ApiError:
    """400: the field would change the tokens and this server does not implement it."""
    return bad_request(f"{param}: {message}", param, "unsupported_value")


def busy(message: str, code: str, retry_after_s: int = 1) -> ApiError:
    """429 with Retry-After (whole seconds)."""
    return ApiError(429, message, code=code, headers={"retry-after": str(retry_after_s)})


def invalid(error: ValidationError, prefix: str = "") -> ApiError:
    """400 from a validation error: the first field at fault and what is wrong with it, never its value."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    path = prefix
    for part in first["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in _BRANCHES:
            path += f".{part}" if path else part
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    return bad_request(f"{path or 'body'}: {first['msg']}", path or None, code)


async def on_api_error(request: Request, error: Exception) -> Response:
    """Starlette handler of ``ApiError``."""
    assert isinstance(error, ApiError)
    return answer(request, error)


def answer(request: Request, error: ApiError) -> Response:
    """A refusal in the dialect of the request."""
    return error.response(request.url.path, request.scope.get("request_id", ""))


async def on_http_error(request: Request, error: Exception) -> Response:
    """Starlette handler of the framework's own refusals (no such route, wrong method)."""
    status = getattr(error, "status_code", 500)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(status)
    message = {
        404: f"unknown request URL: {request.method} {request.url.path}",
        405: f"{request.method} is not allowed on {request.url.path}",
    }.get(status, str(getattr(error, "detail", "request refused")))
    return answer(request, ApiError(status, message, code=code, headers=getattr(error, "headers", None)))


async def on_crash(request: Request, error: Exception) -> Response:
    """Starlette handler of last resort: says nothing of the inside; the traceback goes to the log."""
    return answer(request, ApiError(500, f"internal error ({type(error).__name__})", code="internal_error"))
