"""How a trainer pads the sequences that it packs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from routebook.config import check_at_least, check_choice, option
from routebook.routes.layout.parallel_plan import ParallelPlan

TOTAL_PADDINGS = ("last_sequence", "own_sequence")
_FP8_ROWS = 16
_FP8_BLOCK = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingConfig:
    """How a trainer pads what it packs.

    Raises:
        ConfigError: a value that cannot work.
    """

    sequence_multiple: int | None = option(
        "each sequence is padded to a multiple of this; unset takes tensor_parallel_size *"
        " context_parallel_size, and twice that if context parallelism is zigzag",
        default=None,
    )
    total_multiple: int = option("all together are padded to a multiple of this", default=1)
    min_tokens: int = option("all together are padded to at least this", default=0)
    total_padding: str = option(
        "where the padding of the whole goes: it makes the last sequence longer, or is a sequence"
        " of its own behind it",
        default="last_sequence",
        choices=TOTAL_PADDINGS,
    )

    def __post_init__(self) -> None:
        if self.sequence_multiple is not None:
            check_at_least("sequence_multiple", self.sequence_multiple, 1)
        check_at_least("total_multiple", self.total_multiple, 1)
        check_at_least("min_tokens", self.min_tokens, 0)
        check_choice("total_padding", self.total_padding, TOTAL_PADDINGS)

    @classmethod
    def fp8(cls, plan: ParallelPlan, *, total_multiple: int = 1) -> PackingConfig:
        """The padding that FP8 block quantisation asks for.

        Each sequence gets a multiple of 16 rows and of what the plan needs; the whole is a multiple of
        128 times what the plan needs (as verl pads for Transformer Engine).

        Args:
            plan: whose `sequence_multiple` counts.
            total_multiple: a further multiple of the whole, such as a length bucket.
        """
        multiple = plan.sequence_multiple
        return cls(
            sequence_multiple=math.lcm(_FP8_ROWS, multiple),
            total_multiple=math.lcm(_FP8_BLOCK * multiple, total_multiple),
        )
