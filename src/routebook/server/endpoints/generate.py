"""`/inference/v1/generate` and `/inference/v1/abort_requests`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from routebook.engine.sampling_params import SamplingParams
from routebook.server.endpoints.common import (
    ERRORS,
    Served,
    common_sampling,
    make_job,
    ok,
    rows_field,
    wants_frames,
    wants_rows,
)
from routebook.server.forms.generate import GenerateForm
from routebook.server.job import JobPrompt
from routebook.server.protocol.answers import GenerateAnswer, StatusAnswer
from routebook.server.protocol.generate import AbortRequest, GenerateRequest
from routebook.server.requests import JSONRoute

router = APIRouter(route_class=JSONRoute)
_VLLM_PREFIX = "generate-tokens-"


@router.post("/inference/v1/generate", responses=ok(GenerateAnswer))
async def generate(body: GenerateRequest, request: Request, serving: Served) -> Response:
    """Complete token ids."""
    serving.check_model(body.model)
    stream = bool(body.stream)
    frames = wants_frames(request, stream)
    if body.output_mode == "text":
        serving.require_tokenizer()
    params = _sampling_params(
        body,
        serving.most_new_tokens(len(body.token_ids)),
        wants_rows(serving, body.return_routed_experts, frames),
    )
    prompts = [JobPrompt(token_ids=body.token_ids, params=params)]
    job = make_job(body, prompts, frames=frames)
    form = GenerateForm(job, serving.model_name, rows_field(body, stream), serving.texts)
    form.output_mode = body.output_mode
    form.return_token_ids = bool(body.return_token_ids)
    return await serving.answer(request, job, form)


@router.post("/inference/v1/abort_requests", response_model=StatusAnswer, responses=ERRORS)
async def abort_requests(body: AbortRequest, serving: Served) -> dict[str, str]:
    """End requests; they are answered with what they have."""
    for name in body.request_ids:
        serving.abort(name)
        serving.abort(name.removeprefix(_VLLM_PREFIX))
    return {"status": "ok"}


def _sampling_params(
    body: GenerateRequest, most_new_tokens: int, wants_routed_experts: bool
) -> SamplingParams:
    given = body.sampling_params
    start = given.routed_experts_prompt_start
    return SamplingParams(
        **common_sampling(given),
        max_tokens=most_new_tokens if given.max_tokens is None else given.max_tokens,
        seed=given.seed,
        include_stop_text=given.include_stop_str_in_output,
        logprobs=given.logprobs,
        routed_experts=wants_routed_experts,
        routed_experts_prompt_start=body.routed_experts_prompt_start if start is None else start,
    )
