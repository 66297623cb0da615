"""Which token mixers carry a state from token to token, and how their forward takes it, as data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.models.minimax.modeling_minimax import MiniMaxCache

_STATELESS_PLACEHOLDERS = ("moe", "mlp")
"""Layer types for which transformers keeps an empty linear-attention cache."""


def _dynamic_cache(config: Any) -> Any:
    return DynamicCache(config=config)


def _minimax_cache(config: Any) -> Any:
    return MiniMaxCache()


@dataclass(frozen=True, kw_only=True, slots=True)
class MixerFamily:
    """How the forward of one class of stateful mixers is called."""

    mixer_class: str
    """Name of the module's class."""

    cache_argument: str = "cache_params"
    """Keyword under which the forward takes the cache."""

    new_cache: Callable[[Any], Any] = _dynamic_cache
    """Makes an empty cache for all layers of a model from the model's config."""

    continues_by_token: bool = False
    """The forward of several tokens ignores the state: a later chunk goes in token by token."""

    takes_positions: bool = False
    """The forward demands `position_embeddings` and `attention_mask`, though it ignores them."""

    limits_time_step: bool = False
    """The forward of several tokens keeps the time step within the mixer's `time_step_limit`, that of one does not."""

    returns_tuple: bool = False
    """The forward returns `(hidden_states, ...)`."""


FAMILIES = (
    MixerFamily(mixer_class="Qwen3NextGatedDeltaNet"),
    MixerFamily(mixer_class="Qwen3_5MoeGatedDeltaNet"),
    MixerFamily(mixer_class="Lfm2MoeShortConv", cache_argument="past_key_values"),
    MixerFamily(mixer_class="GraniteMoeHybridMambaLayer", limits_time_step=True),
    MixerFamily(mixer_class="NemotronHMamba2Mixer", limits_time_step=True),
    MixerFamily(
        mixer_class="MiniMaxLightningAttention",
        cache_argument="past_key_values",
        new_cache=_minimax_cache,
        takes_positions=True,
        returns_tuple=True,
    ),
    # Its scan over several tokens takes no initial state.
    MixerFamily(mixer_class="JambaMambaMixer", continues_by_token=True),
)


class TimeStepLimit(TorchFunctionMode):
    """While entered, every softplus, which is what makes a time step, stays within `limit`.

    It makes one token advance a state as the same token among others does. Kernels that replace the library's own
    code compute the softplus inside and are not reached.
    """

    def __init__(self, limit: tuple[float, float]) -> None:
        super().__init__()
        self.limit = limit

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Clamp what softplus returns; pass everything else through."""
        result = func(*args, **(kwargs or {}))
        return result.clamp(*self.limit) if func is torch.nn.functional.softplus else result


def find_family(module: nn.Module) -> MixerFamily | None:
    """Return the family of a stateful mixer, or None for any other module."""
    name = type(module).__name__
    return next((family for family in FAMILIES if family.mixer_class == name), None)


def stateful_layers(config: Any) -> tuple[int, ...]:
    """Return the decoder layers for which transformers keeps a state besides keys and values."""
    layer_types = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    return tuple(
        layer_idx
        for layer_idx, layer in enumerate(DynamicCache(config=config).layers)
        if isinstance(layer, LinearAttentionCacheLayerMixin)
        and layer_types[layer_idx] not in _STATELESS_PLACEHOLDERS
    )
