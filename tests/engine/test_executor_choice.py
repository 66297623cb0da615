"""The option `executor`."""

from __future__ import annotations

import pytest

from routebook.engine.executor import InlineExecutor, LocalExecutor, ThreadExecutor
from routebook.engine.llm import LLM
from routebook.engine.sampling_params import SamplingParams
from routebook.errors import ConfigError
from tests.families import SERVED


def test_a_model_in_memory_cannot_go_to_another_process() -> None:
    with pytest.raises(
        ConfigError, match="cannot take a Qwen3MoeForCausalLM from this one's memory"
    ):
        LLM(SERVED["qwen3_moe"].build(), executor="process")


@pytest.mark.parametrize(
    ("executor", "steps_in_flight", "kind"),
    [
        ("auto", 1, InlineExecutor),
        ("auto", 2, ThreadExecutor),
        ("inline", 2, InlineExecutor),
        ("thread", 1, ThreadExecutor),
    ],
)
def test_the_option_chooses_the_executor(
    executor: str, steps_in_flight: int, kind: type[LocalExecutor]
) -> None:
    llm = LLM(
        SERVED["qwen3_moe"].build(),
        device="cpu",
        executor=executor,
        max_steps_in_flight=steps_in_flight,
    )
    assert type(llm.engine.executor) is kind
    assert len(llm.generate([[5]], SamplingParams(max_tokens=3, ignore_eos=True))) == 1
    llm.shutdown()
