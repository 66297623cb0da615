"""How a trainer spreads one model over ranks: the sizes that decide which rows and layers a rank needs.

Expert parallelism is not among them: ids number all experts of a layer, wherever they lie, so it moves no row.
"""

from __future__ import annotations

from dataclasses import dataclass

from routebook.config import check_at_least, check_choice, option
from routebook.errors import ConfigError

CONTEXT_LAYOUTS = ("zigzag", "contiguous")
_SIZES = (
    "tensor_parallel_size",
    "context_parallel_size",
    "pipeline_parallel_size",
    "virtual_pipeline_size",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelRank:
    """Where one process stands in a :class:`ParallelPlan`, and which of its model chunks is meant."""

    tp_rank: int = 0
    cp_rank: int = 0
    pp_rank: int = 0
    vp_stage: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelPlan:
    """Sizes and rules of a trainer's parallelism, named as megatron-core names them.

    Raises:
        ConfigError: a value that cannot work, alone or beside another one.
    """

    tensor_parallel_size: int = option("ranks that share the matrices of each layer", default=1)
    sequence_parallel: bool = option(
        "whether the tensor-parallel ranks also share the rows: rank t has the t-th of equal pieces",
        default=False,
    )
    context_parallel_size: int = option("ranks that share each sequence", default=1)
    context_parallel_layout: str = option(
        "zigzag: of 2n chunks of each sequence rank r has the r-th and the r-th from the end;"
        " contiguous: rank r has the r-th of n pieces of the whole batch",
        default="zigzag",
        choices=CONTEXT_LAYOUTS,
    )
    pipeline_parallel_size: int = option("stages that share the layers", default=1)
    virtual_pipeline_size: int = option(
        "model chunks of each pipeline stage; 1 is a plain pipeline", default=1
    )
    num_layers_in_first_pipeline_stage: int | None = option(
        "decoder layers of the first stage; unset gives it as many as the others", default=None
    )
    num_layers_in_last_pipeline_stage: int | None = option(
        "decoder layers of the last stage; unset gives it as many as the others", default=None
    )
    account_for_embedding_in_pipeline_split: bool = option(
        "whether the embedding takes the place of one layer in the first stage", default=False
    )
    account_for_loss_in_pipeline_split: bool = option(
        "whether the loss takes the place of one layer in the last stage", default=False
    )
    layers_per_stage: tuple[int, ...] | None = option(
        "decoder layers of every stage, in the order in which a token passes them"
        " (vp_stage * pipeline_parallel_size + pp_rank): for custom pipeline layouts",
        default=None,
    )

    def __post_init__(self) -> None:
        for name in _SIZES:
            check_at_least(name, getattr(self, name), 1)
        check_choice("context_parallel_layout", self.context_parallel_layout, CONTEXT_LAYOUTS)
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            raise ConfigError(
                "sequence_parallel=True shares rows between tensor-parallel ranks, but"
                " tensor_parallel_size=1; drop it"
            )
        self._check_pipeline()

    @property
    def cuts_zigzag(self) -> bool:
        """Whether each sequence is cut in chunks of which a rank gets one from either end."""
        return self.context_parallel_size > 1 and self.context_parallel_layout == "zigzag"

    @property
    def context_multiple(self) -> int:
        """What a padded sequence must be a multiple of to be cut between context-parallel ranks."""
        return 2 * self.context_parallel_size if self.cuts_zigzag else self.context_parallel_size

    @property
    def sequence_multiple(self) -> int:
        """What trainers pad each sequence to, so that both context and sequence parallelism can cut it."""
        return self.tensor_parallel_size * self.context_multiple

    @property
    def row_shares(self) -> int:
        """Ranks of one pipeline stage that have different rows."""
        shares = self.tensor_parallel_size if self.sequence_parallel else 1
        return shares * self.context_parallel_size

    def check_rank(self, rank: ParallelRank) -> None:
        """Check that the plan has such a rank.

        Raises:
            ConfigError: a number outside of the plan's size.
        """
        sizes = {
            "tp_rank": self.tensor_parallel_size,
            "cp_rank": self.context_parallel_size,
            "pp_rank": self.pipeline_parallel_size,
            "vp_stage": self.virtual_pipeline_size,
        }
        for name, size in sizes.items():
            value = getattr(rank, name)
            if not 0 <= value < size:
                raise ConfigError(
                    f"{name}={value} is not one of the {size} of this plan;"
                    f" pass a number in [0, {size})"
                )

    def _check_pipeline(self) -> None:
        first, last = (
            self.num_layers_in_first_pipeline_stage,
            self.num_layers_in_last_pipeline_stage,
        )
        counted = (
            self.account_for_embedding_in_pipeline_split or self.account_for_loss_in_pipeline_split
        )
        uneven = first is not None or last is not None
        if self.pipeline_parallel_size == 1 and (uneven or self.virtual_pipeline_size > 1):
            raise ConfigError(
                "pipeline_parallel_size=1 has one stage with all layers; drop"
                " virtual_pipeline_size and num_layers_in_first/last_pipeline_stage"
            )
        if uneven and counted:
            raise ConfigError(
                "account_for_embedding/loss_in_pipeline_split moves layers of an even split only;"
                " with num_layers_in_first/last_pipeline_stage write their place into those numbers"
            )
        if self.layers_per_stage is not None:
            # A plan can be hashed and compared, also where a list was given.
            object.__setattr__(self, "layers_per_stage", tuple(self.layers_per_stage))
            self._check_layers_per_stage(self.layers_per_stage, uneven or counted)

    def _check_layers_per_stage(self, counts: tuple[int, ...], other_rules: bool) -> None:
        num_stages = self.pipeline_parallel_size * self.virtual_pipeline_size
        if other_rules:
            raise ConfigError(
                "layers_per_stage already says how many layers each stage has; drop the other"
                " options of the pipeline split"
            )
        if len(counts) != num_stages or min(counts) < 0:
            raise ConfigError(
                f"layers_per_stage={counts} must have one number of layers for each of the"
                f" {num_stages} stages (pipeline_parallel_size * virtual_pipeline_size)"
            )
