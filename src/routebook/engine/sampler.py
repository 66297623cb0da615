"""From logits to tokens.

Every request has a seed, and its choice at a position depends on the seed, the position and the logits only: not on
what else is in the batch, nor on whether the request was preempted in between. So a single uniform number per token
is derived from (seed, position) by a counter-based generator, and inverts the cumulative distribution.

Legend of shape suffixes: B = sampled requests, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from routebook.capture.outputs import download
from routebook.engine.sampling_params import SamplingParams
from routebook.engine.step import TokenLogprobs
from routebook.engine.transfers import upload

_UNIFORM_BITS = 24


class LogprobsTensors(NamedTuple):
    """Log-probabilities of the requests that asked; A = such requests, k = the most that one of them wants."""

    asked: list[int]
    """Places among the sampled requests."""
    wanted: list[int]
    """How many of the most likely each wants."""
    chosen_A1: torch.Tensor
    top_ids_Ak: torch.Tensor
    top_Ak: torch.Tensor

    def to_cpu_nonblocking(self) -> LogprobsTensors:
        """Queue the copies to the host on the current stream."""
        return self._replace(
            chosen_A1=download(self.chosen_A1),
            top_ids_Ak=download(self.top_ids_Ak),
            top_Ak=download(self.top_Ak),
        )


class SampledTokens(NamedTuple):
    """What `sample` chose, still where the model runs."""

    token_ids_B: torch.Tensor
    logprobs: LogprobsTensors | None

    def to_cpu_nonblocking(self) -> SampledTokens:
        """Queue the copies to the host on the current stream; wait for its event before `tolists`."""
        logprobs = self.logprobs.to_cpu_nonblocking() if self.logprobs is not None else None
        return SampledTokens(download(self.token_ids_B), logprobs)

    def tolists(self) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """The tokens, and for the rows that asked their log-probabilities."""
        token_ids: list[int] = self.token_ids_B.tolist()
        if self.logprobs is None:
            return token_ids, {}
        asked, wanted, *tensors = self.logprobs
        rows = zip(asked, wanted, *(tensor.tolist() for tensor in tensors), strict=True)
        return token_ids, {
            b: TokenLogprobs(
                token_id=token_ids[b],
                logprob=chosen[0],
                top=tuple(zip(top_ids, top, strict=True))[:count],
            )
            for b, count, chosen, top_ids, top in rows
        }


def sample(
    logits_BV: torch.Tensor,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
) -> SampledTokens:
    """Choose the next token of each request, without waiting for the device.

    Args:
        logits_BV: one row per request, any float dtype.
        params: what each request asks for.
        seeds: the seed of each request.
        positions: the position that each new token will have.
    """
    token_ids_B = _likeliest(logits_BV)
    random = [b for b, p in enumerate(params) if p.temperature > 0]
    if random:
        uniform = uniform_numbers([seeds[b] for b in random], [positions[b] for b in random])
        uniform_B, random_B = upload(logits_BV.device, uniform, np.array(random))
        chosen = logits_BV if len(random) == len(logits_BV) else logits_BV[random_B]
        probs = probabilities(chosen, [params[b] for b in random])
        token_ids_B.index_copy_(0, random_B, _invert(probs, uniform_B))
    return SampledTokens(token_ids_B, _logprobs(logits_BV, params, token_ids_B))


def probabilities(logits_BV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Distribution `[B, V]` after temperature, then min-p, top-k and top-p, each on what the ones before left."""
    temperature = _column([p.temperature for p in params], logits_BV)
    logits_BV = logits_BV.float()
    # Relative to the greatest, so that no temperature makes them overflow.
    logits_BV = logits_BV - logits_BV.amax(dim=-1, keepdim=True)
    probs = torch.softmax(logits_BV / temperature, dim=-1)
    if all(p.top_k == 0 and p.top_p == 1.0 and p.min_p == 0.0 for p in params):
        return probs
    sorted_BV, order_BV = probs.sort(dim=-1, descending=True, stable=True)
    sorted_BV = _filtered(sorted_BV, params)
    return torch.zeros_like(probs).scatter(-1, order_BV, sorted_BV)


def _likeliest(logits_BV: torch.Tensor) -> torch.Tensor:
    """Token of the greatest logit; the first of equals."""
    if logits_BV.device.type == "cpu" and logits_BV.dtype != torch.bfloat16:
        # Ten times as fast as torch's own on the CPU, and a visible part of a small decode step.
        return torch.from_numpy(logits_BV.numpy().argmax(axis=-1))
    return logits_BV.argmax(dim=-1)


def uniform_numbers(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float32]:
    """One number in [0, 1) per (seed, position): splitmix64 of both, its top 24 bits."""
    with np.errstate(over="ignore"):
        x = np.array(seeds, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = _mix(x) + np.array(positions, np.uint64) * np.uint64(0xD1342543DE82EF95)
        bits = _mix(x) >> np.uint64(64 - _UNIFORM_BITS)
    return bits.astype(np.float32) / np.float32(2**_UNIFORM_BITS)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _filtered(sorted_BV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Zero what min-p, top-k and top-p drop of descending probabilities; the likeliest token always stays."""
    ranks = torch.arange(sorted_BV.shape[-1], device=sorted_BV.device)
    min_p = _column([p.min_p for p in params], sorted_BV)
    kept = sorted_BV * (sorted_BV >= min_p * sorted_BV[:, :1])
    top_k = _column([p.top_k or sorted_BV.shape[-1] for p in params], sorted_BV)
    kept = kept * (ranks < top_k)
    top_p = _column([p.top_p for p in params], sorted_BV)
    before = kept.cumsum(dim=-1) - kept
    inside = (before < top_p * kept.sum(dim=-1, keepdim=True)) | (top_p >= 1.0)
    return kept * (inside | (ranks == 0))


def _invert(probs_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """First token whose cumulative probability exceeds the uniform share of the total."""
    cumulative = probs_BV.cumsum(dim=-1)
    target = uniform_B[:, None] * cumulative[:, -1:]
    chosen_B = torch.searchsorted(cumulative, target, right=True)[:, 0]
    # Beyond the last token where the logits are NaN: such a model chooses nothing, but must not harm others.
    return chosen_B.clamp_(max=probs_BV.shape[-1] - 1)


def _logprobs(
    logits_BV: torch.Tensor, params: Sequence[SamplingParams], token_ids_B: torch.Tensor
) -> LogprobsTensors | None:
    """Log-probabilities for the requests that asked, under the logits as the model gave them."""
    asked = [b for b, p in enumerate(params) if p.logprobs is not None]
    if not asked:
        return None
    (asked_A,) = upload(logits_BV.device, np.array(asked))
    logprobs = torch.log_softmax(logits_BV[asked_A].float(), dim=-1)
    wanted = [params[b].logprobs or 0 for b in asked]
    top = logprobs.topk(min(max(wanted), logprobs.shape[-1]), dim=-1)
    chosen_A1 = logprobs.gather(-1, token_ids_B[asked_A, None])
    return LogprobsTensors(asked, wanted, chosen_A1, top.indices, top.values)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    (column,) = upload(like.device, np.array(values, np.float32))
    return column[:, None]
