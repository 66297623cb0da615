"""Options of replay in TRL."""

from __future__ import annotations

from dataclasses import dataclass

from routebook.config import check_at_least, check_choice, option
from routebook.errors import ConfigError

MISSING = ("error", "native")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayConfig:
    """Which passes of the trainer take the rollout's routes, and what is measured.

    Raises:
        ConfigError: a value that cannot work.
    """

    enabled: bool = option(
        "replay in the passes of the loss and of the old log-probabilities; False trains along the live routers and "
        "measures the same gaps: the baseline",
        default=True,
    )
    reference: bool = option(
        "replay in the pass of the reference model too; by default it takes its own live routers",
        default=False,
    )
    missing: str = option(
        "what becomes of a sequence that lacks its record, or rows of it: an error, or the live router's choice for "
        "those rows, which are counted",
        default="error",
        choices=MISSING,
    )
    extreme_ratio: float = option(
        "a sampled token counts as extreme if the trainer's and the engine's probability of it differ by more than "
        "this factor",
        default=2.0,
    )
    native_every: int = option(
        "measure, once in so many generations, also how far the live routers would be from the engine, by one more "
        "pass without gradient; 0 never does",
        default=0,
    )

    def __post_init__(self) -> None:
        check_choice("missing", self.missing, MISSING)
        check_at_least("native_every", self.native_every, 0)
        if not self.extreme_ratio > 1:
            raise ConfigError(f"extreme_ratio={self.extreme_ratio} must be a number above 1")
        if self.reference and not self.enabled:
            raise ConfigError("reference=True replays in one pass of two; it needs enabled=True")
