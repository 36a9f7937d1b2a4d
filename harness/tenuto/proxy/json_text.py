"""JSON as fast as the installation allows: orjson where it is there, the standard library otherwise. No state.

Neither function raises, whatever the bytes or values are: inference goes on without what cannot be read.
"""

from __future__ import annotations

import json
from typing import Any

try:
    import orjson
except ModuleNotFoundError:  # the light install has only the standard library
    orjson = None  # type: ignore[assignment]


def parse(data: bytes | bytearray) -> Any:
    """The value of a JSON text; None for anything else."""
    if orjson is not None:
        try:
            return orjson.loads(data)
        except ValueError:
            pass  # the standard library takes a little more: NaN, lone surrogates
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def dump(value: Any) -> bytes:
    """Compact JSON with sorted keys, of any value. Equal values give equal bytes within one process."""
    if orjson is not None:
        try:
            return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
        except TypeError:
            pass  # an integer beyond 64 bits, a lone surrogate, nesting beyond its limit
    try:
        return json.dumps(value, sort_keys=True, default=str, separators=(",", ":")).encode()
    except (ValueError, RecursionError):
        return b""
