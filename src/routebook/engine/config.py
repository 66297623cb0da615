"""Options of the embedded engine, one dataclass per component."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from routebook.config import check_at_least, check_at_most, check_choice, option
from routebook.errors import ConfigError
from routebook.ledger.recompute import check_recompute, recompute_option

DTYPES = ("auto", "float32", "bfloat16", "float64")
DEVICES = ("auto", "cpu", "cuda")
LEDGERS = ("request", "slot")
EXECUTORS = ("auto", "inline", "thread", "process")
# Arrays of these sizes are made at the start; a slip of the keyboard must not ask for all memory.
_MOST_SEQS = 2**16
_MOST_BLOCKS = 2**28
_MOST_GIB = 2**14
_MOST_BATCHED_TOKENS = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which numbers the model runs in, and where."""

    dtype: str = option(
        "number format; auto takes the checkpoint's, float32 in the reference mode",
        default="auto",
        choices=DTYPES,
    )
    device: str = option(
        "cpu or cuda; auto takes cuda if there is one", default="auto", choices=DEVICES
    )
    reference: bool = option(
        "bitwise batch-invariant reference mode (CPU; slow): batching and chunking change no bit",
        default=False,
    )

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("device", self.device, DEVICES)
        if self.reference and self.device == "cuda":
            raise ConfigError("reference=True runs on the CPU only; drop device='cuda'")
        if self.reference and self.dtype == "bfloat16":
            raise ConfigError("reference=True needs dtype='float32' or 'float64'")


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """The paged pool of keys and values."""

    block_size: int = option("tokens of a KV block", default=16)
    num_blocks: int | None = option(
        "KV blocks of the pool; unset fills kv_cache_gib, or as much as max_num_seqs can use",
        default=None,
    )
    kv_cache_gib: float = option("most memory for keys and values, in GiB", default=1.0)
    prefix_caching: bool = option("share the KV blocks of equal prefixes", default=True)
    ledger: str = option(
        "who owns the rows: each request its own, or the slots of the KV pool, snapshot when freed",
        default="request",
        choices=LEDGERS,
    )
    recompute: str = recompute_option()
    check_when_idle: bool = option(
        "recount blocks, rows and requests whenever the engine goes idle, and fail loudly if one leaks",
        default=False,
    )

    def __post_init__(self) -> None:
        check_at_least("block_size", self.block_size, 1)
        check_choice("ledger", self.ledger, LEDGERS)
        check_recompute(self.recompute)
        if self.num_blocks is not None:
            check_at_least("num_blocks", self.num_blocks, 1)
            check_at_most("num_blocks", self.num_blocks, _MOST_BLOCKS)
        if not 0 < self.kv_cache_gib <= _MOST_GIB:
            raise ConfigError(
                f"kv_cache_gib={self.kv_cache_gib} must be a number above 0 and at most {_MOST_GIB}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """How much runs at once."""

    max_num_seqs: int = option("requests that run at once at most", default=256)
    max_num_batched_tokens: int = option("tokens of one step at most", default=2048)
    max_model_len: int | None = option(
        "tokens of prompt and completion at most; unset takes the model's own limit",
        default=None,
    )
    max_steps_in_flight: int = option(
        "steps planned ahead of their results; 1 waits for each step before the next is planned",
        default=1,
    )
    base_seed: int = option("seed from which requests without one of their own draw", default=0)

    def __post_init__(self) -> None:
        check_at_least("max_num_seqs", self.max_num_seqs, 1)
        check_at_most("max_num_seqs", self.max_num_seqs, _MOST_SEQS)
        check_at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        check_at_most("max_num_batched_tokens", self.max_num_batched_tokens, _MOST_BATCHED_TOKENS)
        check_at_least("max_steps_in_flight", self.max_steps_in_flight, 1)
        if self.max_model_len is not None:
            check_at_least("max_model_len", self.max_model_len, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorConfig:
    """Where the model runs."""

    executor: str = option(
        "what runs the model: the caller's thread (inline), one beside it, or a process of its own; auto takes"
        " inline for one step in flight, else thread",
        default="auto",
        choices=EXECUTORS,
    )

    def __post_init__(self) -> None:
        check_choice("executor", self.executor, EXECUTORS)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """The components' options side by side; each component gets its own part only."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    executor: ExecutorConfig

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Distribute flat options, as given to `LLM` or on the command line, to their components.

        Raises:
            ConfigError: an option that no component has, or a value that cannot work.
        """
        parts = {name: _take(kind, options) for name, kind in _PARTS.items()}
        if options:
            known = sorted(f.name for kind in _PARTS.values() for f in fields(kind))
            raise ConfigError(f"unknown option {sorted(options)[0]!r}; known: {', '.join(known)}")
        return cls(**parts)


_PARTS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "executor": ExecutorConfig,
}


def _take(kind: type[Any], options: dict[str, Any]) -> Any:
    """Build one component's options, removing what it takes from `options`."""
    names = [f.name for f in fields(kind) if f.name in options]
    return kind(**{name: options.pop(name) for name in names})
