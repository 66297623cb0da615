from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given

from routebook.errors import RecordError, TokenMismatchError
from routebook.routes import RouteSample
from tests.routes.strategies import make_record, make_sample, samples, tokens


@given(samples())
def test_prompt_and_sampled_tokens_are_all_tokens(sample):
    joined = [*sample.prompt_token_ids.tolist(), *sample.sampled_token_ids.tolist()]
    assert joined == sample.token_ids.tolist()
    assert len(sample.prompt_token_ids) == sample.num_prompt_tokens


@given(samples())
def test_equality_is_by_value_and_survives_a_pickle(sample):
    again = pickle.loads(pickle.dumps(sample))
    assert again == sample
    assert not again.token_ids.flags.writeable


def test_every_field_counts_for_equality():
    token_ids = np.array(tokens(8), np.int32)
    record = make_record(6)
    fields = {"record": record, "token_ids": token_ids, "num_prompt_tokens": 2, "meta": {}}
    changes = [
        {},
        {"record": record.truncate(5)},
        {"token_ids": token_ids[:7]},
        {"num_prompt_tokens": 3},
        {"meta": {"a": "b"}},
    ]
    made = [RouteSample(**{**fields, **change}) for change in changes]
    for i, a in enumerate(made):
        assert [a == b for b in made] == [i == j for j in range(len(made))]


def test_rows_of_other_tokens_are_refused():
    with pytest.raises(TokenMismatchError, match="position 2"):
        RouteSample(
            record=make_record(6),
            token_ids=np.array([*tokens(2), 7, *tokens(7)[3:]], np.int32),
            num_prompt_tokens=2,
        )


def test_more_rows_than_tokens_are_refused():
    with pytest.raises(TokenMismatchError):
        RouteSample(
            record=make_record(6), token_ids=np.array(tokens(5), np.int32), num_prompt_tokens=2
        )


@pytest.mark.parametrize("num_prompt_tokens", [-1, 0, 8])
def test_a_prompt_that_cannot_be_is_refused(num_prompt_tokens):
    with pytest.raises(RecordError, match="num_prompt_tokens"):
        RouteSample(
            record=make_record(6),
            token_ids=np.array(tokens(7), np.int32),
            num_prompt_tokens=num_prompt_tokens,
        )


def test_meta_is_text_and_a_private_copy():
    with pytest.raises(RecordError, match="str"):
        make_sample(3, steps=3)
    meta = {"a": "b"}
    sample = RouteSample(
        record=make_record(2),
        token_ids=np.array(tokens(3), np.int32),
        num_prompt_tokens=1,
        meta=meta,
    )
    meta["a"] = "c"
    assert sample.meta == {"a": "b"}
