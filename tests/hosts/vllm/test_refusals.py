"""Every configuration without an oracle's word is refused by name. vLLM is not needed: its config is made up here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from routebook.errors import ConfigError
from routebook.hosts.vllm.kv_group import positional_group
from routebook.hosts.vllm.refusals import check_vllm_config


def config(**changes: Any) -> SimpleNamespace:
    """A `VllmConfig` that works; a change is named `part__field`, or `field`."""
    made = SimpleNamespace(
        model_config=SimpleNamespace(
            enable_return_routed_experts=False, runner_type="generate", is_encoder_decoder=False
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=2,
            pipeline_parallel_size=2,
            data_parallel_size=1,
            distributed_executor_backend="mp",
        ),
        scheduler_config=SimpleNamespace(async_scheduling=True),
        speculative_config=None,
        kv_transfer_config=None,
        lora_config=None,
    )
    for name, value in changes.items():
        part, _, field = name.rpartition("__")
        setattr(getattr(made, part) if part else made, field, value)
    return made


NGRAM = SimpleNamespace(method="ngram")


def test_what_was_compared_is_let_through():
    check_vllm_config(config(), ["ngram"])
    check_vllm_config(
        config(speculative_config=NGRAM, scheduler_config__async_scheduling=False), ["ngram"]
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_config__enable_return_routed_experts": True}, "enable_return_routed_experts"),
        ({"aux_output_config": SimpleNamespace(enabled=True)}, "enable_return_routed_experts"),
        ({"kv_transfer_config": object()}, "kv_transfer_config"),
        ({"speculative_config": NGRAM}, "async_scheduling"),
        (
            {
                "speculative_config": SimpleNamespace(method="eagle"),
                "scheduler_config__async_scheduling": False,
            },
            "eagle",
        ),
        ({"model_config__runner_type": "pooling"}, "runner_type"),
        ({"model_config__is_encoder_decoder": True}, "encoder-decoder"),
        ({"use_v2_model_runner": True}, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"lora_config": object()}, "lora_config"),
        ({"parallel_config__data_parallel_size": 2}, "data_parallel_size"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "prefill_context_parallel_size"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ({"parallel_config__enable_expert_parallel": True}, "enable_expert_parallel"),
        ({"parallel_config__enable_eplb": True}, "enable_eplb"),
        ({"parallel_config__enable_dbo": True}, "enable_dbo"),
        ({"parallel_config__distributed_executor_backend": "ray"}, "distributed_executor_backend"),
    ],
)
def test_what_was_not_is_refused_by_name(changes, named):
    with pytest.raises(ConfigError, match=named):
        check_vllm_config(config(**changes), ["ngram"])


class Full:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size


class Window(Full):
    pass


def test_slots_are_those_of_a_group_that_keeps_every_position():
    class FullOnly(Full):
        pass

    groups = [SimpleNamespace(kv_cache_spec=s) for s in (Window(8), FullOnly(32), FullOnly(16))]
    assert positional_group(groups, FullOnly) == (1, 32)
    with pytest.raises(ConfigError, match="Window"):
        positional_group(groups[:1], FullOnly)
