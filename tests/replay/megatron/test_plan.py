"""The parallel plan that is read from a config, against what megatron-core itself builds by that config."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from routebook.errors import ConfigError
from routebook.replay.megatron import parallel_plan, parallel_rank
from routebook.routes.layout import ParallelRank, stage_layers
from tests.replay.megatron import models

pytestmark = [
    pytest.mark.usefixtures("megatron"),
    pytest.mark.filterwarnings("ignore:::megatron.*"),
]

SPLITS = [
    {},
    {"pipeline_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 4, "num_layers_in_first_pipeline_stage": 3},
    {"pipeline_model_parallel_size": 4, "num_layers_in_last_pipeline_stage": 6},
    {
        "pipeline_model_parallel_size": 2,
        "num_layers": 11,
        "account_for_embedding_in_pipeline_split": True,
    },
    {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 3,
        "num_layers": 10,
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
    },
    {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "pipeline_model_parallel_layout": "Et*2|t*5|t|t*4L",
    },
]


@pytest.mark.parametrize("split", SPLITS)
def test_stages_have_the_layers_that_megatron_builds(split, monkeypatch):
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    options = {"num_layers": 12} | split
    config = models.config_of(**options, moe_layer_freq=1)
    plan = parallel_plan(config)
    size = config.virtual_pipeline_model_parallel_size
    found = []
    # For a layout megatron-core asks its process groups, whatever rank it is given.
    monkeypatch.setattr(
        parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: size
    )
    for pp_rank in range(config.pipeline_model_parallel_size):
        monkeypatch.setattr(
            parallel_state, "get_pipeline_model_parallel_rank", lambda rank=pp_rank: rank
        )
        for vp_stage in range(size or 1):
            stage = None if size is None else vp_stage
            layers = stage_layers(plan, config.num_layers, pp_rank, vp_stage)
            count = get_num_layers_to_build(config, vp_stage=stage, pp_rank=pp_rank)
            first = get_transformer_layer_offset(config, vp_stage=stage, pp_rank=pp_rank)
            assert layers == range(first, first + count)
            found += layers
    assert sorted(found) == list(range(config.num_layers))


def test_rows_are_shared_as_the_config_says():
    config = models.config_of(
        tensor_model_parallel_size=2, sequence_parallel=True, context_parallel_size=4
    )
    plan = parallel_plan(config)
    assert (plan.tensor_parallel_size, plan.sequence_parallel) == (2, True)
    assert (plan.context_parallel_size, plan.cuts_zigzag) == (4, True)
    assert not parallel_plan(config, context_parallel_layout="contiguous").cuts_zigzag


def test_the_chunk_says_which_virtual_stage_it_is():
    assert parallel_rank(models.build()[0]) == ParallelRank()
    wrapped = SimpleNamespace(module=SimpleNamespace(module=SimpleNamespace(vp_stage=1)))
    assert parallel_rank(wrapped) == ParallelRank(vp_stage=1)


def test_without_process_groups_there_is_no_rank():
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    try:
        with pytest.raises(ConfigError, match="initialize_model_parallel"):
            parallel_rank(SimpleNamespace())
    finally:
        models.start()
