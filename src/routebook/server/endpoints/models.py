"""`/v1/models`, `/tokenize` and `/detokenize`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter

from routebook.errors import RequestError
from routebook.server.endpoints.chat import chat_token_ids
from routebook.server.endpoints.common import ERRORS, Served
from routebook.server.protocol.answers import DetokenizeAnswer, ModelList, TokenizeAnswer
from routebook.server.protocol.tokens import DetokenizeRequest, TokenizeRequest
from routebook.server.requests import JSONRoute

router = APIRouter(route_class=JSONRoute)


@router.get("/v1/models", response_model=ModelList, responses=ERRORS)
async def models(serving: Served) -> dict[str, Any]:
    """The model that is served, and what the axes of its routed experts mean."""
    served = serving.engine.served
    card = {
        "id": serving.model_name,
        "object": "model",
        "created": serving.started,
        "owned_by": "routebook",
        "root": served.name,
        "max_model_len": served.max_model_len,
        "fingerprint": served.fingerprint,
        "route_schema": asdict(served.schema),
    }
    return {"object": "list", "data": [card]}


@router.post(
    "/tokenize",
    response_model=TokenizeAnswer,
    response_model_exclude_none=True,
    responses=ERRORS,
)
async def tokenize(body: TokenizeRequest, serving: Served) -> dict[str, Any]:
    """Token ids of a text, or of a conversation."""
    serving.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages")
    if body.prompt is None:
        token_ids = await chat_token_ids(serving, body)
    else:
        special = body.add_special_tokens is not False
        token_ids = await serving.tokenize(body.prompt, add_special_tokens=special)
    texts = None
    if body.return_token_strs:
        texts = await serving.tokenizing(
            serving.require_tokenizer().convert_ids_to_tokens, token_ids
        )
    return {
        "tokens": token_ids,
        "count": len(token_ids),
        "max_model_len": serving.engine.max_model_len,
        "token_strs": texts,
    }


@router.post("/detokenize", response_model=DetokenizeAnswer, responses=ERRORS)
async def detokenize(body: DetokenizeRequest, serving: Served) -> dict[str, str]:
    """Text of token ids."""
    serving.check_model(body.model)
    vocabulary = range(serving.engine.served.vocab_size)
    wrong = next((token_id for token_id in body.tokens if token_id not in vocabulary), None)
    if wrong is not None:
        raise RequestError(f"token id {wrong} lies outside the vocabulary of {len(vocabulary)}")
    return {"prompt": await serving.tokenizing(serving.require_tokenizer().decode, body.tokens)}
