"""Answers that can be gone on from or fetched again: ``ResponseStore`` owns them, per tenant and bounded in bytes."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from operator import is_
from typing import Any

from tenuto_server.api.errors import ApiError, encode_json

_ENTRY_BYTES = 500


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A response object, and the items of its conversation up to and with its output. ``items_bytes``: what these are as
    JSON."""

    response: dict[str, Any]
    items: tuple[Any, ...]
    inputs: int
    items_bytes: int
    size: int


class ResponseStore:
    """The response unused for longest is forgotten first. For one event loop."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._stored: OrderedDict[tuple[str, str], Stored] = OrderedDict()
        self.bytes = 0

    def put(self, tenant: str, response: dict[str, Any], items: tuple[Any, ...], inputs: int) -> None:
        """Keeps a response. ``inputs``: how many of the items were the request's input."""
        before = self._stored.get((tenant, str(response.get("previous_response_id"))))
        known = len(before.items) if before is not None else 0
        if before is not None and known <= len(items) and all(map(is_, before.items, items)):
            items_bytes = before.items_bytes + len(encode_json(items[known:]))  # only what is new is looked at
        else:
            items_bytes = len(encode_json(items))
        size = len(encode_json(response)) + items_bytes + _ENTRY_BYTES
        self.drop(tenant, response["id"])
        self._stored[tenant, response["id"]] = Stored(response, items, inputs, items_bytes, size)
        self.bytes += size
        while self.bytes > self._bytes_max and self._stored:
            _, old = self._stored.popitem(last=False)
            self.bytes -= old.size

    def get(self, tenant: str, response_id: str, param: str | None = None) -> Stored:
        """The response. Raises 404 (400 where ``param`` referred to it) for one that is not kept."""
        found = self._stored.get((tenant, response_id))
        if found is None:
            message = f"{param or 'response'}: {response_id[:100]!r} is not known here"
            code = "previous_response_not_found" if param else "response_not_found"
            raise ApiError(400 if param else 404, message, param=param, code=code)
        self._stored.move_to_end((tenant, response_id))
        return found

    def drop(self, tenant: str, response_id: str) -> bool:
        """Forgets a response; False if there was none."""
        old = self._stored.pop((tenant, response_id), None)
        self.bytes -= old.size if old is not None else 0
        return old is not None
