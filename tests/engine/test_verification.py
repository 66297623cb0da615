"""The judge of records: it must run in every number format, and refuse what another model made."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from routebook import LLM, RouteSample, SamplingParams
from routebook.engine.config import ModelConfig
from routebook.engine.samples import make_sample
from routebook.engine.verification import Verifier
from routebook.errors import ModelMismatchError, SchemaMismatchError
from routebook.routes import RoutedExperts


def sample_of(dtype: str) -> RouteSample:
    llm = LLM("tiny", dtype=dtype, device="cpu")
    (output,) = llm.generate(["And God said"], SamplingParams(max_tokens=12, seed=1))
    return make_sample(llm, output, output.choices[0])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_record_is_that_of_a_fresh_forward(dtype: str) -> None:
    sample = sample_of(dtype)
    ((_, comparison),) = Verifier("tiny", ModelConfig(dtype=dtype)).verify([sample])
    assert comparison.equal_rows == comparison.num_rows == sample.record.num_rows


def test_a_record_with_tokens_that_the_model_does_not_know_is_refused() -> None:
    sample = sample_of("float32")
    tokens = sample.token_ids.copy()
    tokens[2] = 5000
    record = RoutedExperts.from_rows(sample.record.schema, sample.record.ids_TLK, tokens)
    foreign = RouteSample(record=record, token_ids=tokens, num_prompt_tokens=2)
    with pytest.raises(
        ModelMismatchError, match=r"token id 5000, model 'tiny' has a vocabulary of 2048"
    ):
        list(Verifier("tiny", ModelConfig()).verify([foreign]))


def test_a_record_of_other_weights_or_another_shape_is_refused() -> None:
    sample = sample_of("float32")
    verifier = Verifier("tiny", ModelConfig())
    other = replace(sample, meta=sample.meta | {"model_fingerprint": "0" * 16})
    with pytest.raises(ModelMismatchError, match="fingerprint 0000000000000000"):
        list(verifier.verify([other]))
    schema = replace(sample.record.schema, num_experts=17)
    record = RoutedExperts.from_rows(schema, np.array(sample.record.ids_TLK), sample.token_ids)
    with pytest.raises(SchemaMismatchError, match="17 experts"):
        list(verifier.verify([replace(sample, record=record, meta={})]))
