"""Sampling against transformers' own logits warpers and against the distribution itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from routebook.engine.sampler import probabilities, sample, uniform_numbers
from routebook.engine.sampling_params import SamplingParams
from routebook.errors import RequestError

VOCAB = 50


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        ({}, []),
        ({"top_k": 5}, [TopKLogitsWarper(5)]),
        ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        ({"top_k": 7, "top_p": 0.6}, [TopKLogitsWarper(7), TopPLogitsWarper(0.6)]),
        (
            {"min_p": 0.05, "top_k": 9, "top_p": 0.9},
            [MinPLogitsWarper(0.05), TopKLogitsWarper(9), TopPLogitsWarper(0.9)],
        ),
    ],
)
def test_distribution_is_that_of_transformers_warpers(
    temperature: float, params: dict[str, float], warpers: list[object]
) -> None:
    scores = logits(8)
    wanted = scores / temperature
    for warper in warpers:
        wanted = warper(None, wanted)  # type: ignore[operator]
    ours = probabilities(scores, [SamplingParams(temperature=temperature, **params)] * 8)  # type: ignore[arg-type]
    ours = ours / ours.sum(-1, keepdim=True)
    torch.testing.assert_close(ours, wanted.softmax(-1))


def test_frequencies_follow_the_distribution() -> None:
    scores = logits(1)
    draws = 20_000
    tokens, _ = sample(
        scores.expand(draws, -1), [SamplingParams()] * draws, [7] * draws, list(range(draws))
    ).tolists()
    counts = np.bincount(tokens, minlength=VOCAB)
    expected = scores[0].softmax(-1).numpy() * draws
    chi_square = ((counts - expected) ** 2 / expected)[expected > 5].sum()
    assert chi_square < 2 * (expected > 5).sum()


def test_uniform_numbers_look_uniform_and_differ_by_seed_and_position() -> None:
    by_position = uniform_numbers([3] * 10_000, range(10_000))
    by_seed = uniform_numbers(range(10_000), [3] * 10_000)
    for numbers in (by_position, by_seed):
        assert abs(numbers.mean() - 0.5) < 0.02
        assert np.histogram(numbers, 10, (0, 1))[0].min() > 850
        assert numbers.min() >= 0
        assert numbers.max() < 1
    assert abs(np.corrcoef(by_position, by_seed)[0, 1]) < 0.05


def test_a_choice_does_not_depend_on_the_batch() -> None:
    scores = logits(16)
    params = [SamplingParams(temperature=1 + b / 8, top_k=b, top_p=1 - b / 40) for b in range(16)]
    together, _ = sample(scores, params, list(range(16)), list(range(50, 66))).tolists()
    for b in range(16):
        alone, _ = sample(scores[b : b + 1], params[b : b + 1], [b], [50 + b]).tolists()
        assert alone == [together[b]]


def test_greedy_and_random_requests_share_a_batch() -> None:
    scores = logits(4)
    params = [SamplingParams(temperature=t) for t in (0, 1, 0, 1)]
    tokens, _ = sample(scores, params, [1] * 4, [9] * 4).tolists()
    assert [tokens[b] for b in (0, 2)] == scores[[0, 2]].argmax(-1).tolist()


def test_logprobs_are_of_the_raw_logits() -> None:
    scores = logits(3)
    params = [
        SamplingParams(temperature=0.1, logprobs=2),
        SamplingParams(top_k=1),
        SamplingParams(logprobs=0),
    ]
    tokens, entries = sample(scores, params, [1, 2, 3], [4, 5, 6]).tolists()
    wanted = scores.log_softmax(-1)
    assert entries.keys() == {0, 2}
    for b, logprobs in entries.items():
        assert logprobs.token_id == tokens[b]
        assert logprobs.logprob == pytest.approx(wanted[b, tokens[b]].item())
        best = wanted[b].topk(params[b].logprobs or 0)
        assert [i for i, _ in logprobs.top] == best.indices.tolist()
        assert [v for _, v in logprobs.top] == pytest.approx(best.values.tolist())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("min_p", 1.5),
        ("logprobs", -1),
        ("seed", -1),
        ("stop", ("",)),
        ("stop", [5]),
        ("n", 1.5),
        ("n", 100_000_000),
        ("max_tokens", 2.5),
        ("max_tokens", float("nan")),
        ("temperature", "hot"),
        ("routed_experts", "yes"),
        ("routed_experts_prompt_start", -1),
    ],
)
def test_values_that_cannot_work_are_named(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]
