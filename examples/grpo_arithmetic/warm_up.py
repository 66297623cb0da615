"""Supervised steps before GRPO: the bundled model sees some three-digit sums, with no margin loss on its routers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.grpo_arithmetic.settings import Settings
from examples.grpo_arithmetic.task import pairs
from routebook.models import bundled_model_path

_BATCH = 64
_LEARNING_RATE = 3e-4
_SEED = 100_000
_IGNORED = -100


def warm_up(settings: Settings, folder: Path) -> None:
    """Train the bundled model on the answers of random sums and save it in bfloat16, with a tokenizer.

    The tokenizer ends a text at a newline.

    Args:
        settings: `warm_up_steps` and `device`.
        folder: where the model is written.
    """
    path = bundled_model_path("tiny")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(settings.device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.01)
    for step in range(settings.warm_up_steps):
        loss = _loss(model, *_batch(tokenizer, step, model.device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    (newline,) = tokenizer("\n")["input_ids"]
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(newline)
    tokenizer.save_pretrained(folder)
    model.to(torch.bfloat16).save_pretrained(folder)


def _batch(tokenizer: Any, step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids `[B, S]` of whole lines, and the same as labels, the answers only."""
    lines = [(f"{a}+{b}=", f"{a + b}\n") for a, b in pairs(_BATCH, _SEED + step)]
    rows = [[tokenizer(part)["input_ids"] for part in line] for line in lines]
    length = max(len(question) + len(answer) for question, answer in rows)
    ids = torch.full((_BATCH, length), tokenizer.pad_token_id)
    labels = torch.full((_BATCH, length), _IGNORED)
    for row, (question, answer) in enumerate(rows):
        stop = len(question) + len(answer)
        ids[row, :stop] = torch.tensor(question + answer)
        labels[row, len(question) : stop] = torch.tensor(answer)
    return ids.to(device), labels.to(device)


def _loss(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    # Padding lies behind the answers, where causal attention does not look.
    logits = model(input_ids=ids).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED)
