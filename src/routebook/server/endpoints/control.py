"""Endpoints for those who run the server: health, metrics, pauses and new weights."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from routebook.engine.engine import PauseMode
from routebook.errors import WorkerError
from routebook.server.endpoints.common import ERRORS, Served
from routebook.server.protocol.answers import StatusAnswer, WeightsAnswer
from routebook.server.protocol.control import PauseRequest, UpdateWeightsRequest
from routebook.server.requests import JSONRoute

router = APIRouter(route_class=JSONRoute)
_DONE = {"status": "ok"}


@router.get("/health", response_model=StatusAnswer, responses=ERRORS)
async def health(serving: Served) -> dict[str, str]:
    """Whether requests are served."""
    if not serving.client.is_alive:
        raise WorkerError("the engine has failed; start the server anew")
    return _DONE


@router.get("/metrics", response_class=Response, responses=ERRORS)
async def metrics(serving: Served) -> Response:
    """Numbers for Prometheus."""
    return Response(serving.metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})


@router.post("/pause", response_model=StatusAnswer, responses=ERRORS)
async def pause(serving: Served, body: PauseRequest | None = None) -> dict[str, str]:
    """Plan no further step. Requests that come meanwhile wait."""
    await serving.client.pause(PauseMode((body or PauseRequest()).mode))
    return _DONE


@router.post("/resume", response_model=StatusAnswer, responses=ERRORS)
async def resume(serving: Served) -> dict[str, str]:
    """Go on after a pause."""
    await serving.client.resume()
    return _DONE


@router.post("/reset_prefix_cache", response_model=StatusAnswer, responses=ERRORS)
async def reset_prefix_cache(serving: Served) -> dict[str, str]:
    """Forget all shared prefixes."""
    await serving.client.reset_prefix_cache()
    return _DONE


@router.post("/check_integrity", response_model=StatusAnswer, responses=ERRORS)
async def check_integrity(serving: Served) -> dict[str, str]:
    """Recount blocks, rows and the worker's requests; 500 says what leaks or contradicts."""
    await serving.client.check_integrity()
    return _DONE


@router.post("/update_weights", response_model=WeightsAnswer, responses=ERRORS)
async def update_weights(body: UpdateWeightsRequest, serving: Served) -> dict[str, Any]:
    """Replace the weights; rows computed from now on carry the new version."""
    version = await serving.client.update_weights(body.model_path, PauseMode(body.mode))
    return {**_DONE, "weight_version": version}
