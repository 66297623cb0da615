"""AdamW over float32 master weights, with the model's own weights rounded to bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class MasterWeightsAdamW(torch.optim.AdamW):
    """Updates float32 masters; the model then gets them rounded to bfloat16, kept in its own number format.

    So a trainer that computes in float32 and an engine that computes in bfloat16 have the same weights to the bit, as
    they have where a trainer keeps bfloat16 weights beside float32 masters: what is left between the two is arithmetic
    and routing. Without it, what the cast of the weights for the engine costs would hide both.

    Args:
        parameters: of the model, float32; they are rounded at once.
        options: of AdamW.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], **options: Any) -> None:
        super().__init__(parameters, **options)
        self._masters = [(p, p.detach().clone()) for g in self.param_groups for p in g["params"]]
        self._round()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of the masters, and the weights rounded anew."""
        for parameter, master in self._masters:
            parameter.copy_(master)
        loss: float | None = super().step(closure)
        for parameter, master in self._masters:
            master.copy_(parameter)
        self._round()
        return loss

    @torch.no_grad()
    def _round(self) -> None:
        for parameter, master in self._masters:
            parameter.copy_(master.bfloat16())
