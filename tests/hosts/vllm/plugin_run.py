"""An engine that somebody else makes, with the plugin's variable and without. Prints one line of JSON."""

from __future__ import annotations

import json
import os
from typing import Any

from routebook.hosts.vllm import plugin
from routebook.models import bundled_model_path
from tests.hosts.vllm.cells import OPTIONS
from tests.hosts.vllm.oracle import Oracle, Tally

PROMPT = list(range(30, 90))


def main() -> dict[str, Any]:
    """Generate twice."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    folder = str(bundled_model_path("tiny"))
    params = SamplingParams(max_tokens=150, temperature=1.0, ignore_eos=True)

    def completion() -> Any:
        llm = LLM(folder, **OPTIONS)
        return llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0].outputs[0]

    plugin.register()
    without = completion().routed_experts
    os.environ[plugin.VARIABLE] = "all"
    plugin.register()
    tally = Tally(Oracle(folder))
    tally.compare(PROMPT, completion())
    return {
        "without": without,
        "pairs": tally.pairs,
        "different": tally.different,
        "shifted": tally.shifted,
    }


if __name__ == "__main__":
    print(json.dumps(main()), flush=True)
