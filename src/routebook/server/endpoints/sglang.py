"""`/generate`, as SGLang's clients call it."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from routebook.engine.sampling_params import SamplingParams
from routebook.errors import RequestError
from routebook.routes.formats import get_format
from routebook.server.endpoints.common import (
    Served,
    common_sampling,
    ok,
    wants_frames,
    wants_rows,
)
from routebook.server.endpoints.completions import as_prompts
from routebook.server.forms.sglang import SGLangForm
from routebook.server.job import Job, JobPrompt
from routebook.server.protocol.answers import SGLangAnswer
from routebook.server.protocol.sglang import SGLangRequest
from routebook.server.requests import JSONRoute
from routebook.server.rows import RowsField
from routebook.server.serving import Serving, new_name

router = APIRouter(route_class=JSONRoute)


@router.post("/generate", responses=ok(SGLangAnswer | list[SGLangAnswer]))
async def generate(body: SGLangRequest, request: Request, serving: Served) -> Response:
    """Complete texts, or token ids."""
    frames = wants_frames(request, body.stream)
    wants = wants_rows(serving, body.return_routed_experts, frames)
    given = body.input_ids if body.text is None else body.text
    if given is None or (body.text is not None and body.input_ids is not None):
        raise RequestError("give either text or input_ids")
    prompts = [await _prompt(serving, body, prompt, wants) for prompt in as_prompts(given)]
    job = Job(name=body.rid or new_name(), prompts=prompts, stream=body.stream, frames=frames)
    form = SGLangForm(job, serving.model_name, RowsField(get_format("sglang")), serving.texts)
    form.is_list = isinstance(given, list) and not isinstance(given[0], int)
    form.is_list = form.is_list or body.sampling_params.n > 1
    form.texts_in_logprobs = body.return_text_in_logprobs
    form.weight_version = serving.engine.scheduler.weight_version
    return await serving.answer(request, job, form)


async def _prompt(
    serving: Serving, body: SGLangRequest, prompt: str | list[int], wants: bool
) -> JobPrompt:
    text = prompt if isinstance(prompt, str) else None
    token_ids = await serving.tokenize(prompt) if isinstance(prompt, str) else prompt
    params = _sampling_params(body, serving.most_new_tokens(len(token_ids)), wants)
    return JobPrompt(token_ids=token_ids, params=params, text=text)


def _sampling_params(body: SGLangRequest, most_new_tokens: int, wants: bool) -> SamplingParams:
    given = body.sampling_params
    return SamplingParams(
        **common_sampling(given),
        max_tokens=most_new_tokens if given.max_new_tokens is None else given.max_new_tokens,
        seed=given.sampling_seed,
        include_stop_text=given.no_stop_trim,
        logprobs=body.top_logprobs_num if body.return_logprob else None,
        routed_experts=wants,
        routed_experts_prompt_start=body.routed_experts_start_len,
    )
