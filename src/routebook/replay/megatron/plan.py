"""The parallel plan of a megatron-core model, from its own config and process groups."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from routebook.errors import ConfigError, MissingExtraError
from routebook.routes.layout import ParallelPlan, ParallelRank

_SAME_NAME = (
    "sequence_parallel",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def parallel_plan(config: Any, *, context_parallel_layout: str = "zigzag") -> ParallelPlan:
    """How a `TransformerConfig` spreads the model over ranks.

    Args:
        config: of the model. A `pipeline_model_parallel_layout` is read layer by layer.
        context_parallel_layout: `zigzag`, as megatron-core cuts, or `contiguous` (`PackedSeqParams.cp_partition_mode`):
            that is said with each batch and not in the config.

    Raises:
        ConfigError: a plan that cannot work.
    """
    options = {name: getattr(config, name) for name in _SAME_NAME}
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    if layout is not None:
        options = {"sequence_parallel": config.sequence_parallel}
        options["layers_per_stage"] = _layers_per_stage(layout)
    return ParallelPlan(
        tensor_parallel_size=config.tensor_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        context_parallel_layout=context_parallel_layout,
        pipeline_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_size=config.virtual_pipeline_model_parallel_size or 1,
        **options,
    )


def parallel_rank(chunk: Any) -> ParallelRank:
    """Where this process stands, and which of its model chunks this one is.

    Args:
        chunk: the model, or one chunk of a virtual pipeline as a forward step gets it, wrapped or not.

    Raises:
        MissingExtraError: megatron-core is not installed.
        ConfigError: its process groups are not initialised.
    """
    try:
        parallel_state = import_module("megatron.core.parallel_state")
    except ImportError as error:
        raise MissingExtraError(
            "parallel_rank asks megatron-core, which is not installed; give a ParallelRank of your own"
        ) from error
    if not parallel_state.model_parallel_is_initialized():
        raise ConfigError(
            "megatron-core has no process groups yet; call parallel_state.initialize_model_parallel first"
        )
    return ParallelRank(
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        vp_stage=_vp_stage(chunk),
    )


def _layers_per_stage(layout: Any) -> tuple[int, ...]:
    """Decoder layers of each stage, in the order in which a token passes them."""
    per_rank = layout.layout
    return tuple(
        sum(layer.name == "decoder" for layer in stages[vp_stage])
        for vp_stage in range(len(per_rank[0]))
        for stages in per_rank
    )


def _vp_stage(chunk: Any) -> int:
    while not hasattr(chunk, "vp_stage") and hasattr(chunk, "module"):
        chunk = chunk.module
    return getattr(chunk, "vp_stage", None) or 0
