"""What drift found, and whether it passes as a gate."""

from __future__ import annotations

import msgspec

from routebook.replay.gap import Gap
from routebook.replay.shift import Fault

CURED = 5
"""By this factor replay must bring the KL divergence down where it changes the experts."""


class LayerDrift(msgspec.Struct, frozen=True, kw_only=True):
    """One MoE layer."""

    layer_id: int
    different: float
    """Share of rows with another set of experts."""
    own_overlap: float
    """Share of the recorded experts that the trainer would have chosen on the replayed hidden states."""


class DriftReport(msgspec.Struct, frozen=True, kw_only=True):
    """Native against replayed forward of a trainer, over the sampled tokens of all samples."""

    num_samples: int
    num_rows: int
    """Valid rows."""
    fallback_share: float
    """Share of input tokens without a usable row; they took the live router's choice."""
    different_pairs: float
    """Share of (token, layer) pairs with another set of experts than the trainer's own."""
    different_tokens: float
    """Share of tokens that have such a pair."""
    own_overlap: float
    layers: list[LayerDrift]
    native: Gap
    replayed: Gap
    rerouted_native: Gap
    """Over the sampled tokens that were predicted from a token with other experts: what replay can cure."""
    rerouted_replayed: Gap
    offsets: list[list[float]]
    """Share of picks in common at row offset -2..2 (outer) and layer offset -2..2 (inner)."""
    faults: list[Fault]

    @property
    def passes(self) -> bool:
        """Whether every row lies where it belongs, and replay cures what routing breaks."""
        return not self.faults and self.rerouted_replayed.kl * CURED <= self.rerouted_native.kl

    @property
    def verdict(self) -> str:
        """The same in words."""
        if self.faults:
            return "FAIL: rows do not lie where they belong"
        if not self.rerouted_native.num_tokens:
            return (
                "pass: the trainer chooses the recorded experts by itself, there is nothing to cure"
            )
        if not self.passes:
            return (
                f"FAIL: replay does not bring the KL down {CURED} times where experts differ; the rest of the gap "
                "is not routing (other weights, or coarser arithmetic)"
            )
        return f"pass: replay brings the KL down more than {CURED} times where experts differ"
