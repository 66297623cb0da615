"""The attention function under which an unmodified transformers model reads a paged KV cache.

It is registered in transformers' attention interface only, not among its mask functions: for a name that is not
there the model builds no mask at all, and hands a packed batch `[1, T]` through. Everything that attention needs
to know travels in one object, the model call's keyword argument `routebook_step`.

Legend of shape suffixes: T = tokens of the step, H = query heads, G = KV heads, D = key size, V = value size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from transformers import AttentionInterface

from routebook.engine.kv_pool import KVShape
from routebook.errors import UncapturableError

ATTENTION_NAME = "routebook_paged"
_CHUNKED = "chunked_attention"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCall:
    """One layer's call: its tensors and what this family's attention adds to the plain form."""

    layer: int
    query_HTD: torch.Tensor
    key_TGD: torch.Tensor
    value_TGV: torch.Tensor
    scaling: float
    window: int | None
    """Sliding window: a query at position p sees keys from p - window + 1 on."""
    chunk: int | None
    """Chunked attention: a query sees keys of its own chunk of positions only."""
    sinks_H: torch.Tensor | None
    """Extra logit per head that takes part in the softmax and carries no value."""
    softcap: float | None


class AttentionStep(Protocol):
    """What the keyword argument `routebook_step` must be able to do."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the attention output `[T, H, V]`."""
        ...


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    routebook_step: AttentionStep | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Serve one attention layer of a packed batch; see transformers' attention interface for the shapes.

    Raises:
        UncapturableError: the model builds a mask of its own, which a paged cache cannot follow.
    """
    kind = type(module).__name__
    if routebook_step is None:
        raise UncapturableError(
            f"{kind} got no `routebook_step`: either its model hands no keyword arguments on, or it was"
            " called outside the engine that took it over"
        )
    if attention_mask is not None:
        raise UncapturableError(f"{kind} builds an attention mask of its own")
    call = AttentionCall(
        layer=_layer_index(module),
        query_HTD=query[0],
        key_TGD=key[0].transpose(0, 1),
        value_TGV=value[0].transpose(0, 1),
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        chunk=_attention_chunk(module),
        sinks_H=s_aux,
        softcap=softcap,
    )
    return routebook_step.attend(call)[None], None


def register_attention() -> None:
    """Make the function known to transformers; doing it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


class KVShapeProbe:
    """A step of one sequence without a pool, which notes what each attention layer would keep."""

    def __init__(self) -> None:
        self.shapes: dict[int, KVShape] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attend causally over the step's own tokens, so that all values downstream are sane."""
        _, num_kv_heads, key_dim = call.key_TGD.shape
        self.shapes[call.layer] = KVShape(num_kv_heads, key_dim, call.value_TGV.shape[-1])
        out_HTV = torch.nn.functional.scaled_dot_product_attention(
            call.query_HTD[None],
            call.key_TGD.transpose(0, 1)[None],
            call.value_TGV.transpose(0, 1)[None],
            is_causal=True,
            scale=call.scaling,
            enable_gqa=True,
        )[0]
        return out_HTV.transpose(0, 1)


_CHUNKS: WeakKeyDictionary[torch.nn.Module, int | None] = WeakKeyDictionary()
"""What the config says about each attention module: reading it takes longer than it should, once per layer and step."""


def _attention_chunk(module: torch.nn.Module) -> int | None:
    """Llama 4 tells chunked layers in its config only, not in the call."""
    if module in _CHUNKS:
        return _CHUNKS[module]
    config: Any = module.config
    chunk: Any = getattr(config, "attention_chunk_size", None)
    layer_types: Any = getattr(config, "layer_types", None)
    is_chunked = bool(chunk and layer_types) and layer_types[_layer_index(module)] == _CHUNKED
    _CHUNKS[module] = int(chunk) if is_chunked else None
    return _CHUNKS[module]


def _layer_index(module: torch.nn.Module) -> int:
    index: Any = module.layer_idx
    return int(index)
