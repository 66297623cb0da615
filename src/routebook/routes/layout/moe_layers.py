"""Which decoder layers of a trainer's model have experts, and whether a record means the same ones."""

from __future__ import annotations

from collections.abc import Sequence

from routebook.config import check_at_least
from routebook.errors import ConfigError, SchemaMismatchError
from routebook.routes.schema import RouteSchema


def moe_layer_ids(num_hidden_layers: int, moe_layer_freq: int | Sequence[int]) -> tuple[int, ...]:
    """Decoder layers with experts, counted from 0, by megatron-core's `moe_layer_freq`.

    Args:
        num_hidden_layers: decoder layers of the model.
        moe_layer_freq: n makes every n-th layer from layer 0 on an MoE layer; a list has 1 for an MoE layer and
            0 for a dense one. A model whose first k layers are dense has `[0] * k + [1] * (layers - k)`.

    Raises:
        ConfigError: a frequency below 1, or a list that is not one of 0 and 1 for every layer.
    """
    if not isinstance(moe_layer_freq, Sequence):
        check_at_least("moe_layer_freq", moe_layer_freq, 1)
        return tuple(range(0, num_hidden_layers, moe_layer_freq))
    pattern = tuple(moe_layer_freq)
    if len(pattern) != num_hidden_layers or not set(pattern) <= {0, 1}:
        raise ConfigError(
            f"moe_layer_freq={pattern} must have a 0 or a 1 for each of {num_hidden_layers} layers"
        )
    return tuple(layer for layer, is_moe in enumerate(pattern) if is_moe)


def check_moe_layers(
    schema: RouteSchema, num_hidden_layers: int, moe_layer_freq: int | Sequence[int]
) -> None:
    """Check that records of this schema were made by a model with the trainer's layers.

    Args:
        schema: of the records.
        num_hidden_layers: decoder layers of the trainer's model.
        moe_layer_freq: as for :func:`moe_layer_ids`.

    Raises:
        SchemaMismatchError: other layers have experts, or there are more or fewer layers.
    """
    layer_ids = moe_layer_ids(num_hidden_layers, moe_layer_freq)
    if (layer_ids, num_hidden_layers) != (schema.layer_ids, schema.num_hidden_layers):
        raise SchemaMismatchError(
            f"the trainer's MoE layers are {layer_ids} of {num_hidden_layers}, those of the records"
            f" {schema.layer_ids} of {schema.num_hidden_layers}; a wrong moe_layer_freq shifts layers"
        )
