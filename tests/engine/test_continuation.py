"""Aborted completions, continued: old rows stay, new ones follow, and on request the old ones are taken again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from routebook.engine.llm import LLM
from routebook.engine.outputs import RequestOutput
from routebook.engine.sampling_params import SamplingParams
from routebook.errors import RecordError, RequestError, SchemaMismatchError, UncapturableError
from routebook.routes import Origin, RoutedExperts
from tests.capture.recorder import ExpertsRecorder
from tests.engine.test_weights import new_weights
from tests.families import SERVED, VOCAB_SIZE

FAMILY = SERVED["qwen3_moe"]
PROMPT = [7, 3, 11, 5, 19, 2, 23, 29, 31, 8]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, seed=4, logprobs=0)


def make_llm(**config: Any) -> LLM:
    return LLM(FAMILY.build(torch.float64), device="cpu", block_size=4, num_blocks=64, **config)


def aborted(llm: LLM, steps: int) -> RequestOutput:
    """A completion that was stopped after some steps."""
    request_id = llm.engine.add_request(PROMPT, PARAMS)
    for _ in range(steps):
        llm.engine.step()
    output = llm.engine.abort(request_id)
    assert output is not None
    while llm.engine.has_work:
        llm.engine.step()
    return output


def tokens_of(output: RequestOutput) -> list[int]:
    return list(output.prompt_token_ids + output.choices[0].token_ids)


def record_of(output: RequestOutput) -> RoutedExperts:
    record = output.choices[0].routed_experts
    assert record is not None
    return record


@pytest.mark.parametrize("steps_in_flight", [1, 3])
def test_a_continued_completion_is_one_record(steps_in_flight: int) -> None:
    llm = make_llm(max_steps_in_flight=steps_in_flight)
    first = aborted(llm, 6)
    llm.update_weights(new_weights())
    (second,) = llm.generate([tokens_of(first)], PARAMS, records=[record_of(first)])
    old, whole = record_of(first), record_of(second)
    assert (whole.start, whole.stop) == (0, len(tokens_of(second)) - 1)
    assert whole.complete
    assert whole.truncate(old.stop) == old
    new = whole.slice(old.stop, whole.stop)
    assert {span.weight_version for span in new.provenance} == {1}
    assert {span.weight_version for span in old.provenance} == {0}
    # The new rows are those of the new weights over all tokens, since nothing was forced.
    rows, _ = judge(tokens_of(second), None)
    np.testing.assert_array_equal(new.ids_TLK, rows[old.stop :])
    llm.check_integrity()


class ForcedRouters:
    """Routers of a plain model whose choice is replaced, written out by hand for this family."""

    def __init__(self, model: Any, record: RoutedExperts) -> None:
        routers = [m for m in model.modules() if type(m).__name__ == "Qwen3MoeTopKRouter"]
        for layer, router in enumerate(routers):
            router.register_forward_hook(
                self._hook(torch.from_numpy(record.ids_TLK[:, layer].astype(int)))
            )

    @staticmethod
    def _hook(forced: torch.Tensor) -> Any:
        def hook(module: Any, args: Any, output: Any) -> Any:
            logits, weights, ids = output
            ids = torch.cat([forced, ids[len(forced) :]])
            probabilities = logits.softmax(-1, dtype=torch.float32).gather(-1, ids)
            weights = (probabilities / probabilities.sum(-1, keepdim=True)).to(weights.dtype)
            return logits, weights, ids

        return hook


@torch.inference_mode()
def judge(tokens: list[int], record: RoutedExperts | None) -> tuple[np.ndarray, torch.Tensor]:
    """Rows and log-probabilities of a plain model with the new weights, forced along a record if given."""
    model = FAMILY.build(torch.float64)
    model.load_state_dict(new_weights())
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    if record is not None:
        ForcedRouters(model, record)
    recorder = ExpertsRecorder()
    with recorder.recording(model):
        logits = model(input_ids=torch.tensor([tokens[:-1]]), use_cache=False).logits[0]
    return recorder.rows.numpy(), logits.float().log_softmax(-1)


@pytest.mark.parametrize("config", [{}, {"reference": True}, {"max_num_batched_tokens": 3}])
def test_a_forced_continuation_computes_along_the_old_rows(config: dict[str, Any]) -> None:
    llm = make_llm(**config)
    first = aborted(llm, 6)
    llm.update_weights(new_weights())
    (second,) = llm.generate([tokens_of(first)], PARAMS, records=[record_of(first)], forced=True)
    whole = record_of(second)
    assert whole.truncate(record_of(first).stop) == record_of(first)
    rows, logprobs = judge(tokens_of(second), record_of(first))
    free_rows, free_logprobs = judge(tokens_of(second), None)
    np.testing.assert_array_equal(whole.ids_TLK, rows)
    assert (rows != free_rows).any()
    choice = second.choices[0]
    assert choice.logprobs is not None
    own = torch.tensor([entry.logprob for entry in choice.logprobs])
    sampled = torch.tensor(choice.token_ids)[:, None]
    wanted = logprobs[-len(own) :].gather(-1, sampled)[:, 0]
    torch.testing.assert_close(own, wanted, atol=1e-5, rtol=0)
    # Control: without force the probabilities would have been others.
    free = free_logprobs[-len(own) :].gather(-1, sampled)[:, 0]
    assert (own - free).abs().max() > 1e-3


def test_rows_that_the_earlier_run_lacks_are_those_of_the_new_one() -> None:
    llm = make_llm()
    first = aborted(llm, 6)
    record = record_of(first)
    origin = np.full(record.num_rows, Origin.DECODE, np.uint8)
    origin[4] = Origin.ABSENT
    holed = RoutedExperts.from_rows(
        record.schema, record.ids_TLK, tokens_of(first), origin_T=origin
    )
    llm.update_weights(new_weights())
    (second,) = llm.generate([tokens_of(first)], PARAMS, records=[holed])
    whole = record_of(second)
    assert whole.complete
    rows, _ = judge(tokens_of(second), None)
    np.testing.assert_array_equal(whole.ids_TLK[4], rows[4])
    np.testing.assert_array_equal(whole.ids_TLK[3], record.ids_TLK[3])
    versions = {p: s.weight_version for s in whole.provenance for p in range(s.start, s.stop)}
    assert [versions[p] for p in (3, 4, 5, record.stop)] == [0, 1, 0, 1]


def test_a_completion_aborted_before_it_ran_is_continued_whole() -> None:
    llm = make_llm(max_num_batched_tokens=4)
    first = aborted(llm, 1)
    assert not record_of(first).complete
    (second,) = llm.generate([tokens_of(first)], PARAMS, records=[record_of(first)])
    assert record_of(second).complete


def test_forced_blocks_are_not_shared() -> None:
    llm = make_llm()
    first = aborted(llm, 6)
    llm.update_weights(new_weights())
    llm.generate([tokens_of(first)], PARAMS, records=[record_of(first)], forced=True)
    (free,) = llm.generate([tokens_of(first)], PARAMS)
    assert Origin.PREFIX_CACHE not in {span.origin for span in record_of(free).provenance}
    rows, _ = judge(tokens_of(free), None)
    np.testing.assert_array_equal(record_of(free).ids_TLK, rows)


def test_a_forced_request_that_is_preempted_is_forced_again() -> None:
    llm = make_llm()
    first = aborted(llm, 6)
    llm.update_weights(new_weights())
    (alone,) = llm.generate([tokens_of(first)], PARAMS, records=[record_of(first)], forced=True)
    crowded = LLM(
        FAMILY.build(torch.float64), device="cpu", block_size=4, num_blocks=9, max_model_len=36
    )
    crowded.update_weights(new_weights())
    filler = [[9] * 12, tokens_of(first)]
    outputs = crowded.generate(
        filler, [PARAMS, PARAMS], records=[None, record_of(first)], forced=True
    )
    assert crowded.engine.scheduler.num_preemptions > 0
    assert outputs[1].choices[0].token_ids == alone.choices[0].token_ids
    np.testing.assert_array_equal(record_of(outputs[1]).ids_TLK, record_of(alone).ids_TLK)


def test_a_record_that_does_not_belong_is_refused() -> None:
    llm = make_llm()
    first = aborted(llm, 6)
    tokens, record = tokens_of(first), record_of(first)
    other = [*tokens]
    other[3] = (other[3] + 1) % VOCAB_SIZE
    with pytest.raises(RecordError, match="position 3"):
        llm.generate([other], PARAMS, records=[record])
    with pytest.raises(RecordError, match="ends at position"):
        llm.generate([tokens[:5]], PARAMS, records=[record])
    schema = replace(record.schema, num_experts=64)
    foreign = RoutedExperts.from_rows(schema, record.ids_TLK, tokens)
    with pytest.raises(SchemaMismatchError, match="num_experts=64"):
        llm.generate([tokens], PARAMS, records=[foreign])
    with pytest.raises(RequestError, match="continued whole"):
        llm.generate([tokens], replace(PARAMS, routed_experts=False), records=[record])
    with pytest.raises(RequestError, match="1 records for 2 prompts"):
        llm.generate([tokens, tokens], PARAMS, records=[record])
    with pytest.raises(RequestError, match="needs a record"):
        llm.engine.add_request(tokens, PARAMS, forced=True)
    assert not llm.engine.has_work
    llm.check_integrity()


@pytest.mark.parametrize(
    ("name", "words"), [("phimoe", "without a top-k"), ("deepseek_v2", "within groups")]
)
def test_a_model_that_cannot_be_forced_says_so(name: str, words: str) -> None:
    llm = LLM(SERVED[name].build(), device="cpu", block_size=4, num_blocks=32, max_model_len=64)
    (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=2, ignore_eos=True))
    record = record_of(output)
    with pytest.raises(UncapturableError, match=words):
        llm.generate([tokens_of(output)], records=[record], forced=True)
    llm.generate([tokens_of(output)], SamplingParams(max_tokens=2), records=[record])
