"""The one place where a router's choice is met: the call of `topk` over its experts.

A router's `forward` runs under a `TorchFunctionMode` that hands its expert top-k to a handler. A
capturing handler lets the call run and notes the ids. A handler may as well answer the call itself
with `(scores.gather(-1, ids), ids)`, which makes the model take a given route with its own code for
weights and gradient.

Legend of shape suffixes: N = rows, E = experts, K = top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from routebook.errors import CaptureError

TopK = tuple[torch.Tensor, torch.Tensor]
"""Values and ids, both `[N, K]`; in practice a `torch.return_types.topk`."""

TopKHandler = Callable[[torch.Tensor, Callable[[], TopK]], TopK]
"""Called with the scores `[N, E]` and a function that makes the choice; returns what the router sees."""

Forward = Callable[..., Any]

_TOPK_FUNCTIONS = (torch.topk, torch.Tensor.topk)


def topk_scores(
    func: object, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> torch.Tensor | None:
    """Return the scores `[N, E]` if this is a top-k over the last axis of a matrix, else None."""
    if func not in _TOPK_FUNCTIONS:
        return None
    scores = args[0] if args else kwargs["input"]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    return scores if scores.dim() == 2 and dim in (1, -1) else None


class ExpertTopK(TorchFunctionMode):
    """While entered, gives every top-k over exactly `num_experts` scores per row to `handler`."""

    def __init__(self, num_experts: int, handler: TopKHandler) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.handler = handler

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Pass everything through except the expert top-k."""
        kwargs = kwargs or {}
        scores_NE = topk_scores(func, args, kwargs)
        if scores_NE is None or scores_NE.shape[-1] != self.num_experts:
            return func(*args, **kwargs)
        # The handler may call other torch functions: torch disables this mode while it runs.
        return self.handler(scores_NE, lambda: func(*args, **kwargs))


class OnOff(Protocol):
    """Whether the taps of one capturer are in use."""

    @property
    def on(self) -> bool:
        """Asked at every run of a router."""


class RouterTap:
    """Replaces a method of one module until `remove`; while the switch is off it adds one call.

    Args:
        module: the innermost module whose forward chooses experts.
        switch: shared by all taps of one capturer.
        tapped: builds the method to use while the switch is on from the original one.
        method: the method that chooses.
    """

    def __init__(
        self,
        module: nn.Module,
        switch: OnOff,
        tapped: Callable[[Forward], Forward],
        method: str = "forward",
    ) -> None:
        self._module = module
        self._switch = switch
        self._method = method
        # A method in the instance is somebody else's (accelerate sets one) and must come back.
        self._instance_method: Forward | None = module.__dict__.get(method)
        self._original: Forward = getattr(module, method)
        self._tapped = tapped(self._original)
        setattr(module, method, self._call)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if not self._switch.on:
            return self._original(*args, **kwargs)
        return self._tapped(*args, **kwargs)

    @property
    def is_live(self) -> bool:
        """Whether somebody still steers it; a copy of a tapped module holds a tap that nobody does."""
        return getattr(self._switch, "is_attached", True)

    def remove(self) -> None:
        """Put the module back as it was found.

        Raises:
            CaptureError: something else replaced the method after this tap did.
        """
        if getattr(self._module.__dict__.get(self._method), "__self__", None) is not self:
            raise CaptureError(
                f"{self._method} of {type(self._module).__name__} was replaced after it was bound; "
                "restore that replacement first"
            )
        if self._instance_method is None:
            delattr(self._module, self._method)
        else:
            setattr(self._module, self._method, self._instance_method)


def is_tapped(module: nn.Module) -> bool:
    """Whether a `RouterTap` holds a method of this module."""
    holders = [getattr(value, "__self__", None) for value in module.__dict__.values()]
    return any(isinstance(holder, RouterTap) and holder.is_live for holder in holders)


def under_mode(mode: TorchFunctionMode) -> Callable[[Forward], Forward]:
    """Return a wrapper that runs a forward under `mode`."""

    def wrap(original: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            with mode:
                return original(*args, **kwargs)

        return forward

    return wrap
