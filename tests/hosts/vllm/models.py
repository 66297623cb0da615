"""The models that the cells serve."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from routebook.models import bundled_model_path


def folder_of(name: str, scratch: Path) -> str:
    """A folder with weights: the bundled model, or a random one whose first layer is dense."""
    if name == "tiny":
        return str(bundled_model_path("tiny"))
    assert name == "dense-first"
    folder = scratch / name
    if not folder.exists():
        _random_model().save_pretrained(folder)
    return str(folder)


def _random_model() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=300,
        num_experts_per_tok=6,
        mlp_only_layers=[0],
        norm_topk_prob=True,
        max_position_embeddings=1024,
    )
    model = Qwen3MoeForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            # By fan-in: with the default of 0.02 all hidden states are nearly the same.
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model.float()
