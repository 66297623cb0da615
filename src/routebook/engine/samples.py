"""From an engine's output to a sample of a `.routes` file."""

from __future__ import annotations

import numpy as np

from routebook.engine.llm import LLM
from routebook.engine.outputs import CompletionOutput, RequestOutput
from routebook.routes import RouteSample


def make_sample(llm: LLM, output: RequestOutput, choice: CompletionOutput) -> RouteSample:
    """One completion with all that is needed to check it later: tokens, rows, model, number format."""
    assert choice.routed_experts is not None, "a sample needs rows"
    served = llm.engine.served
    return RouteSample(
        record=choice.routed_experts,
        token_ids=np.array(output.prompt_token_ids + choice.token_ids, np.int32),
        num_prompt_tokens=len(output.prompt_token_ids),
        meta={
            "request_id": f"{output.request_id}.{choice.index}",
            "model": served.name,
            "model_fingerprint": served.fingerprint,
            "dtype": served.dtype,
            "prompt": output.prompt or "",
            "text": choice.text,
            "finish_reason": choice.finish_reason.value,
        },
    )
