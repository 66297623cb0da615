"""The engine on one CUDA device; skipped where there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from routebook import LLM, SamplingParams
from routebook.engine.outputs import RequestOutput
from routebook.models import bundled_model_path
from tests.capture.recorder import ExpertsRecorder
from tests.family import Family

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
PATH = str(bundled_model_path("tiny"))


def requests(vocab_size: int) -> list[list[int]]:
    """Prompts that share a prefix, one of them far longer than the budget of a step."""
    draw = np.random.default_rng(0)
    prefix = draw.integers(1, vocab_size, 40).tolist()
    return [prefix + draw.integers(1, vocab_size, n).tolist() for n in (1, 5, 30, 300, 2, 17)]


def generate(model: Any, **config: Any) -> list[RequestOutput]:
    llm = LLM(
        model, device="cuda", max_num_batched_tokens=64, num_blocks=64, max_model_len=512, **config
    )
    prompts = requests(llm.engine.served.vocab_size)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=30, seed=1, ignore_eos=True))
    llm.check_integrity()
    return outputs


@torch.inference_mode()
def share_of_different_pairs(judge: Any, outputs: list[RequestOutput]) -> float:
    """Share of (token, layer) pairs whose ids differ from those of a plain forward on the same device."""
    different = pairs = 0
    for output in outputs:
        record = output.choices[0].routed_experts
        assert record is not None
        assert record.complete
        tokens = output.prompt_token_ids + output.choices[0].token_ids
        recorder = ExpertsRecorder()
        with recorder.recording(judge):
            judge(input_ids=torch.tensor([tokens[:-1]], device="cuda"), use_cache=False)
        same = (np.sort(record.ids_TLK) == np.sort(recorder.rows.cpu().numpy())).all(axis=2)
        different, pairs = different + int((~same).sum()), pairs + same.size
    return different / pairs


@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 0.002), ("bfloat16", 0.05)])
def test_rows_are_those_of_a_plain_forward(dtype: str, allowed: float) -> None:
    outputs = generate("tiny", dtype=dtype)
    judge = AutoModelForCausalLM.from_pretrained(PATH, dtype=getattr(torch, dtype)).cuda().eval()
    share = share_of_different_pairs(judge, outputs)
    print(f"{dtype}: {share:.5f} of the pairs differ")
    assert share <= allowed


def test_ids_above_255_survive_the_narrow_copy() -> None:
    family = Family(
        name="many_experts",
        config_class="Qwen3MoeConfig",
        options={
            "num_experts": 400,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 16,
            "max_position_embeddings": 1024,
        },
    )
    outputs = generate(family.build(torch.float32))
    judge = family.build(torch.float32).cuda()
    record = outputs[0].choices[0].routed_experts
    assert record is not None
    assert record.ids_TLK.dtype == np.uint16
    assert record.ids_TLK.max() > 255
    assert share_of_different_pairs(judge, outputs) <= 0.01


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("executor", ["inline", "thread", "process"])
def test_steps_in_flight_change_no_row(executor: str, steps: int) -> None:
    outputs = generate("tiny", dtype="float32", executor=executor, max_steps_in_flight=steps)
    judge = AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.float32).cuda().eval()
    assert share_of_different_pairs(judge, outputs) <= 0.002


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("params", [{"temperature": 0}, {"top_p": 0.9, "logprobs": 2, "seed": 3}])
def test_launching_a_step_never_waits_for_the_device(
    params: dict[str, Any], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every synchronisation inside raises, once the first steps have proven the capture and warmed up.

    Steps are small, since transformers' grouped experts wait for the device in float32.
    """
    llm = LLM(
        "tiny",
        device="cuda",
        dtype=dtype,
        executor="inline",
        max_steps_in_flight=2,
        max_num_batched_tokens=64,
    )
    prompts = requests(llm.engine.served.vocab_size)
    sampling = SamplingParams(max_tokens=20, ignore_eos=True, **params)
    llm.generate(prompts, sampling)
    worker = llm.engine.executor.worker  # type: ignore[attr-defined]
    launch, launched = worker.launch, []

    def strict(step: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            launched.append(launch(step))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return launched[-1]

    monkeypatch.setattr(worker, "launch", strict)
    llm.generate([prompt[::-1] for prompt in prompts], sampling)
    assert len(launched) > 20
