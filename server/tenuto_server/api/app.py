"""The application: routes, limits, error handlers. Its state is one ``Service``, started and stopped by the caller."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tenuto_server.api import (
    anthropic_messages,
    health,
    hints,
    openai_chat,
    openai_completions,
    openai_responses,
    responses_socket,
)
from tenuto_server.api.errors import ApiError, on_api_error, on_crash, on_http_error
from tenuto_server.api.limits import Limits
from tenuto_server.api.openapi import describe
from tenuto_server.api.service import ClientGone, Service

WEBSOCKETS: Literal["websockets-sansio", "none"] = "websockets-sansio" if find_spec("websockets") else "none"
"""The server's WebSocket protocol; without one, handshakes are ordinary requests and get 426."""

_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/kv_hints", "/v1/sessions", "/tokenize")
_OTHER_ROUTES = (
    "/open_session",
    "/close_session",
    "/v1/messages/count_tokens",
    "/v1/messages",
    "/v1/responses",
    "/detokenize",
    "/health",
    "/metrics",
)


def create_app(service: Service) -> FastAPI:
    """The ASGI application that serves ``service``, whose loop must be running."""
    app = FastAPI(title="Tenuto", docs_url=None, redoc_url=None)
    app.state.service = service
    for part in (
        openai_chat,
        openai_completions,
        openai_responses,
        responses_socket,
        anthropic_messages,
        hints,
        health,
    ):
        app.include_router(part.router)
    app.add_api_route("/", root, methods=["GET"])
    app.add_api_route("/", root, methods=["HEAD"], include_in_schema=False)
    describe(app)
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientGone, on_client_gone)
    app.add_exception_handler(ClientDisconnect, on_client_gone)
    app.add_exception_handler(Exception, on_crash)

    def count(path: str, status: int) -> None:
        # Paths come from clients, so only known ones may become label values.
        route = next(
            (known for known in _ROUTES + _OTHER_ROUTES if path == known or path.startswith(f"{known}/")), "other"
        )
        service.meters.responses.labels(route, str(status)).inc()

    app.add_middleware(
        Limits,
        header_bytes_max=service.config.header_bytes_max,
        body_bytes_max=service.config.body_bytes_max,
        count=count,
    )
    return app


async def root(request: Request) -> Response:
    """Says that somebody is here; some clients ask before they start."""
    return Response('{"server":"tenuto"}', media_type="application/json")


async def on_client_gone(_: Request, __: Exception) -> Response:
    """Closes the books on a request whose client has left; nobody reads this."""
    return Response(status_code=499)
