"""How a tiny random model of a family is built.

Weights are wide (`initializer_range` 0.2) so that tokens route differently; selection biases, attention sinks and
routers that a fresh model leaves at zero are random, where zero would hide a mistake.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import transformers
from torch import nn

VOCAB_SIZE = 199
SEED = 20

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
Kind = Literal["works", "hybrid", "refused"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family: how to build a tiny model of it, and what the engine does with it."""

    name: str
    config_class: str
    kind: Kind = "works"
    """`hybrid` works as well; some of its layers keep a state of their own."""

    options: dict[str, Any] = field(default_factory=dict, repr=False)
    reason: str = ""
    """Words that the refusal must contain."""

    auto_class: str = "AutoModelForCausalLM"

    def build(self, dtype: torch.dtype = torch.float32) -> Any:
        """Return the family's model in eval mode; the same weights, rounded to `dtype`, at every call."""
        config = self._config()
        generator_state = torch.get_rng_state()
        torch.manual_seed(SEED)
        model = getattr(transformers, self.auto_class).from_config(config, dtype=torch.float32)
        _randomise(model)
        torch.set_rng_state(generator_state)
        _cast(model, dtype)
        return model.eval()

    def _config(self) -> Any:
        config_class = getattr(transformers, self.config_class)
        fields = {f.name for f in dataclasses.fields(config_class)}
        assert self.options.keys() <= fields, self.options.keys() - fields
        common = {name: value for name, value in _COMMON.items() if name in fields}
        return config_class(**common | self.options)


def _randomise(model: nn.Module) -> None:
    """Fill what a fresh model leaves at zero, where zero would hide a mistake."""
    for name, tensor in model.state_dict().items():
        last = name.rpartition(".")[2]
        if "correction" in last or last == "expert_bias":
            tensor.normal_(0.0, 0.05)
        elif "sink" in last or last == "bias":
            tensor.normal_(0.0, 0.3)
        elif tensor.is_floating_point() and not tensor.any():
            tensor.normal_(0.0, 0.2)  # some families start their routers at zero
        assert torch.isfinite(tensor).all(), name


def _cast(model: Any, dtype: torch.dtype) -> None:
    """Cast what loading a checkpoint in `dtype` would cast."""
    strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    kept = {*strict, *(getattr(model, "_keep_in_fp32_modules", None) or ())}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and not any(part in name for part in kept):
            tensor.data = tensor.data.to(dtype)
