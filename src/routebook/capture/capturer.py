"""Capture on one model: its routers, bound, and the buffer that they write to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from routebook.capture.binding import RouterBinding, bind_routers
from routebook.capture.blocks import Run, describe
from routebook.capture.buffer import CaptureBuffer
from routebook.capture.forcing import ForcedRoutes, Switch, check_forcible
from routebook.capture.interception import (
    ExpertTopK,
    Forward,
    RouterTap,
    TopK,
    TopKHandler,
    is_tapped,
    under_mode,
)
from routebook.capture.outputs import RoutedExpertsTensors
from routebook.errors import CaptureError
from routebook.routes.schema import RouteSchema


class Capturer:
    """Notes the experts that a model's routers choose, while armed; else the model runs as before.

    Use `Capturer.bind`, then for each forward `with capturer.armed(n): model(...)`, `snapshot()`.
    """

    def __init__(self, bindings: tuple[RouterBinding, ...], buffer: CaptureBuffer) -> None:
        self.bindings = bindings
        self.buffer = buffer
        self._switch = Switch()
        self._taps = [
            RouterTap(
                binding.module,
                self._switch,
                _tapped(binding, index, buffer, self._switch),
                binding.adapter.method if binding.adapter else "forward",
            )
            for index, binding in enumerate(bindings)
        ]

    @classmethod
    def bind(cls, model: nn.Module, max_tokens: int, *, run: Run | None = None) -> Capturer:
        """Find the routers of `model` by a dry run and prepare a buffer for `max_tokens` rows.

        Args:
            model: a decoder-only language model.
            max_tokens: the most tokens one forward pass can have.
            run: runs one small forward of the model; by default a few token ids without a KV cache.

        Raises:
            DenseModelError: the model has no MoE layer.
            UncapturableError: a router cannot be captured; the message names it.
            CaptureError: the model is bound already.
        """
        for path, module in model.named_modules():
            if is_tapped(module):
                raise CaptureError(f"{describe(model, path)} is bound already; unbind it first")
        bindings, schema = bind_routers(model, run)
        device = next(bindings[0].module.parameters(), torch.empty(0)).device
        return cls(bindings, CaptureBuffer(schema, max_tokens, device))

    @property
    def schema(self) -> RouteSchema:
        """Layers, experts and top-k of the rows."""
        return self.buffer.schema

    def check_forcible(self) -> None:
        """Refuse a model on which no route can be forced.

        Raises:
            UncapturableError: naming the router and the reason.
        """
        check_forcible(self.bindings)

    @contextmanager
    def armed(self, num_tokens: int, forced: ForcedRoutes | None = None) -> Iterator[None]:
        """Capture the one forward pass of `num_tokens` tokens that runs inside.

        Args:
            num_tokens: rows of the forward.
            forced: routes that some of its rows must take; check `check_forcible` once before.

        Raises:
            CaptureError: it does not fit the buffer, or the forward broke a rule of capture.
        """
        self.buffer.begin(num_tokens)
        self._switch.on, self._switch.forced = True, forced
        try:
            yield
        finally:
            self._switch.on, self._switch.forced = False, None

    def snapshot(self) -> RoutedExpertsTensors:
        """Return the rows `[N, L, K]` of the last armed forward: on the device, the caller's own.

        Raises:
            CaptureError: that forward did not capture every layer exactly once.
        """
        return self.buffer.snapshot()

    def unbind(self) -> None:
        """Restore the model exactly as it was before `bind`. A second call does nothing."""
        while self._taps:
            self._taps[-1].remove()
            self._taps.pop()


def _tapped(
    binding: RouterBinding, layer_index: int, buffer: CaptureBuffer, switch: Switch
) -> Callable[[Forward], Forward]:
    """Return how the method of a bound router captures.

    A router that returns the tensor of its top-k is read there, which costs no more than the write. Only the
    others, and forwards with forced routes, run under a mode, which every torch function in them pays for.
    """
    if binding.output is not None:
        plain = _output_reader(binding, binding.output, layer_index, buffer)
    else:
        plain = under_mode(ExpertTopK(binding.num_experts, _noting(layer_index, buffer)))
    forcing = under_mode(ExpertTopK(binding.num_experts, _forcing(layer_index, buffer, switch)))

    def wrap(original: Forward) -> Forward:
        plain_forward, forcing_forward = plain(original), forcing(original)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if switch.forced is None:
                return plain_forward(*args, **kwargs)
            return forcing_forward(*args, **kwargs)

        return forward

    return wrap


def _forcing(layer_index: int, buffer: CaptureBuffer, switch: Switch) -> TopKHandler:
    def force(scores_NE: torch.Tensor, choose: Callable[[], TopK]) -> TopK:
        assert switch.forced is not None
        result = switch.forced.answer(layer_index, scores_NE, choose)
        buffer.capture(layer_index, result[1])
        return result

    return force


def _noting(layer_index: int, buffer: CaptureBuffer) -> TopKHandler:
    def note(scores_NE: torch.Tensor, choose: Callable[[], TopK]) -> TopK:
        result = choose()
        buffer.capture(layer_index, result[1])
        return result

    return note


def _output_reader(
    binding: RouterBinding, place: int, layer_index: int, buffer: CaptureBuffer
) -> Callable[[Forward], Forward]:
    eval_only = binding.adapter is not None and binding.adapter.eval_only

    def wrap(original: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if eval_only and binding.module.training:
                raise CaptureError(f"{binding.path} samples its experts in training mode; use eval")
            output = original(*args, **kwargs)
            buffer.capture(layer_index, output[place])
            return output

        return forward

    return wrap
