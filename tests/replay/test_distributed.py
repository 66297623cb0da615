"""Replay on models that are split over two processes (gloo)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from routebook.replay import RouteSession
from tests.families import SERVED
from tests.replay.distributed_run import seeds_of
from tests.replay.helpers import foreign_ids, loss_of, tokens
from tests.replay.rank import run_ranks

pytest.importorskip("accelerate")
MODES = (
    "ddp-checkpointed",
    "fsdp2-checkpointed",
    "fsdp2-late-checkpointed",
    "tp",
    "tp-checkpointed",
    "tp-ep",
)


@pytest.fixture(scope="module")
def family():
    """A vocabulary that two ranks can share."""
    family = SERVED["qwen3_moe"]
    return replace(family, options=family.options | {"vocab_size": 200})


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("split")
    family.build().save_pretrained(path)
    return path


def losses_alone(family, seeds) -> list[float]:
    """The losses of one process that has the whole model."""
    model = family.build().train()
    session = RouteSession(model)
    losses = []
    for seed in seeds:
        with session.forward(foreign_ids(session.schema, 26, seed)):
            losses.append(loss_of(model, tokens(2, 13, seed)).item())
    session.close()
    return losses


@pytest.mark.parametrize("mode", MODES)
def test_a_split_model_takes_its_routes(mode, family, folder):
    told = run_ranks("tests.replay.distributed_run", 2, mode, folder)
    ranks = json.loads(told.splitlines()[-1])
    for rank, report in enumerate(ranks):
        # The model's own ids, replayed: gradients bitwise those of the model without a session.
        assert report["equal"]
        assert report["taken"]
        expected = losses_alone(family, seeds_of(mode, rank))
        torch.testing.assert_close(report["losses"], expected, rtol=1e-5, atol=1e-5)
