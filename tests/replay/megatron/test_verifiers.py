"""verifiers' own attribution of routed experts to the messages of a trajectory, fed with our records turn by turn."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from routebook.routes import RoutedExperts, RouteSchema
from routebook.routes.formats import get_format

graph = pytest.importorskip("verifiers.v1.graph")

SCHEMA = RouteSchema(layer_ids=(1, 2), num_experts=300, top_k=2, num_hidden_layers=3)
TURNS = ((5, 4), (3, 6), (2, 1))
"""Tokens that each turn adds: by the user or a tool, and by the model."""


@pytest.fixture
def whole() -> RoutedExperts:
    """One record of the whole trajectory; every row tells its position and layer."""
    num_tokens = sum(map(sum, TURNS))
    position, layer, pick = np.ogrid[: num_tokens - 1, :2, :2]
    ids = (position * 4 + layer * 2 + pick + 200).astype(SCHEMA.dtype)
    return RoutedExperts.from_rows(SCHEMA, ids, np.arange(num_tokens))


def node(num_tokens: int, sampled: bool) -> SimpleNamespace:
    return SimpleNamespace(token_ids=[0] * num_tokens, sampled=sampled, routed_experts=None)


@pytest.mark.parametrize("asks_for_all", [True, False])
def test_every_message_gets_its_rows(whole, asks_for_all):
    """Whether a turn sends all rows, or begins with the last token of the turn before, which had none."""
    nodes: list[SimpleNamespace] = []
    length = 0
    for asked, answered in TURNS:
        prefix = list(range(len(nodes)))
        nodes += [node(asked, False), node(answered, True)]
        new = list(range(len(prefix), len(nodes)))
        stop = length + asked + answered - 1
        record = whole.slice(0 if asks_for_all else max(length - 1, 0), stop)
        payload = get_format("prime_rl").encode(record)
        graph._attribute_routed_experts(SimpleNamespace(nodes=nodes), prefix, new, length, payload)
        length = stop + 1
    rows_THK = np.concatenate([n.routed_experts for n in nodes])
    assert [len(n.routed_experts) for n in nodes] == [len(n.token_ids) for n in nodes]
    assert rows_THK.dtype == SCHEMA.dtype
    assert np.array_equal(rows_THK[:-1, 1:], whole.ids_TLK)
    # The last token of all was never an input; verifiers repeats the row before.
    assert np.array_equal(rows_THK[-1], rows_THK[-2])
