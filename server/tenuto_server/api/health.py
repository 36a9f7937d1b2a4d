"""``GET /health`` and ``GET /metrics``: open to all, since they tell nothing of any tenant. Holds no state."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from tenuto_server.api.errors import encode_json
from tenuto_server.api.service import Service, service_of

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the engine serves ("ok", or "degraded" when a tier does not take writes), 503 when it does not."""
    report = health_report(service_of(request))
    return Response(encode_json(report), 503 if report["status"] == "dead" else 200, media_type="application/json")


def health_report(service: Service) -> dict[str, Any]:
    """``status`` with a ``detail`` of the engine, the tiers, and what runs."""
    snapshot = service.loop.snapshot()
    executor = snapshot.get("executor", {})
    alive = service.loop.healthy
    problems = [] if alive else [f"engine: {snapshot.get('dead_reason') or 'not running'}"]
    problems += _problems(executor)
    status = "dead" if not alive else "degraded" if problems else "ok"
    engine = {key: value for key, value in snapshot.items() if key not in ("executor", "engine")}
    return {
        "status": status,
        "model": service.model.name,
        "problems": problems,
        "detail": {"engine": engine, "tiers": executor, "about": dict(service.about)},
    }


def _problems(figures: Any, where: str = "") -> list[str]:
    """Everything in the executor's report that says it cannot be written to."""
    if not isinstance(figures, dict):
        return []
    found = []
    if figures.get("writable") is False:
        reason = figures.get("reason") or figures.get("error") or "not writable"
        found.append(f"{where or 'tier'}: {reason}")
    for key, value in figures.items():
        found += _problems(value, f"{where}.{key}" if where else str(key))
    return found


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text."""
    return Response(service_of(request).meters.text(), media_type=CONTENT_TYPE_LATEST)
