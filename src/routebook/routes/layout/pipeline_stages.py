"""Which decoder layers a pipeline stage has.

One rule covers all kinds of split: a token passes the stages in the order `vp_stage * P + pp_rank`, each has a
number of consecutive layers, and so its first layer is the sum of all counts before it. The counts follow
megatron-core's `get_num_layers_to_build`, the first layers its `get_transformer_layer_offset`; layers are
counted from 0, as in a schema's `layer_ids` (a Megatron `layer_number` counts from 1).
"""

from __future__ import annotations

from routebook.errors import ConfigError
from routebook.routes.layout.parallel_plan import ParallelPlan


def stage_layers(
    plan: ParallelPlan, num_hidden_layers: int, pp_rank: int, vp_stage: int = 0
) -> range:
    """Decoder layers of one model chunk, dense ones included; MTP layers are no decoder layers.

    Args:
        plan: how the layers are spread.
        num_hidden_layers: decoder layers of the whole model.
        pp_rank: pipeline stage.
        vp_stage: model chunk of that stage.

    Raises:
        ConfigError: the plan cannot split that many layers.
    """
    counts = stage_layer_counts(plan, num_hidden_layers)
    stage = vp_stage * plan.pipeline_parallel_size + pp_rank
    first = sum(counts[:stage])
    return range(first, first + counts[stage])


def stage_layer_counts(plan: ParallelPlan, num_hidden_layers: int) -> tuple[int, ...]:
    """Decoder layers of every model chunk, in the order in which a token passes them.

    Raises:
        ConfigError: the plan cannot split that many layers.
    """
    if plan.layers_per_stage is not None:
        counts = plan.layers_per_stage
    elif _is_uneven(plan):
        per_rank = _uneven_counts(plan, num_hidden_layers)
        counts = tuple(n // plan.virtual_pipeline_size for n in per_rank)
        counts *= plan.virtual_pipeline_size
    else:
        counts = _even_counts(plan, num_hidden_layers)
    if sum(counts) != num_hidden_layers:
        raise ConfigError(
            f"the pipeline split gives its stages {counts} layers, {sum(counts)} in all, but the"
            f" model has {num_hidden_layers}; correct the plan or num_hidden_layers"
        )
    return counts


def _is_uneven(plan: ParallelPlan) -> bool:
    return (
        plan.num_layers_in_first_pipeline_stage is not None
        or plan.num_layers_in_last_pipeline_stage is not None
    )


def _even_counts(plan: ParallelPlan, num_hidden_layers: int) -> tuple[int, ...]:
    embedding = int(plan.account_for_embedding_in_pipeline_split)
    loss = int(plan.account_for_loss_in_pipeline_split)
    num_stages = plan.pipeline_parallel_size * plan.virtual_pipeline_size
    places = num_hidden_layers + embedding + loss
    if places % num_stages:
        raise ConfigError(
            f"{places} places ({num_hidden_layers} layers, embedding {embedding}, loss {loss}) do not"
            f" divide by {num_stages} stages (pipeline_parallel_size * virtual_pipeline_size); use"
            " num_layers_in_first/last_pipeline_stage or layers_per_stage"
        )
    counts = [places // num_stages] * num_stages
    counts[0] -= embedding
    counts[-1] -= loss
    return tuple(counts)


def _uneven_counts(plan: ParallelPlan, num_hidden_layers: int) -> list[int]:
    """Layers of every pipeline rank, all of its chunks together."""
    first = plan.num_layers_in_first_pipeline_stage
    last = plan.num_layers_in_last_pipeline_stage
    given = [n for n in (first, last) if n is not None]
    num_middle = plan.pipeline_parallel_size - len(given)
    middle, rest = divmod(num_hidden_layers - sum(given), num_middle) if num_middle else (0, 0)
    if rest or middle < 0:
        raise ConfigError(
            f"of {num_hidden_layers} layers {sum(given)} are in the first and last stage; the others"
            f" do not divide by the {num_middle} stages between; change"
            " num_layers_in_first/last_pipeline_stage"
        )
    counts = [middle] * num_middle
    counts[:0] = [] if first is None else [first]
    counts += [] if last is None else [last]
    if any(n < 0 or n % plan.virtual_pipeline_size for n in counts):
        raise ConfigError(
            f"stages of {counts} layers do not divide into virtual_pipeline_size="
            f"{plan.virtual_pipeline_size} chunks; change num_layers_in_first/last_pipeline_stage"
        )
    return counts
