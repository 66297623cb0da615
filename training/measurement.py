"""Loss and routing of the model over some tokens, and the tables made from them.

Shape suffixes: T tokens, L MoE layers, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

TINY_GAP = 1e-5


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one or many forward passes showed. Scores are the softmax over all experts."""

    loss: float  # summed cross-entropy, nats
    predicted: int  # how many tokens the loss is summed over
    load_LE: np.ndarray  # how many tokens chose each expert
    gap_LT: np.ndarray  # the last chosen score minus the first rejected one, float32

    @staticmethod
    def joined(parts: list[Measurement]) -> Measurement:
        """One measurement over the tokens of all `parts`."""
        return Measurement(
            loss=sum(part.loss for part in parts),
            predicted=sum(part.predicted for part in parts),
            load_LE=np.sum([part.load_LE for part in parts], axis=0),
            gap_LT=np.concatenate([part.gap_LT for part in parts], axis=1),
        )

    def relative_load(self) -> np.ndarray:
        """`[L, E]`: each expert's load over its layer's mean."""
        return self.load_LE / self.load_LE.mean(1, keepdims=True)

    def entropy(self) -> np.ndarray:
        """`[L]`: entropy of the load over its greatest possible value."""
        share_LE = self.load_LE / self.load_LE.sum(1, keepdims=True)
        logs_LE = np.log(share_LE, out=np.zeros_like(share_LE), where=share_LE > 0)
        return -(share_LE * logs_LE).sum(1) / math.log(share_LE.shape[1])

    def load_table(self) -> str:
        """Markdown: relative load of each expert, a row a layer."""
        experts = range(self.load_LE.shape[1])
        rows = [["layer", *map(str, experts), "entropy"]]
        rows.append(["---"] * len(rows[0]))
        for layer, (loads, entropy) in enumerate(
            zip(self.relative_load(), self.entropy(), strict=True)
        ):
            rows.append([str(layer), *(f"{load:.2f}" for load in loads), f"{entropy:.3f}"])
        return "\n".join("| " + " | ".join(row) + " |" for row in rows)

    @staticmethod
    def summary(parts: dict[str, Measurement]) -> str:
        """Markdown: the worst layer's balance and the gaps, a row a measurement."""
        rows = [
            "| tokens | number | busiest expert | least busy | least entropy | median gap "
            "| gaps below 1e-5 |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        for name, part in parts.items():
            load_LE = part.relative_load()
            rows.append(
                f"| {name} | {part.gap_LT.shape[1]:,} | {load_LE.max():.2f} | {load_LE.min():.2f} "
                f"| {part.entropy().min():.3f} | {np.median(part.gap_LT):.4f} "
                f"| {(part.gap_LT < TINY_GAP).mean():.4%} |"
            )
        return "\n".join(rows)
