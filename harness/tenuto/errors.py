"""Every exception the SDK raises. This module holds no state.

    TenutoError
    ├── APIError                        a request to the server went wrong
    │   ├── APIConnectionError          no answer: refused, reset, name not found
    │   │   └── APITimeoutError         no answer in time
    │   └── APIStatusError              an answer with an error status
    │       ├── BadRequestError             400
    │       ├── AuthenticationError         401
    │       ├── PermissionDeniedError       403
    │       ├── NotFoundError               404
    │       ├── ConflictError               409
    │       ├── PayloadTooLargeError        413
    │       ├── UnprocessableEntityError    422
    │       ├── RateLimitError              429
    │       └── InternalServerError         500 and above
    ├── HintRejectedError               a receipt said "rejected" or "missing"; only under strict=True
    ├── PrefixDivergedError             assert_prefix_stable() or a strict fork found a difference (also an AssertionError)
    ├── SessionClosedError              a session was used after end()
    └── TraceError                      a trace file that cannot be read

Hints never raise any of these into the agent: a lost hint is counted in ``client.hints.stats``.
``PrefixDivergedWarning`` is the one warning: a fork that is not strict does not start on its parent's prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


class TenutoError(Exception):
    """Root of every exception that this package raises on purpose."""


class APIError(TenutoError):
    """A request to the server failed. ``request_id`` names it in the server's log when the server told one."""

    def __init__(self, message: str, *, request_id: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id


class APIConnectionError(APIError):
    """The server could not be reached, or the connection broke before the answer was complete."""


class APITimeoutError(APIConnectionError):
    """The server did not answer within the timeout."""


class APIStatusError(APIError):
    """The server answered with an error status.

    ``status``: HTTP status. ``type``, ``code``, ``param``: the fields of the OpenAI error object where given.
    ``retry_after_s``: seconds, from the ``Retry-After`` header, else None. ``body``: the decoded answer.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        body: Any = None,
        type: str | None = None,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message, request_id=request_id)
        self.status = status
        self.body = body
        self.type = type
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s


class BadRequestError(APIStatusError):
    """400: the request is malformed; ``param`` names the field."""


class AuthenticationError(APIStatusError):
    """401: the API key is missing or unknown."""


class PermissionDeniedError(APIStatusError):
    """403: the API key may not do this."""


class NotFoundError(APIStatusError):
    """404: no such model, session or path."""


class ConflictError(APIStatusError):
    """409: the resource is in another state than the request expects."""


class PayloadTooLargeError(APIStatusError):
    """413: the body or a header exceeds the server's limit."""


class UnprocessableEntityError(APIStatusError):
    """422: well-formed, but not something the server can do."""


class RateLimitError(APIStatusError):
    """429: a limit was reached; ``retry_after_s`` says when to come back."""


class InternalServerError(APIStatusError):
    """500 and above: the server's own failure."""


class HintRejectedError(TenutoError):
    """A receipt said ``rejected`` or ``missing``; raised only by clients made with ``strict=True``."""

    def __init__(self, message: str, *, action_id: str, outcome: str) -> None:
        super().__init__(message)
        self.action_id = action_id
        self.outcome = outcome


class PrefixDivergedError(TenutoError, AssertionError):
    """Two prompts that should share a prefix do not; the message says where."""


class PrefixDivergedWarning(UserWarning):
    """A fork does not start on its parent's prompt, so that it shares less than it could; the message says where."""


class SessionClosedError(TenutoError):
    """The session has ended; open a new one."""


class TraceError(TenutoError):
    """A trace file is not readable: wrong version, broken line (the message names the line)."""


_BY_STATUS: dict[int, type[APIStatusError]] = {
    400: BadRequestError,
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    413: PayloadTooLargeError,
    422: UnprocessableEntityError,
    429: RateLimitError,
}


def error_from_response(status: int, headers: Mapping[str, str], content: bytes) -> APIStatusError:
    """Build the exception for an error answer.

    ``headers`` must look names up in lower case. The body may have the OpenAI error shape
    ``{"error": {"message", "type", "param", "code"}}``; anything else becomes the message, shortened.
    """
    body: Any = None
    try:
        body = json.loads(content)
    except ValueError:
        body = content.decode("utf-8", "replace")
    detail = body.get("error") if isinstance(body, dict) else None
    fields: dict[str, Any] = detail if isinstance(detail, dict) else {}
    message = fields.get("message")
    if not isinstance(message, str):
        message = (detail if isinstance(detail, str) else str(body))[:500] or "no detail"

    def text(name: str) -> str | None:
        value = fields.get(name)
        return None if value is None else str(value)

    kind = _BY_STATUS.get(status, InternalServerError if status >= 500 else APIStatusError)
    return kind(
        f"{status}: {message}",
        status=status,
        body=body,
        type=text("type"),
        code=text("code"),
        param=text("param"),
        retry_after_s=parse_retry_after(headers.get("retry-after")),
        request_id=headers.get("x-request-id"),
    )


def parse_retry_after(value: str | None) -> float | None:
    """Seconds of a ``Retry-After`` header in its numeric form; None if absent, a date, negative or not finite."""
    try:
        seconds = float(value) if value else -1.0
    except ValueError:
        return None
    return seconds if 0.0 <= seconds < float("inf") else None
