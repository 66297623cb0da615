from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routebook.errors import TokenMismatchError
from routebook.routes import token_hashes
from tests.routes.strategies import token_lists

MASK = 2**64 - 1


def splitmix64(x: int) -> int:
    """The published generator's output function, in Python's unbounded integers."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def test_the_finaliser_is_splitmix64():
    # First output of the reference generator seeded with 0.
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert token_hashes([0]).tolist() == [0xE220A8397B1DCDAF % 2**32]


@given(token_lists(0, 20))
def test_hash_is_the_sum_of_terms_in_unbounded_integers(token_ids):
    terms = [splitmix64(i * 2**32 + token) for i, token in enumerate(token_ids)]
    expected = [sum(terms[: i + 1]) % 2**32 for i in range(len(terms))]
    hashes = token_hashes(token_ids)
    assert hashes.dtype == np.uint32
    assert hashes.tolist() == expected


@given(token_lists(0, 20), st.integers(0, 20))
def test_hash_continues_from_its_own_last_value(token_ids, cut):
    cut = min(cut, len(token_ids))
    whole = token_hashes(token_ids)
    prefix = int(whole[cut - 1]) if cut else 0
    assert token_hashes(token_ids[cut:], cut, prefix).tolist() == whole[cut:].tolist()


@given(token_lists(2, 12), st.data())
def test_swapped_or_changed_tokens_change_the_hash(token_ids, data):
    index = st.integers(0, len(token_ids) - 1)
    i, j = data.draw(index), data.draw(index)
    other = list(token_ids)
    other[i], other[j] = other[j], other[i]
    same = token_hashes(other).tolist() == token_hashes(token_ids).tolist()
    assert same == (other == token_ids)


@pytest.mark.parametrize(
    ("token_ids", "word"),
    [
        ([1, -1, 2], "position 1"),
        ([2**31], "position 0"),
        ([1.5], "float64"),
        ([[1, 2]], "shape"),
        (np.array([True]), "bool"),
    ],
)
def test_what_is_no_token_id_is_refused(token_ids, word):
    with pytest.raises(TokenMismatchError, match=word):
        token_hashes(token_ids)


@pytest.mark.parametrize("dtype", ["i4", "i8", "u2", ">i4", "u8"])
def test_the_dtype_of_the_ids_does_not_matter(dtype):
    ids = [0, 7, 65535 % 2**15]
    assert token_hashes(np.array(ids, dtype)).tolist() == token_hashes(ids).tolist()
