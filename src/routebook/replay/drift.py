"""Drift: how far a trainer's forward is from the rollout, by its own routes and by the recorded ones.

For every sample the trainer runs twice over the same tokens: natively, and along the record. Both are compared with the
rollout: with the log-probabilities that its tokens were sampled with, or with a forward of the rollout's model.

Legend of shape suffixes: T = rows of a record, L = MoE layers, K = top-k, C = sampled tokens, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from routebook.errors import RequestError, SchemaMismatchError
from routebook.replay.batch import NATIVE, RouteBatch
from routebook.replay.drift_report import CURED, DriftReport, LayerDrift
from routebook.replay.gap import TokenGaps, gaps_of_logits, gaps_of_logprobs, joined
from routebook.replay.session import RouteSession, bound
from routebook.replay.shift import OFFSETS, Fault, PlaceFinder, duplicates, row_faults
from routebook.routes import RoutedExperts, RouteSample, RouteSchema

Logprobs = npt.ArrayLike

__all__ = ["CURED", "DriftReport", "measure_drift"]


def measure_drift(
    trainer: nn.Module,
    samples: Iterable[RouteSample],
    *,
    rollout: nn.Module | None = None,
    logprobs: Iterable[Logprobs] | None = None,
) -> DriftReport:
    """Compare a trainer's native and replayed forward with the rollout that made the samples.

    Args:
        trainer: the model that learns, with the weights that made the samples.
        samples: tokens and rows; each has at least one sampled token and one row.
        rollout: the model that sampled, in its number format. Its distributions are computed anew: along the record
            where its rows lie where they belong, else by its own choice, so that wrong rows cannot vouch for
            themselves.
        logprobs: in place of `rollout`, the log-probabilities `[C]` that each sample's tokens were sampled with, of
            unmodified logits.

    Raises:
        RequestError: neither or both of the two, no sample, or a sample without rows or sampled tokens.
        SchemaMismatchError: a sample of another model.
        UncapturableError: the model's routes cannot be replayed.
    """
    if (rollout is None) == (logprobs is None):
        raise RequestError(
            "give either the model that sampled, or the log-probabilities it sampled with"
        )
    with _quiet(trainer) as session, _quiet(rollout) as other:
        tally = _Tally(session.schema)
        references: Iterable[Any] = logprobs if logprobs is not None else _forever(other)
        for index, (sample, reference) in enumerate(zip(samples, references, strict=other is None)):
            _check(index, sample, session.schema)
            tally.add(_compared(session, sample, reference, _name(index, sample)))
    return tally.report()


@dataclass(frozen=True, slots=True)
class _Compared:
    """One sample after its forwards."""

    different_TL: npt.NDArray[np.bool_]
    """Valid rows whose recorded experts are other ones than the trainer's own."""
    overlap_TL: npt.NDArray[np.float64]
    """Share of the recorded experts that the trainer would have chosen as well, in the replayed forward."""
    num_absent: int
    """Tokens that took the live router's choice for want of a usable row."""
    num_inputs: int
    native: TokenGaps
    replayed: TokenGaps
    rerouted_C: torch.Tensor
    """Sampled tokens that were predicted from a token with other experts."""
    ids_TLK: npt.NDArray[np.integer]
    own_TLK: npt.NDArray[np.int64]
    valid_T: npt.NDArray[np.bool_]
    faults: tuple[Fault, ...]


@dataclass(slots=True)
class _Tally:
    schema: RouteSchema
    parts: list[_Compared] = field(default_factory=list)

    def add(self, part: _Compared) -> None:
        self.parts.append(part)

    def report(self) -> DriftReport:
        if not self.parts:
            raise RequestError("there is no sample to compare")
        parts, schema = self.parts, self.schema
        finder = PlaceFinder(top_k=schema.top_k, num_experts=schema.num_experts)
        for part in parts:
            finder.add(part.ids_TLK, part.own_TLK, part.valid_T)
        whole = finder.fault()
        parts_faults = chain.from_iterable(part.faults for part in parts)
        faults: list[Fault] = [whole] if whole else list(parts_faults)
        different_TL = np.concatenate([part.different_TL for part in parts])
        overlap_TL = np.concatenate([part.overlap_TL for part in parts])
        native, replayed = (
            joined([part.native for part in parts]),
            joined([p.replayed for p in parts]),
        )
        rerouted_C = torch.cat([part.rerouted_C for part in parts])
        everywhere_C = torch.ones_like(rerouted_C)
        return DriftReport(
            num_samples=len(parts),
            num_rows=len(different_TL),
            fallback_share=sum(p.num_absent for p in parts) / sum(p.num_inputs for p in parts),
            different_pairs=_mean(different_TL),
            different_tokens=_mean(different_TL.any(axis=1)),
            own_overlap=_mean(overlap_TL),
            layers=[
                LayerDrift(layer_id=layer, different=_mean(d_T), own_overlap=_mean(o_T))
                for layer, d_T, o_T in zip(
                    schema.layer_ids, different_TL.T, overlap_TL.T, strict=True
                )
            ],
            native=native.over(everywhere_C),
            replayed=replayed.over(everywhere_C),
            rerouted_native=native.over(rerouted_C),
            rerouted_replayed=replayed.over(rerouted_C),
            offsets=[[finder.share(rows, layers) for layers in OFFSETS] for rows in OFFSETS],
            faults=faults,
        )


@torch.no_grad()
def _compared(session: RouteSession, sample: RouteSample, reference: Any, name: str) -> _Compared:
    record = sample.record
    rows = np.s_[record.start : record.stop]
    input_ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
    batch = _usable_rows(record, len(sample.token_ids))
    with session.recording() as natives:
        native_CV = _sampled_logits(session, sample, input_ids)
    with session.forward(batch, keep_own=True) as replays:
        replayed_CV = _sampled_logits(session, sample, input_ids)
    own_TLK = natives[0].topk_ids[rows].cpu().numpy()
    faults = tuple(row_faults(name, record, own_TLK))
    finder = PlaceFinder(top_k=record.schema.top_k, num_experts=record.schema.num_experts)
    finder.add(record.ids_TLK, own_TLK, record.valid_T)
    fits = not faults and finder.fault() is None
    gaps = _Distances(sample, reference, input_ids, batch if fits else None)
    different_TL = (np.sort(record.ids_TLK, axis=2) != np.sort(own_TLK, axis=2)).any(axis=2)
    replay_own_TLK = replays[0].own_topk_ids[rows].cpu().numpy()
    overlap_TL = (record.ids_TLK[..., :, None] == replay_own_TLK[..., None, :]).any(-1).mean(-1)
    num_inputs = len(sample.token_ids) - 1
    return _Compared(
        different_TL=different_TL[record.valid_T],
        overlap_TL=overlap_TL[record.valid_T],
        num_absent=num_inputs - int(batch.forced_N[:num_inputs].sum()),
        num_inputs=num_inputs,
        native=gaps.of(native_CV),
        replayed=gaps.of(replayed_CV),
        rerouted_C=_predicted_from(sample, different_TL.any(axis=1) & record.valid_T),
        ids_TLK=record.ids_TLK,
        own_TLK=own_TLK,
        valid_T=record.valid_T,
        faults=faults,
    )


class _Distances:
    """Distance of a forward's logits from the rollout of one sample."""

    def __init__(
        self, sample: RouteSample, reference: Any, input_ids: torch.Tensor, batch: RouteBatch | None
    ) -> None:
        self._sampled_C = torch.from_numpy(sample.sampled_token_ids.astype(np.int64))
        self._logprobs_C: torch.Tensor | None = None
        if isinstance(reference, RouteSession):
            doing = reference.recording() if batch is None else reference.forward(batch)
            with doing:
                self._rollout_CV = _sampled_logits(reference, sample, input_ids)
        else:
            self._logprobs_C = _given_logprobs(reference, len(self._sampled_C))

    def of(self, logits_CV: torch.Tensor) -> TokenGaps:
        """Token by token."""
        sampled_C = self._sampled_C.to(logits_CV.device)
        if self._logprobs_C is not None:
            return gaps_of_logprobs(self._logprobs_C, logits_CV, sampled_C)
        return gaps_of_logits(self._rollout_CV.to(logits_CV.device), logits_CV, sampled_C)


def _sampled_logits(
    session: RouteSession, sample: RouteSample, input_ids: torch.Tensor
) -> torch.Tensor:
    """Logits `[C, V]` from which the sampled tokens were predicted."""
    model: Any = session.model
    device = next(model.parameters()).device
    logits_CV: torch.Tensor = model(input_ids=input_ids.to(device), use_cache=False).logits[0]
    return logits_CV[sample.num_prompt_tokens - 1 : -1]


def _usable_rows(record: RoutedExperts, num_tokens: int) -> RouteBatch:
    """The rows of one sample; what no router can have chosen stays with the live router."""
    ids_NLK = np.full(record.schema.shape(num_tokens), NATIVE, np.int64)
    usable_T = record.valid_T & ~duplicates(record)
    ids_NLK[record.start : record.stop][usable_T] = record.ids_TLK[usable_T]
    return RouteBatch.from_ids(record.schema, ids_NLK)


def _predicted_from(sample: RouteSample, row_T: npt.NDArray[np.bool_]) -> torch.Tensor:
    """bool `[C]`: which sampled tokens were predicted from one of these rows of the record."""
    at_N = np.zeros(len(sample.token_ids), np.bool_)
    at_N[sample.record.start : sample.record.stop] = row_T
    return torch.from_numpy(at_N[sample.num_prompt_tokens - 1 : -1])


def _given_logprobs(logprobs: Logprobs, num_sampled: int) -> torch.Tensor:
    logprobs_C = torch.as_tensor(np.asarray(logprobs, np.float32))
    if logprobs_C.shape != (num_sampled,):
        raise RequestError(
            f"log-probabilities of shape {list(logprobs_C.shape)} for {num_sampled} sampled tokens"
        )
    return logprobs_C


def _check(index: int, sample: RouteSample, schema: RouteSchema) -> None:
    if sample.record.schema != schema:
        raise SchemaMismatchError(
            f"sample {index} has {sample.record.schema}, the model has {schema}; give the model that made it"
        )
    if not sample.record.valid_T.any() or not len(sample.sampled_token_ids):
        raise RequestError(
            f"sample {index} has {int(sample.record.valid_T.sum())} rows and {len(sample.sampled_token_ids)} "
            "sampled tokens; drift needs some of both"
        )


def _name(index: int, sample: RouteSample) -> str:
    return (
        f"request {sample.meta['request_id']}" if "request_id" in sample.meta else f"sample {index}"
    )


def _forever(session: RouteSession | None) -> Iterator[RouteSession]:
    assert session is not None
    while True:
        yield session


@contextmanager
def _quiet(model: nn.Module | None) -> Iterator[Any]:
    """The model's session, in evaluation mode for the block."""
    if model is None:
        yield None
        return
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with bound(model) as session:
            yield session
    finally:
        for module in training:
            module.training = True


def _mean(values: npt.ArrayLike) -> float:
    array = np.asarray(values)
    return float(array.mean()) if array.size else 0.0
