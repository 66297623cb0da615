"""New weights while requests are open: rows and tokens carry the version that made them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from routebook.engine.engine import PauseMode
from routebook.engine.llm import LLM
from routebook.engine.model_loader import model_fingerprint
from routebook.engine.outputs import RequestOutput
from routebook.engine.request import FinishReason
from routebook.engine.sampling_params import SamplingParams
from routebook.errors import ConfigError, ModelError, ModelNotFoundError
from routebook.routes import Origin, RoutedExperts
from tests.capture.recorder import ExpertsRecorder
from tests.families import SERVED

FAMILY = SERVED["qwen3_moe"]
PROMPT = [7, 3, 11, 5, 19, 2, 23, 29, 31, 8]
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True, seed=4)


def new_weights() -> dict[str, torch.Tensor]:
    """Weights of the same shape under which tokens are routed differently."""
    generator = torch.Generator().manual_seed(9)
    old = FAMILY.build(torch.float64).state_dict()
    noise = {k: torch.randn(v.shape, generator=generator, dtype=v.dtype) for k, v in old.items()}
    return {name: tensor + 0.1 * noise[name] for name, tensor in old.items()}


def make_llm(**config: Any) -> LLM:
    return LLM(FAMILY.build(torch.float64), device="cpu", block_size=4, num_blocks=64, **config)


@torch.inference_mode()
def judged_rows(token_ids: tuple[int, ...], switch: int) -> np.ndarray:
    """Rows of a plain model whose weights change before the token at position `switch`."""
    model = FAMILY.build(torch.float64)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    tokens = torch.tensor([token_ids[:-1]])
    recorder, parts, cache = ExpertsRecorder(), [], None
    with recorder.recording(model):
        for piece in (tokens[:, :switch], tokens[:, switch:]):
            if piece.shape[1]:
                cache = model(
                    input_ids=piece, past_key_values=cache, use_cache=True
                ).past_key_values
                parts.append(recorder.rows)
                recorder.ids_LNK.clear()
            model.load_state_dict(new_weights())
    return torch.cat(parts).numpy()


def run(llm: LLM) -> list[RequestOutput]:
    outputs = []
    while llm.engine.has_work:
        outputs += llm.engine.step()
    llm.check_integrity()
    return outputs


def record_of(output: RequestOutput) -> RoutedExperts:
    record = output.choices[0].routed_experts
    assert record is not None
    assert record.complete
    return record


def switch_of(record: RoutedExperts) -> int:
    """First position whose row was computed by the new weights."""
    assert [s.weight_version for s in record.provenance] == sorted(
        s.weight_version for s in record.provenance
    )
    return next((s.start for s in record.provenance if s.weight_version == 1), record.stop)


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("before", [1, 2, 6])
def test_kept_requests_go_on_with_the_new_weights(before: int, steps_in_flight: int) -> None:
    llm = make_llm(max_steps_in_flight=steps_in_flight, max_num_batched_tokens=6)
    llm.engine.add_request(PROMPT, PARAMS)
    for _ in range(before):
        llm.engine.step()
    assert llm.update_weights(new_weights(), mode="keep") == 1
    (output,) = run(llm)
    record = record_of(output)
    tokens = output.prompt_token_ids + output.choices[0].token_ids
    switch = switch_of(record)
    assert 0 < switch < record.stop
    np.testing.assert_array_equal(record.ids_TLK, judged_rows(tokens, switch))
    # Control: the old weights would have routed the later tokens otherwise.
    assert (record.ids_TLK != judged_rows(tokens, len(tokens))).any()


def test_waiting_lets_open_requests_end_under_the_old_weights() -> None:
    llm = make_llm()
    llm.engine.add_request(PROMPT, PARAMS)
    llm.engine.step()
    llm.update_weights(new_weights(), mode="wait")
    (output,) = run(llm)
    record = record_of(output)
    tokens = output.prompt_token_ids + output.choices[0].token_ids
    assert len(output.choices[0].token_ids) == 20
    assert {span.weight_version for span in record.provenance} == {0}
    np.testing.assert_array_equal(record.ids_TLK, judged_rows(tokens, len(tokens)))


def test_aborting_returns_what_open_requests_have() -> None:
    llm = make_llm(max_steps_in_flight=2)
    llm.engine.add_request(PROMPT, PARAMS)
    for _ in range(4):
        llm.engine.step()
    llm.update_weights(new_weights(), mode="abort")
    (output,) = run(llm)
    choice = output.choices[0]
    assert choice.finish_reason is FinishReason.ABORT
    assert 4 <= len(choice.token_ids) < 20
    assert record_of(output).num_rows == len(PROMPT) + len(choice.token_ids) - 1


def test_a_prefix_of_the_old_weights_is_not_shared() -> None:
    llm = make_llm()
    llm.generate([PROMPT], PARAMS)
    llm.engine.add_request(PROMPT, PARAMS)
    llm.engine.step()
    llm.update_weights(new_weights(), mode="keep")
    llm.engine.add_request(PROMPT, PARAMS)
    outputs = sorted(run(llm), key=lambda output: output.request_id)
    kept, new = (record_of(output) for output in outputs)
    assert kept.provenance[0].origin is Origin.PREFIX_CACHE
    assert {span.origin for span in new.provenance} == {Origin.PREFILL, Origin.DECODE}
    assert {span.weight_version for span in new.provenance} == {1}
    tokens = outputs[1].prompt_token_ids + outputs[1].choices[0].token_ids
    np.testing.assert_array_equal(new.ids_TLK, judged_rows(tokens, 0))
    # What the kept request fills from now on rests on old blocks: nobody may find it behind new ones.
    again = llm.generate([outputs[0].prompt_token_ids + outputs[0].choices[0].token_ids], PARAMS)
    tokens = again[0].prompt_token_ids + again[0].choices[0].token_ids
    np.testing.assert_array_equal(record_of(again[0]).ids_TLK, judged_rows(tokens, 0))


def test_the_fingerprint_follows_the_weights() -> None:
    llm = make_llm()
    before = llm.fingerprint
    llm.update_weights(new_weights())
    assert llm.fingerprint != before
    llm.update_weights(FAMILY.build(torch.float64).state_dict())
    assert llm.fingerprint == before


def test_the_fingerprint_covers_buffers_that_route() -> None:
    model = SERVED["deepseek_v3"].build()
    before = model_fingerprint(model)
    name = next(n for n, _ in model.named_buffers() if "correction_bias" in n)
    model.get_buffer(name).add_(0.5)
    assert model_fingerprint(model) != before


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({}, "hold no tensor"),
        ({"model.nothing.weight": torch.zeros(1)}, "no parameter 'model.nothing.weight'"),
        ({"model.norm.weight": [1.0]}, "is no tensor with values, but list"),
        ({"model.norm.weight": torch.zeros(64, device="meta")}, "but a meta tensor"),
        ({"model.norm.weight": torch.zeros(3)}, r"has shape \[64\], the new one \[3\]"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(
    weights: dict[str, torch.Tensor], words: str
) -> None:
    llm = make_llm()
    before = llm.fingerprint
    llm.engine.add_request(PROMPT, PARAMS)
    llm.engine.step()
    good = {"lm_head.weight": torch.zeros_like(new_weights()["lm_head.weight"])}
    with pytest.raises(ModelError, match=words):
        llm.update_weights(good | weights if weights else weights, mode="abort")
    assert llm.fingerprint == before
    (output,) = run(llm)
    assert output.choices[0].finish_reason is FinishReason.LENGTH
    assert {span.weight_version for span in record_of(output).provenance} == {0}


def test_an_unknown_place_or_mode_is_named() -> None:
    llm = make_llm()
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        llm.update_weights("./nowhere")
    with pytest.raises(
        ConfigError, match="mode='later' is not known; use one of wait, abort, keep"
    ):
        llm.update_weights(new_weights(), mode="later")


@pytest.mark.parametrize("steps_in_flight", [1, 3])
def test_a_paused_engine_keeps_requests_and_goes_on(steps_in_flight: int) -> None:
    def tokens(pause: bool) -> tuple[int, ...]:
        llm = make_llm(max_steps_in_flight=steps_in_flight)
        llm.engine.add_request(PROMPT, PARAMS)
        llm.engine.step()
        if pause:
            llm.engine.pause(PauseMode.KEEP)
            assert llm.engine.step() == []
            assert llm.engine.has_work
            llm.check_integrity()
            llm.engine.resume()
        (output,) = run(llm)
        return output.choices[0].token_ids

    assert tokens(pause=True) == tokens(pause=False)
