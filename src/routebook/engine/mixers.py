"""Per-request state of linear-attention, convolution and state-space layers.

Such a mixer sees the packed batch `[1, T, D]` of a step and would run its state from one request
into the next. Its forward is replaced by a loop over the requests of the step that calls the
original with each request's own cache. Full-attention layers are not touched: they find their keys
and values in the paged pool.

Legend of shape suffixes: T = tokens of the step in batch order, N = rows of one request in the
step, D = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from routebook.capture.interception import under_mode
from routebook.engine.mixer_families import (
    MixerFamily,
    TimeStepLimit,
    find_family,
    stateful_layers,
)
from routebook.errors import ModelError, RequestError


class Segment(NamedTuple):
    """The rows of one request in a step."""

    request_id: Hashable
    start_row: int
    num_rows: int
    position: int
    """Position, in the request, of the token in the first row."""


@dataclass(slots=True)
class _State:
    """One request's state in all mixers of the model."""

    cache: Any
    lengths: list[int]
    """Tokens that each mixer's state covers; unequal only in a forward, or after one failed."""


class StatefulMixers:
    """The stateful mixers of one model and the state of every request that runs on it.

    Before each forward of the model `begin_step` says whose rows the batch holds. A state lives
    from a request's first token until `drop`.
    """

    def __init__(self, model: Any, mixers: Sequence[tuple[Any, MixerFamily]]) -> None:
        self._config = model.config
        self._new_cache = mixers[0][1].new_cache
        self._states: dict[Hashable, _State] = {}
        self._step: list[tuple[Segment, _State]] | None = None
        self._mixers = [(module, module.__dict__.get("forward")) for module, _ in mixers]
        for index, (module, family) in enumerate(mixers):
            original = module.forward
            if family.limits_time_step:
                original = under_mode(TimeStepLimit(module.time_step_limit))(original)
            module.forward = self._per_request(index, family, original)

    @classmethod
    def bind(cls, model: Any) -> StatefulMixers | None:
        """Replace the forward of every stateful mixer of a transformers model, if it has any.

        Raises:
            ModelError: a layer keeps a state in a mixer that is not known here.
        """
        found = [(module, find_family(module)) for module in model.modules()]
        mixers = [(module, family) for module, family in found if family is not None]
        known = {module.layer_idx for module, _ in mixers}
        unknown = [layer for layer in stateful_layers(model.config) if layer not in known]
        if unknown:
            raise ModelError(
                f"layers {unknown} of {type(model).__name__} keep a state from token to token in "
                "a mixer that this engine does not know; it cannot serve this model"
            )
        return cls(model, mixers) if mixers else None

    @property
    def num_states(self) -> int:
        """Requests that hold a state."""
        return len(self._states)

    def begin_step(self, segments: Sequence[tuple[Hashable, int, int, int]]) -> None:
        """Say whose rows the next forward holds, in batch order and without gaps.

        A request at position 0 gets a fresh state, whatever it had before.

        Args:
            segments: `(request_id, start_row, num_rows, position of first row)` of each request.

        Raises:
            RequestError: a request's rows do not follow its state; no state has changed then.
        """
        step = [Segment(*segment) for segment in segments]
        _check_rows(step)
        for segment in step:
            self._check_follows(segment)
        for segment in step:
            if segment.position == 0:
                state = _State(self._new_cache(self._config), [0] * len(self._mixers))
                self._states[segment.request_id] = state
        self._step = [(segment, self._states[segment.request_id]) for segment in step]

    def drop(self, request_id: Hashable) -> None:
        """Forget a request's state; a request without one is no error."""
        self._states.pop(request_id, None)

    def unbind(self) -> None:
        """Give every mixer its own forward back and forget all states."""
        for module, instance_forward in self._mixers:
            if instance_forward is None:
                del module.forward
            else:
                module.forward = instance_forward
        self._mixers.clear()
        self._states.clear()
        self._step = None

    def _check_follows(self, segment: Segment) -> None:
        if segment.position == 0:
            return
        state = self._states.get(segment.request_id)
        lengths = set(state.lengths) if state else {0}
        if lengths != {segment.position}:
            raise RequestError(
                f"request {segment.request_id!r} continues at position {segment.position}, but its "
                f"mixers' state covers {sorted(lengths)} tokens; run it again from position 0"
            )

    def _per_request(
        self, index: int, family: MixerFamily, original: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return the forward that takes the place of one mixer's `original`."""

        def forward(hidden_states: torch.Tensor, **kwargs: Any) -> Any:
            assert kwargs.get("attention_mask") is None, "a packed batch has no mask"
            assert kwargs.get(family.cache_argument) is None, "run with use_cache=False"
            assert self._step is not None, "begin_step comes before the forward"
            segments = self._step
            num_rows = sum(segment.num_rows for segment, _ in segments)
            assert hidden_states.shape[:2] == (1, num_rows), (hidden_states.shape, num_rows)
            outputs = []
            for segment, state in segments:
                assert state.lengths[index] == segment.position, "one forward per begin_step"
                rows_1ND = hidden_states.narrow(1, segment.start_row, segment.num_rows)
                outputs += _run(family, original, rows_1ND, state.cache, segment.position)
                state.lengths[index] += segment.num_rows
            output_1TD = torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]
            return (output_1TD, None) if family.returns_tuple else output_1TD

        return forward


def _check_rows(step: Sequence[Segment]) -> None:
    """Assert that the segments cover the batch in order, each request once."""
    row = 0
    for segment in step:
        assert segment.start_row == row, (segment, row)
        assert segment.num_rows > 0, segment
        row += segment.num_rows
    assert len({segment.request_id for segment in step}) == len(step), step


def _run(
    family: MixerFamily,
    original: Callable[..., Any],
    rows_1ND: torch.Tensor,
    cache: Any,
    position: int,
) -> list[torch.Tensor]:
    """Run one request's rows on its own cache and return its outputs, in one piece or several."""
    kwargs = {family.cache_argument: cache}
    if family.takes_positions:
        kwargs |= {"position_embeddings": None, "attention_mask": None}
    num_rows = rows_1ND.shape[1]
    size = 1 if family.continues_by_token and position else num_rows
    pieces = (rows_1ND.narrow(1, row, size) for row in range(0, num_rows, size))
    outputs = [original(piece, **kwargs) for piece in pieces]
    return [output[0] for output in outputs] if family.returns_tuple else outputs
