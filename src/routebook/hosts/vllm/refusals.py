"""What Routebook does not do inside vLLM: said at the start, with the reason, and never found out from wrong rows."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from routebook.errors import ConfigError

_UNSEEN = "no run of it was compared with an oracle yet"


def _rows_and_drafts_overlap(config: Any) -> bool:
    return config.speculative_config is not None and bool(config.scheduler_config.async_scheduling)


def _has_native_rows(config: Any) -> bool:
    native = getattr(config, "aux_output_config", None)
    return bool(
        getattr(config.model_config, "enable_return_routed_experts", False)
        or (native is not None and native.enabled)
    )


def _parallel(name: str) -> Callable[[Any], bool]:
    return lambda config: int(getattr(config.parallel_config, name, 1) or 1) > 1


def _switch(name: str) -> Callable[[Any], bool]:
    return lambda config: bool(getattr(config.parallel_config, name, False))


_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "enable_return_routed_experts",
        _has_native_rows,
        "vLLM's own capture writes the same field; leave it off",
    ),
    (
        "kv_transfer_config",
        lambda config: config.kv_transfer_config is not None,
        "KV blocks that come from elsewhere arrive without the rows that were computed with them",
    ),
    (
        "async_scheduling with speculative_config",
        _rows_and_drafts_overlap,
        "a step is then scheduled before it is known at which position it begins;"
        " set async_scheduling=False",
    ),
    (
        "runner_type",
        lambda config: config.model_config.runner_type != "generate",
        "rows belong to tokens that are generated",
    ),
    (
        "an encoder-decoder model",
        lambda config: bool(config.model_config.is_encoder_decoder),
        _UNSEEN,
    ),
    (
        "model runner V2",
        lambda config: bool(getattr(config, "use_v2_model_runner", False)),
        f"{_UNSEEN}; set VLLM_USE_V2_MODEL_RUNNER=0",
    ),
    ("lora_config", lambda config: config.lora_config is not None, _UNSEEN),
    ("data_parallel_size", _parallel("data_parallel_size"), _UNSEEN),
    ("prefill_context_parallel_size", _parallel("prefill_context_parallel_size"), _UNSEEN),
    ("decode_context_parallel_size", _parallel("decode_context_parallel_size"), _UNSEEN),
    ("enable_expert_parallel", _switch("enable_expert_parallel"), _UNSEEN),
    ("enable_eplb", _switch("enable_eplb"), _UNSEEN),
    ("enable_dbo", _switch("enable_dbo"), "its micro-batches overwrite each other's rows"),
    (
        "distributed_executor_backend",
        lambda config: (
            config.parallel_config.distributed_executor_backend not in (None, "mp", "uni")
        ),
        _UNSEEN,
    ),
)


def check_vllm_config(config: Any, speculation: Collection[str]) -> None:
    """Refuse what cannot work, or was never seen to.

    Args:
        config: vLLM's `VllmConfig`.
        speculation: methods of speculation that were compared with an oracle in this release.

    Raises:
        ConfigError: naming the option and the reason.
    """
    guesses = config.speculative_config
    if guesses is not None and guesses.method not in speculation:
        raise ConfigError(
            f"Routebook refuses speculative_config of method {guesses.method!r} in this vLLM: {_UNSEEN}"
        )
    for name, is_used, reason in _REFUSED:
        if is_used(config):
            raise ConfigError(f"Routebook refuses {name} in vLLM: {reason}")
