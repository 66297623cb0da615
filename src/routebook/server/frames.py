"""Completions as binary frames: an answer of frames is a `.routes` file."""

from __future__ import annotations

import msgspec
import numpy as np

from routebook.engine.outputs import CompletionOutput, RequestOutput
from routebook.engine.served_model import ServedModel
from routebook.routes import RoutedExperts, RouteSample
from routebook.routes.frame import encode_frame
from routebook.server.forms.base import Form


def choice_frame(
    form: Form, index: int, served: ServedModel, output: RequestOutput, choice: CompletionOutput
) -> bytes:
    """One completion with its tokens and rows as a checksummed frame.

    Args:
        form: the answer that it would be part of in JSON.
        index: index of the completion in that answer.
        served: the model.
        output: the prompt.
        choice: the completion.
    """
    token_ids = np.array((*output.prompt_token_ids, *choice.token_ids), np.int32)
    record = choice.routed_experts
    if record is None:
        no_rows = np.zeros(served.schema.shape(0), served.schema.dtype)
        record = RoutedExperts.from_rows(served.schema, no_rows, token_ids)
    meta = {
        "request_id": form.id,
        "model": form.model_name,
        "model_fingerprint": served.fingerprint,
        "index": str(index),
        "text": choice.text,
        "finish_reason": choice.finish_reason.value,
    }
    if choice.stop_reason is not None:
        # As JSON: a stop token and a stop text of the same digits are told apart.
        meta["stop_reason"] = msgspec.json.encode(choice.stop_reason).decode()
    if output.prompt is not None:
        meta["prompt"] = output.prompt
    logprobs = form.logprobs(index, choice)
    if logprobs is not None:
        meta["logprobs"] = msgspec.json.encode(logprobs).decode()
    sample = RouteSample(
        record=record,
        token_ids=token_ids,
        num_prompt_tokens=len(output.prompt_token_ids),
        meta=meta,
    )
    return encode_frame(sample, checksum=True)
