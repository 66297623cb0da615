"""What an engine has to know about the model that its worker serves, wherever that worker runs."""

from __future__ import annotations

from dataclasses import dataclass

from routebook.routes import RouteSchema


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """A model as the engine sees it: a plain value, so it can cross a process border."""

    name: str
    fingerprint: str
    """Tells these weights from others; see `model_fingerprint`."""
    dtype: str
    """Number format, `float32` for instance."""
    schema: RouteSchema
    vocab_size: int
    eos_token_ids: frozenset[int]
    is_recurrent: bool
    """Whether a layer keeps a state outside the KV blocks, so that a prefix cannot be shared by its blocks."""
    unforcible: str | None
    """Why no route can be forced on the model; None where it can."""
    max_model_len: int
    """Tokens of the longest sequence: the model's limit, the option's, or what the pool holds."""
    num_blocks: int
    """KV blocks of the worker's pool."""
