from __future__ import annotations

import numpy as np
import pytest

from routebook.errors import SchemaMismatchError
from tests.routes.strategies import make_schema


@pytest.mark.parametrize(
    ("num_experts", "dtype"), [(255, "u1"), (256, "u1"), (257, "u2"), (512, "u2"), (65536, "u2")]
)
def test_dtype_holds_the_largest_id_and_comes_from_the_number_of_experts(num_experts, dtype):
    schema = make_schema(num_experts=num_experts)
    assert schema.dtype == np.dtype(dtype)
    assert np.array(num_experts - 1).astype(schema.dtype) == num_experts - 1


def test_a_row_takes_what_numpy_says_it_takes():
    schema = make_schema(num_experts=300)
    assert schema.row_nbytes == np.zeros(schema.shape(1), schema.dtype).nbytes == 8


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_ids": ()},
        {"layer_ids": (3, 1)},
        {"layer_ids": (1, 1)},
        {"layer_ids": (-1, 1)},
        {"layer_ids": (1, 4)},
        {"top_k": 0},
        {"top_k": 17},
        {"num_experts": 0},
        {"num_experts": 65537},
    ],
)
def test_numbers_that_contradict_each_other_are_refused(changes):
    with pytest.raises(SchemaMismatchError):
        make_schema(**changes)
