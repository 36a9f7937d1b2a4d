"""When a failed request is sent again. One rule, no state; the clients do the waiting."""

from __future__ import annotations

import random

from tenuto.errors import APIError, APIStatusError

RETRY_FIRST_S = 0.5
RETRY_LAST_S = 8.0
RETRY_AFTER_S_MAX = 60.0
RETRY_STATUS = frozenset({408, 409, 429, 500, 502, 503, 504})


def retry_delay(error: APIError, attempt: int, max_retries: int) -> float | None:
    """Seconds to wait before the next attempt, or None to give up.

    0.5 s doubling to 8 s, less up to a quarter of jitter; ``Retry-After`` where the server gave one of at most 60 s.
    """
    if attempt >= max_retries:
        return None
    if isinstance(error, APIStatusError):
        if error.status not in RETRY_STATUS:
            return None
        if error.retry_after_s is not None:
            return error.retry_after_s if error.retry_after_s <= RETRY_AFTER_S_MAX else None
    return min(RETRY_FIRST_S * 2.0**attempt, RETRY_LAST_S) * random.uniform(0.75, 1.0)
