"""New weights for a model that is being served: checked as a whole, then copied in place.

Copying in place keeps every module where it is, so capture stays bound and compiled code stays valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from routebook.engine.model_loader import load_pretrained, resolve_model
from routebook.errors import ModelError

Weights = Mapping[str, torch.Tensor]


def read_weights(source: str | Weights) -> Weights:
    """The tensors of a folder, a hub id or a bundled model, or those given.

    Raises:
        ModelNotFoundError: no model lies there.
    """
    if not isinstance(source, str):
        return source
    weights: Weights = load_pretrained(resolve_model(source), "auto").state_dict()
    return weights


def check_weights(model: Any, weights: Weights) -> None:
    """Refuse weights that do not fit, before any is copied. Parameters that are not named keep their values.

    Raises:
        ModelError: no tensor at all, something else than a tensor, an unknown name, or another shape.
    """
    own = model.state_dict()
    if not weights:
        raise ModelError("the new weights hold no tensor")
    for name, tensor in weights.items():
        if name not in own:
            raise ModelError(
                f"the model has no parameter {name!r}; its first is {next(iter(own))!r}"
            )
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
            raise ModelError(f"the new {name!r} is no tensor with values, but {_kind(tensor)}")
        if tensor.shape != own[name].shape:
            raise ModelError(
                f"parameter {name!r} has shape {list(own[name].shape)}, the new one"
                f" {list(tensor.shape)}"
            )


def _kind(value: object) -> str:
    return "a meta tensor" if isinstance(value, torch.Tensor) else type(value).__name__


@torch.no_grad()
def copy_weights(model: Any, weights: Weights) -> None:
    """Copy checked weights over the model's own, in its number format and on its device."""
    own = model.state_dict()
    for name, tensor in weights.items():
        own[name].copy_(tensor)
