"""An aborted request, in vLLM's asynchronous engine with its core in a process of its own.

Run as `python -m tests.hosts.vllm.abort_run`; prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

from tests.hosts.vllm.cells import OPTIONS
from tests.hosts.vllm.oracle import Oracle, Tally

PROMPT = list(range(20, 90))


async def last_output(engine: Any, request_id: str, abort_after: int | None) -> Any:
    """Generate, and abort once there are so many tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=150, temperature=1.0, ignore_eos=True, output_kind=RequestOutputKind.CUMULATIVE
    )
    output = None
    async for output in engine.generate({"prompt_token_ids": PROMPT}, params, request_id):
        num_tokens = len(output.outputs[0].token_ids)
        if abort_after is not None and num_tokens >= abort_after and not output.finished:
            await engine.abort(request_id)
            abort_after = None
    return output


async def main() -> dict[str, Any]:
    """Run one request to its end and abort two others."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from routebook.hosts.vllm import HostConfig
    from routebook.hosts.vllm.launch import engine_args
    from routebook.models import bundled_model_path

    folder = str(bundled_model_path("tiny"))
    options = {"model": folder, **OPTIONS, "max_num_seqs": 3}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_args(HostConfig(), options)))
    tally = Tally(Oracle(folder))
    try:
        outputs = await asyncio.gather(
            *(last_output(engine, f"r{n}", n or None) for n in (0, 3, 40))
        )
    finally:
        engine.shutdown()
    for output in outputs:
        tally.compare(PROMPT, output.outputs[0])
    reasons = [output.outputs[0].finish_reason for output in outputs]
    tokens = [len(output.outputs[0].token_ids) for output in outputs]
    return {
        "pairs": tally.pairs,
        "different": tally.different,
        "shifted": tally.shifted,
        "reasons": reasons,
        "tokens": tokens,
    }


if __name__ == "__main__":
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    print(json.dumps(asyncio.run(main())), flush=True)
