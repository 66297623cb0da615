"""Replay under megatron-core's own parallelism and schedules, one process for each rank (gloo)."""

from __future__ import annotations

import pytest

from tests.replay.megatron.distributed_run import RECOMPUTE, WORLDS
from tests.replay.megatron.launch import reports_of

pytest.importorskip("megatron.core.models.gpt.gpt_model")


@pytest.fixture(scope="module", params=WORLDS)
def world(request, tmp_path_factory):
    """Size of the world, and what each of its ranks reports."""
    folder = tmp_path_factory.mktemp("ranks")
    module = "tests.replay.megatron.distributed_run"
    return request.param, reports_of(module, request.param, folder)


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_every_rank_takes_its_rows(world, recompute):
    size, ranks = world
    for rank in ranks:
        for mode in WORLDS[size]:
            assert rank[f"{mode}/{recompute}"] == {
                # The model's own ids, replayed, are bitwise the model without replay.
                "losses_equal": True,
                "gradients_equal": True,
                "stale": 0,
                # Ids that no router chose reach the dispatcher, in forwards and recomputations.
                "foreign_taken": True,
                "foreign_differs": True,
                # Under them recomputation changes no bit of a gradient.
                "recompute_equal": True,
            }, mode
