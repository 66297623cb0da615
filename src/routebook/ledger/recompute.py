"""Which row a position has when several runs of a request computed it, or took it from the prefix cache."""

from __future__ import annotations

from typing import overload

import numpy as np
import numpy.typing as npt

from routebook.config import check_choice, option

EARLIEST, LATEST = "earliest", "latest"
RECOMPUTE = (EARLIEST, LATEST)

Mask = npt.NDArray[np.bool_]
Runs = npt.NDArray[np.int64]


def recompute_option() -> str:
    """The option of both ledgers."""
    choice: str = option(
        "whose row a position has that was computed again after a preemption: that of the `earliest` run, with"
        " which its token was sampled (the default), or of the `latest`, which made the KV that exists now",
        default=EARLIEST,
        choices=RECOMPUTE,
    )
    return choice


def check_recompute(recompute: str) -> None:
    """Raise ConfigError unless `recompute` is known."""
    check_choice("recompute", recompute, RECOMPUTE)


@overload
def goes_before(recompute: str, run: int, other: Runs) -> Mask: ...


@overload
def goes_before(recompute: str, run: Runs, other: int) -> Mask: ...


def goes_before(recompute: str, run: int | Runs, other: int | Runs) -> Mask:
    """Whether the row of a run is chosen over that of another run."""
    before: Mask = np.less(run, other) if recompute == EARLIEST else np.greater(run, other)
    return before
