"""`/v1/completions`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from routebook.engine.sampling_params import SamplingParams
from routebook.server.endpoints.common import (
    Served,
    make_job,
    ok,
    openai_sampling,
    rows_field,
    wants_frames,
    wants_rows,
)
from routebook.server.forms.completions import CompletionForm
from routebook.server.job import JobPrompt
from routebook.server.protocol.answers import CompletionAnswer
from routebook.server.protocol.completions import CompletionRequest, Prompts
from routebook.server.requests import JSONRoute
from routebook.server.serving import Serving

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/completions", responses=ok(CompletionAnswer))
async def completions(body: CompletionRequest, request: Request, serving: Served) -> Response:
    """Complete texts, or token ids."""
    serving.check_model(body.model)
    stream = bool(body.stream)
    frames = wants_frames(request, stream)
    wants = wants_rows(serving, body.return_routed_experts, frames)
    prompts = [await _prompt(serving, body, prompt, wants) for prompt in as_prompts(body.prompt)]
    job = make_job(body, prompts, frames=frames)
    form = CompletionForm(job, serving.model_name, rows_field(body, stream), serving.texts)
    form.return_token_ids = bool(body.return_token_ids)
    return await serving.answer(request, job, form)


def as_prompts(prompt: Prompts) -> list[str | list[int]]:
    """One prompt or several, as several."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return prompt  # type: ignore[return-value]


async def _prompt(
    serving: Serving, body: CompletionRequest, prompt: str | list[int], wants: bool
) -> JobPrompt:
    text = prompt if isinstance(prompt, str) else None
    token_ids = (
        await serving.tokenize(prompt, add_special_tokens=body.add_special_tokens)
        if isinstance(prompt, str)
        else prompt
    )
    most = serving.most_new_tokens(len(token_ids))
    params = SamplingParams(
        **openai_sampling(body),
        max_tokens=most if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        routed_experts=wants,
        routed_experts_prompt_start=body.routed_experts_prompt_start,
    )
    return JobPrompt(token_ids=token_ids, params=params, text=text)
