"""`/v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from routebook.engine.sampling_params import SamplingParams
from routebook.server.chat_template import render_chat
from routebook.server.endpoints.common import (
    Served,
    make_job,
    ok,
    openai_sampling,
    rows_field,
    wants_frames,
    wants_rows,
)
from routebook.server.forms.chat import ChatForm
from routebook.server.job import JobPrompt
from routebook.server.protocol.answers import ChatAnswer
from routebook.server.protocol.chat import ChatCompletionRequest
from routebook.server.protocol.tokens import TokenizeRequest
from routebook.server.requests import JSONRoute
from routebook.server.serving import Serving

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/chat/completions", responses=ok(ChatAnswer))
async def chat_completions(
    body: ChatCompletionRequest, request: Request, serving: Served
) -> Response:
    """Go on with a conversation."""
    serving.check_model(body.model)
    stream = bool(body.stream)
    frames = wants_frames(request, stream)
    wants = wants_rows(serving, body.return_routed_experts, frames)
    token_ids = await chat_token_ids(serving, body)
    params = _sampling_params(body, serving.most_new_tokens(len(token_ids)), wants)
    job = make_job(body, [JobPrompt(token_ids=token_ids, params=params)], frames=frames)
    form = ChatForm(job, serving.model_name, rows_field(body, stream), serving.texts)
    form.return_token_ids = bool(body.return_token_ids)
    form.num_likeliest = body.top_logprobs or 0
    return await serving.answer(request, job, form)


async def chat_token_ids(
    serving: Serving, body: ChatCompletionRequest | TokenizeRequest
) -> list[int]:
    """Token ids of a conversation.

    Raises:
        RequestError: the chat template does not take it, or there is none.
    """
    return await serving.tokenizing(
        render_chat,
        serving.require_tokenizer(),
        serving.chat_template,
        [message.as_template_input() for message in body.messages or ()],
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        options=body.chat_template_kwargs or {},
    )


def _sampling_params(
    body: ChatCompletionRequest, most_new_tokens: int, wants: bool
) -> SamplingParams:
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return SamplingParams(
        **openai_sampling(body),
        max_tokens=most_new_tokens if most is None else most,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        routed_experts=wants,
        routed_experts_prompt_start=body.routed_experts_prompt_start,
    )
