"""`/inference/v1/generate` and `/inference/v1/abort_requests`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from routebook.engine.sampling_params import SamplingParams
from routebook.server.endpoints.common import (
    ERRORS,
    Served,
    ok,
    rows_field,
    stop_texts,
    stream_usage,
    wants_frames,
    wants_rows,
)
from routebook.server.forms.generate import GenerateForm
from routebook.server.job import Job, JobPrompt
from routebook.server.protocol.answers import GenerateAnswer, StatusAnswer
from routebook.server.protocol.generate import AbortRequest, GenerateRequest
from routebook.server.requests import JSONRoute
from routebook.server.serving import new_name

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
    job = Job(
        name=body.request_id or new_name(),
        prompts=[JobPrompt(token_ids=body.token_ids, params=params)],
        cache_salt=body.cache_salt or "",
        stream=stream,
        frames=frames,
        **stream_usage(body.stream_options),
    )
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
        n=given.n,
        max_tokens=most_new_tokens if given.max_tokens is None else given.max_tokens,
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=0 if given.top_k == -1 else given.top_k,
        min_p=given.min_p,
        seed=given.seed,
        stop=stop_texts(given.stop),
        stop_token_ids=tuple(given.stop_token_ids or ()),
        include_stop_text=given.include_stop_str_in_output,
        skip_special_tokens=given.skip_special_tokens,
        ignore_eos=given.ignore_eos,
        logprobs=given.logprobs,
        routed_experts=wants_routed_experts,
        routed_experts_prompt_start=body.routed_experts_prompt_start if start is None else start,
    )
