"""What is logged about replay, summed up between two logs.

Legend of shape suffixes: B = batch, C = completion length, padded.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch


class Gap:
    """How far a trainer's probabilities of sampled tokens are from those that they were sampled with.

    Args:
        extreme_ratio: ratio of the two probabilities, or its inverse, beyond which a token is extreme.
    """

    def __init__(self, extreme_ratio: float) -> None:
        self._extreme = torch.tensor(extreme_ratio, dtype=torch.float64).log().item()
        self._sums: torch.Tensor | None = None
        self._largest: torch.Tensor | None = None

    def add(
        self, trainer_BC: torch.Tensor, rollout_BC: torch.Tensor, mask_BC: torch.Tensor
    ) -> None:
        """Count tokens.

        Args:
            trainer_BC: the trainer's log-probabilities, nats.
            rollout_BC: the engine's; NaN where it gave none.
            mask_BC: 1 where a token counts.
        """
        gap_BC = (trainer_BC.detach() - rollout_BC).double()
        gaps = gap_BC[mask_BC.bool() & ~gap_BC.isnan()]
        sizes = gaps.abs()
        parts = (
            torch.expm1(gaps) - gaps,
            sizes,
            (sizes > self._extreme).double(),
            torch.ones_like(gaps),
        )
        sums = torch.stack([part.sum() for part in parts])
        largest = torch.cat([sizes, sizes.new_zeros(1)]).max()
        self._sums = sums if self._sums is None else self._sums + sums
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)

    def metrics(self, accelerator: Any) -> dict[str, float]:
        """Over the tokens of all processes.

        Returns:
            `kl` (the mean of exp(d) - 1 - d, with d the trainer's less the engine's log-probability: an estimate of the
            KL divergence from sampled tokens that is unbiased and never negative), `mean` and `max` of the absolute d,
            `extreme`, the share of extreme tokens. Empty if no token was counted.
        """
        assert self._sums is not None
        assert self._largest is not None
        kl, mean, extreme, count = accelerator.reduce(self._sums, reduction="sum").tolist()
        largest = accelerator.gather(self._largest.reshape(1)).max().item()
        if not count:
            return {}
        return {"kl": kl / count, "mean": mean / count, "max": largest, "extreme": extreme / count}


class ReplayMetrics:
    """Shares and gaps since the last log, of training or of evaluation.

    Every process adds the same names, so that they can be summed over processes.
    """

    def __init__(self, extreme_ratio: float) -> None:
        self._extreme_ratio = extreme_ratio
        self._gaps: dict[str, Gap] = {}
        self._shares: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def add_share(self, name: str, part: float, whole: float) -> None:
        """Count `part` of `whole`."""
        share = self._shares[name]
        share[0] += part
        share[1] += whole

    def gap(self, name: str) -> Gap:
        """The gap of this name, to add to."""
        return self._gaps.setdefault(name, Gap(self._extreme_ratio))

    def take(self, accelerator: Any) -> dict[str, float]:
        """All values by name, and begin anew; what was not counted is left out."""
        values = {
            f"{name}/{key}": value
            for name, gap in sorted(self._gaps.items())
            for key, value in gap.metrics(accelerator).items()
        }
        for name, share in sorted(self._shares.items()):
            # Double precision: rows of many steps are more than single precision counts.
            local = torch.tensor(share, dtype=torch.float64, device=accelerator.device)
            part, whole = accelerator.reduce(local, reduction="sum").tolist()
            if whole:
                values[name] = part / whole
        self._gaps.clear()
        self._shares.clear()
        return values
