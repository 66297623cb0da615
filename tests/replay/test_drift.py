"""Drift on the bundled model: a bfloat16 engine against a float32 trainer with the same weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from routebook.engine.llm import LLM
from routebook.engine.model_loader import load_pretrained, resolve_model
from routebook.engine.samples import make_sample
from routebook.engine.sampling_params import SamplingParams
from routebook.errors import RequestError, SchemaMismatchError
from routebook.replay import DriftReport, measure_drift, record
from routebook.replay.gap import gaps_of_logits, gaps_of_logprobs
from routebook.replay.shift import Dummies, Shift, Strangers
from routebook.routes import Origin, RoutedExperts, RouteSample
from tests.capture.recorder import ExpertsRecorder
from tests.families import SERVED

PROMPTS = (
    "12+34=46\n50+27=77\n8+5=13\n17+25=",
    "It is a truth universally acknowledged, that",
    "HAMLET. To be, or not to",
    "And God said unto Moses,",
)


@pytest.fixture(scope="module")
def trainer() -> Any:
    return load_pretrained(resolve_model("tiny"), "float32").eval()


@pytest.fixture(scope="module")
def rollout() -> Any:
    return load_pretrained(resolve_model("tiny"), "bfloat16").eval()


@pytest.fixture(scope="module")
def generated() -> tuple[list[RouteSample], list[list[float]]]:
    """Completions of the engine in bfloat16, and the log-probabilities that they were sampled with."""
    llm = LLM("tiny", dtype="bfloat16", device="cpu")
    params = SamplingParams(n=2, max_tokens=90, ignore_eos=True, seed=1, logprobs=0)
    outputs = llm.generate(list(PROMPTS), params)
    choices = [(output, choice) for output in outputs for choice in output.choices]
    samples = [make_sample(llm, output, choice) for output, choice in choices]
    return samples, [[token.logprob for token in choice.logprobs or ()] for _, choice in choices]


def changed(samples: list[RouteSample], change: Any) -> list[RouteSample]:
    """The samples with other ids in the same rows."""
    return [
        replace(s, record=replace(s.record, ids_TLK=change(s.record.ids_TLK.copy())))
        for s in samples
    ]


def first_rows(filler: Any) -> Any:
    def change(ids_TLK: np.ndarray) -> np.ndarray:
        ids_TLK[:8] = filler
        return ids_TLK

    return change


def references(generated: Any, rollout: Any) -> list[dict[str, Any]]:
    return [{"rollout": rollout}, {"logprobs": generated[1]}]


@pytest.fixture(scope="module")
def reports(trainer, rollout, generated) -> list[DriftReport]:
    """Of the honest samples, with either reference."""
    return [
        measure_drift(trainer, generated[0], **reference)
        for reference in references(generated, rollout)
    ]


def test_an_honest_record_cures_what_routing_breaks(reports):
    for report in reports:
        assert report.passes
        assert report.faults == []
        assert report.fallback_share == 0.0
        assert 0 < report.different_pairs < 0.03
        assert report.rerouted_native.num_tokens > 10
        assert report.rerouted_replayed.kl < report.rerouted_native.kl / 5
        # Over all tokens it is less: most of what remains is the rounding of bfloat16, not routing.
        assert report.replayed.kl < report.native.kl / 1.5
        assert report.own_overlap > 0.99
    by_model, by_logprobs = reports
    assert by_model.different_pairs == by_logprobs.different_pairs
    # The recomputed rollout is the engine's, up to rounding that differs between prefill and decode.
    assert by_model.native.kl == pytest.approx(by_logprobs.native.kl, rel=0.5)


@torch.no_grad()
def test_the_figures_are_those_of_plain_forwards(trainer, generated, reports):
    """Written out with a recorder that intercepts nothing and the engine's own log-probabilities."""
    samples, logprobs = generated
    gaps, different = [], []
    for sample, sampled in zip(samples, logprobs, strict=True):
        recorder = ExpertsRecorder()
        tokens = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
        with recorder.recording(trainer):
            logits = trainer(input_ids=tokens, use_cache=False).logits[0]
        own = recorder.rows[: sample.record.num_rows].sort(-1).values.numpy()
        different.append((own != np.sort(sample.record.ids_TLK, axis=-1)).any(-1))
        loss = F.cross_entropy(logits[:-1], tokens[0, 1:], reduction="none")
        gaps.append(-loss[sample.num_prompt_tokens - 1 :] - torch.tensor(sampled))
    report = reports[1]
    gap, pairs = torch.cat(gaps), np.concatenate(different)
    assert report.native.num_tokens == len(gap) == len(samples) * 90
    assert report.native.mean_logprob_gap == pytest.approx(gap.abs().mean().item(), rel=1e-3)
    assert report.native.max_logprob_gap == pytest.approx(gap.abs().max().item(), rel=1e-3)
    assert report.native.kl == pytest.approx((gap.exp() - 1 - gap).mean().item(), rel=2e-2)
    assert report.different_pairs == pytest.approx(pairs.mean())
    assert report.different_tokens == pytest.approx(pairs.any(-1).mean())
    assert [layer.different for layer in report.layers] == pytest.approx(pairs.mean(0).tolist())


@pytest.mark.parametrize(
    ("change", "offset"),
    [
        (lambda ids: np.roll(ids, 1, axis=0), (-1, 0)),
        (lambda ids: np.roll(ids, -2, axis=0), (2, 0)),
        (lambda ids: np.roll(ids, 1, axis=1), (0, -1)),
    ],
)
def test_shifted_rows_and_layers_are_named_and_fail(trainer, rollout, generated, change, offset):
    samples = changed(generated[0], change)
    for reference in references(generated, rollout):
        report = measure_drift(trainer, samples, **reference)
        (fault,) = report.faults
        assert isinstance(fault, Shift)
        assert (fault.rows, fault.layers) == offset
        assert not report.passes
        # Wrong rows do not vouch for themselves: they are far worse than none.
        assert report.replayed.kl > 100 * report.native.kl


@pytest.mark.parametrize("filler", [0, np.arange(4)])
def test_dummied_prompt_rows_are_named_and_fail(trainer, rollout, generated, filler):
    samples = changed(generated[0], first_rows(filler))
    for reference in references(generated, rollout):
        report = measure_drift(trainer, samples, **reference)
        assert len(report.faults) == len(samples)
        assert all(isinstance(fault, Dummies) for fault in report.faults)
        assert {(fault.start, fault.stop) for fault in report.faults} == {(0, 8)}
        assert not report.passes
        assert "FAIL" in report.verdict


def test_rows_of_another_model_are_strangers(trainer, generated):
    rng = np.random.default_rng(0)

    def strange(ids_TLK: np.ndarray) -> np.ndarray:
        return rng.random((*ids_TLK.shape[:2], 16)).argsort(-1)[..., :4].astype(np.uint8)

    report = measure_drift(trainer, changed(generated[0], strange), logprobs=generated[1])
    (fault,) = report.faults
    assert isinstance(fault, Strangers)


def test_a_model_that_routes_the_same_has_nothing_to_cure(trainer, generated):
    """The trainer's own rows and its own distributions: equal, and no failure."""
    samples, _ = generated
    own = []
    for sample in samples[:2]:
        tokens = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
        with torch.no_grad(), record(trainer) as forwards:
            trainer(input_ids=tokens, use_cache=False)
        own.append(replace(sample, record=forwards[0].records()[0].truncate(sample.record.stop)))
    report = measure_drift(trainer, own, rollout=trainer)
    assert (report.native.kl, report.replayed.kl, report.different_pairs) == (0.0, 0.0, 0.0)
    assert report.passes
    assert "nothing to cure" in report.verdict


def test_tokens_without_a_row_are_counted(trainer, generated):
    (sample, *_), (logprobs, *_) = generated
    rows = sample.record
    origins = np.full(rows.num_rows, Origin.DECODE, np.uint8)
    origins[5:15] = Origin.ABSENT
    rows = RoutedExperts.from_rows(rows.schema, rows.ids_TLK, sample.token_ids, origin_T=origins)
    late = replace(sample, record=rows.slice(2, rows.stop))
    report = measure_drift(trainer, [late], logprobs=[logprobs])
    assert report.fallback_share == pytest.approx(12 / (len(sample.token_ids) - 1))
    assert report.num_rows == len(sample.token_ids) - 1 - 12
    assert report.faults == []


def test_a_trainer_in_training_mode_is_measured_in_evaluation_mode_and_given_back(
    trainer, generated
):
    trainer.train()
    report = measure_drift(trainer, generated[0][:1], logprobs=generated[1][:1])
    assert report.num_samples == 1
    assert all(module.training for module in trainer.modules())
    assert type(trainer.model.layers[0]).__mro__[1].__name__ == "GradientCheckpointingLayer"
    trainer.eval()


def test_mistakes_are_told(trainer, rollout, generated):
    samples, logprobs = generated
    for wrong in ({}, {"rollout": rollout, "logprobs": logprobs}):
        with pytest.raises(RequestError, match="give either"):
            measure_drift(trainer, samples, **wrong)
    with pytest.raises(RequestError, match="no sample"):
        measure_drift(trainer, [], rollout=rollout)
    with pytest.raises(RequestError, match="for 90 sampled tokens"):
        measure_drift(trainer, samples[:1], logprobs=[logprobs[0][:-1]])
    rows = samples[0].record
    empty = replace(samples[0], record=rows.slice(rows.stop, rows.stop))
    with pytest.raises(RequestError, match="sample 0 has 0 rows"):
        measure_drift(trainer, [empty], rollout=rollout)
    with pytest.raises(SchemaMismatchError, match="give the model that made it"):
        measure_drift(SERVED["qwen3_moe"].build(), samples, rollout=rollout)


def test_the_two_measures_of_kl_agree_on_average():
    """The estimate from sampled tokens has the divergence of the distributions as its mean."""
    torch.manual_seed(0)
    p = torch.randn(1, 8).double()
    q = p + 0.3 * torch.randn(1, 8).double()
    exact = gaps_of_logits(p, q, torch.tensor([0])).kl_C.item()
    each = torch.arange(8)
    logp = p.float().log_softmax(-1)[0]
    estimates = gaps_of_logprobs(logp, q.expand(8, -1), each).kl_C
    assert (estimates * logp.exp()).sum().item() == pytest.approx(exact, rel=1e-4)
    expected = F.kl_div(q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="sum")
    assert exact == pytest.approx(expected.item(), rel=1e-4)
