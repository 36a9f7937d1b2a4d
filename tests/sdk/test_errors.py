"""Errors parsed from answers, and the rule of retries."""

from __future__ import annotations

import json

import pytest

import tenuto
from tenuto.errors import error_from_response, parse_retry_after
from tenuto.retry import retry_delay


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, tenuto.BadRequestError),
        (401, tenuto.AuthenticationError),
        (403, tenuto.PermissionDeniedError),
        (404, tenuto.NotFoundError),
        (409, tenuto.ConflictError),
        (413, tenuto.PayloadTooLargeError),
        (418, tenuto.APIStatusError),
        (422, tenuto.UnprocessableEntityError),
        (429, tenuto.RateLimitError),
        (500, tenuto.InternalServerError),
        (503, tenuto.InternalServerError),
    ],
)
def test_openai_error_shape(status: int, kind: type[tenuto.APIStatusError]) -> None:
    body = {"error": {"message": "too long", "type": "invalid_request_error", "param": "messages", "code": "length"}}
    headers = {"retry-after": "1.5", "x-request-id": "req-7"}
    error = error_from_response(status, headers, json.dumps(body).encode())
    assert type(error) is kind
    assert isinstance(error, tenuto.APIError)
    assert isinstance(error, tenuto.TenutoError)
    assert str(error) == f"{status}: too long"
    assert (error.type, error.param, error.code) == ("invalid_request_error", "messages", "length")
    assert (error.retry_after_s, error.request_id, error.body) == (1.5, "req-7", body)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"plain text", "500: plain text"),
        (b"", "500: no detail"),
        (b'{"error": "as a string"}', "500: as a string"),
        (b'{"detail": "other shape"}', "500: {'detail': 'other shape'}"),
        (b"\xff\xfe", "500: \ufffd\ufffd"),
        (b"[1]", "500: [1]"),
    ],
)
def test_other_error_shapes(content: bytes, message: str) -> None:
    error = error_from_response(500, {}, content)
    assert str(error) == message
    assert error.retry_after_s is None


@pytest.mark.parametrize("value", [None, "", "Wed, 21 Oct 2026 07:28:00 GMT", "-1", "nan", "inf"])
def test_retry_after_that_names_no_delay(value: str | None) -> None:
    assert parse_retry_after(value) is None


def test_retry_delay_doubles_from_half_a_second_to_eight() -> None:
    error = tenuto.APIConnectionError("gone")
    for attempt, full in enumerate([0.5, 1.0, 2.0, 4.0, 8.0, 8.0]):
        delays = [retry_delay(error, attempt, 10) for _ in range(50)]
        assert all(d is not None and 0.75 * full <= d <= full for d in delays)
        assert len(set(delays)) > 1  # jitter
    assert retry_delay(error, 2, 2) is None


def test_what_is_worth_a_retry() -> None:
    def status(code: int, after: float | None = None) -> tenuto.APIStatusError:
        return tenuto.APIStatusError("x", status=code, retry_after_s=after)

    assert retry_delay(status(429, 0.0), 0, 2) == 0.0
    assert retry_delay(status(503, 12.0), 0, 2) == 12.0
    assert retry_delay(status(503, 3600.0), 0, 2) is None
    for code in (400, 401, 404, 422):
        assert retry_delay(status(code), 0, 2) is None


def test_prefix_error_is_an_assertion() -> None:
    assert issubclass(tenuto.PrefixDivergedError, AssertionError)
    assert issubclass(tenuto.APITimeoutError, tenuto.APIConnectionError)
