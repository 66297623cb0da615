"""A log of steps takes what continues it, and says when it should be written."""

from __future__ import annotations

import numpy as np
import pytest

from routebook.ledger.base import StepRows
from routebook.ledger.step_log import StepLog
from routebook.routes.schema import RouteSchema


def make_step(schema: RouteSchema, num_requests: int, start: int) -> StepRows:
    return StepRows(
        request_ids=[f"r{i}" for i in range(num_requests)],
        starts_R=np.full(num_requests, start),
        counts_R=np.ones(num_requests, np.int64),
        ids_TLK=np.full(schema.shape(num_requests), start % 256, schema.dtype),
        weight_version=0,
    )


@pytest.mark.parametrize(
    ("num_layers", "num_requests", "steps"),
    [(1, 1, 256), (1, 256, 32), (60, 1000, 8), (60, 9000, 1)],
)
def test_what_is_kept_is_bounded(num_layers: int, num_requests: int, steps: int) -> None:
    """By steps, by rows and by bytes."""
    schema = RouteSchema(
        layer_ids=tuple(range(num_layers)), num_experts=128, top_k=8, num_hidden_layers=num_layers
    )
    log = StepLog(schema)
    zeros = np.zeros(num_requests, np.int64)
    log.open(make_step(schema, num_requests, 5), zeros, zeros)
    for t in range(1, steps):
        step = make_step(schema, num_requests, 5 + t)
        assert log.continues(step)
        assert log.append(step.ids_TLK) == (t == steps - 1)
    logged = log.take()
    assert logged is not None
    assert len(logged.steps) == steps
    assert logged.starts_R.tolist() == [5] * num_requests
    assert log.take() is None
    assert log.continues(make_step(schema, num_requests, 5 + steps))


def test_merged_steps_have_the_rows_of_a_request_side_by_side() -> None:
    schema = RouteSchema(layer_ids=(0,), num_experts=999, top_k=2, num_hidden_layers=1)
    log = StepLog(schema)
    log.open(make_step(schema, 3, 40), np.arange(3), np.array([0, 2, 1]))
    for t in range(41, 44):
        log.append(make_step(schema, 3, t).ids_TLK)
    logged = log.take()
    assert logged is not None
    step = logged.merged()
    step.check(schema)
    assert step.ids_TLK[:, 0, 0].tolist() == [40, 41, 42, 43] * 3
    assert step.counts_R.tolist() == [4, 4, 4]
    assert step.runs_R is not None
    assert step.runs_R.tolist() == [0, 2, 1]
