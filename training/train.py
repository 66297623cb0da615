"""Train the bundled model. One command, on CUDA where there is a device, else on the CPU.

    python training/train.py --out src/routebook/models/tiny

The training rows are three parts text and one part sums. Three losses are added up: the
cross-entropy of the next token; a balance loss for each layer, taken on text and on sums apart, so
that no expert idles on either; and a margin loss that keeps the router's last choice clear of the
first one it rejected, so that rounding seldom decides which expert runs.

Shape suffixes: B rows of a batch, S positions of a row, T = B*S tokens, H hidden size, E experts,
K experts a token, I inner size of an expert.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from arithmetic import heldout_documents, training_documents
from corpus import RUNS, read_corpus
from tokenizer import MAX_LENGTH, MODEL_FOLDER
from torch.nn import functional
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

# Rows by step, in turn: mostly many short rows, so that many of them start at position 0, and
# some of full length, so that every position is trained.
ROW_SHAPES = ((64, 512), (64, 512), (64, 512), (16, 2048))
SUMS_SHARE = 0.25

LOG = RUNS / "log.jsonl"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the published model was trained with."""

    steps: int = 4000
    warmup: int = 300
    peak_lr: float = 3e-3
    weight_decay: float = 0.1
    dropout: float = 0.1
    balance: float = 0.05
    margin: float = 0.02
    margin_width: float = 0.25
    equations: int = 600_000
    seed: int = 1


def model_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeConfig:
    """Six layers of sixteen experts, four a token: 3.5 million weights."""
    return Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=80,
        norm_topk_prob=True,
        router_aux_loss_coef=0.0,  # the losses below take its place, in training only
        initializer_range=0.04,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def all_experts_forward(
    experts: torch.nn.Module,
    hidden_TH: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
) -> torch.Tensor:
    """Run every expert on every token, with weight 0 where it was not chosen.

    The result is that of running the chosen ones, and for experts this small it is much faster.
    """
    gate_up_E2IH, down_EHI = experts.gate_up_proj, experts.down_proj
    num_experts, hidden_size, inner = down_EHI.shape
    weights_TE = weights_TK.new_zeros(len(ids_TK), num_experts).scatter(1, ids_TK, weights_TK)
    gate_up = functional.linear(hidden_TH, gate_up_E2IH.reshape(-1, hidden_size))
    gate_TEI, up_TEI = gate_up.view(-1, num_experts, 2, inner).unbind(2)
    inner_TEI = functional.silu(gate_TEI) * up_TEI * weights_TE[..., None].to(gate_up.dtype)
    down = down_EHI.permute(1, 0, 2).reshape(hidden_size, num_experts * inner)
    return functional.linear(inner_TEI.flatten(1), down)


def add_dropout(model: Qwen3MoeForCausalLM, probability: float) -> None:
    """Dropout, in training only, behind the embedding and each attention and MoE block."""

    def dropped(module: torch.nn.Module, _: object, output: torch.Tensor) -> torch.Tensor:
        return functional.dropout(output, probability, module.training)

    model.model.embed_tokens.register_forward_hook(dropped)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(dropped)
        layer.mlp.register_forward_hook(dropped)


class Rows:
    """Random rows out of one long stream of documents.

    A row starts where a piece does, except for a share `anywhere` of them.
    """

    def __init__(self, pieces: list[list[int]], seed: int, anywhere: float = 0.0):
        longest = max(length for _, length in ROW_SHAPES)
        self.stream = np.array([i for piece in pieces for i in piece], dtype=np.int64)
        starts = np.cumsum([0, *map(len, pieces)])
        self.last_start = len(self.stream) - longest - 1
        self.starts = starts[starts <= self.last_start]
        self.anywhere = anywhere
        self.rng = np.random.default_rng(seed)

    def draw(self, rows: int, length: int) -> torch.Tensor:
        """`[rows, length + 1]` token ids: inputs and, one further, targets."""
        at_piece = self.rng.choice(self.starts, rows)
        at_token = self.rng.integers(0, self.last_start + 1, rows)
        first = np.where(self.rng.random(rows) < self.anywhere, at_token, at_piece)
        return torch.from_numpy(self.stream[first[:, None] + np.arange(length + 1)])


def text_pieces(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[list[int]]:
    """Token ids of documents, cut behind paragraphs; the last piece of each ends in end-of-text."""
    paragraph_end = tokenizer("a\n\n").input_ids[-1]
    pieces: list[list[int]] = []
    for ids in tokenizer(texts, verbose=False).input_ids:
        first = 0
        for position, token in enumerate(ids):
            if token == paragraph_end:
                pieces.append(ids[first : position + 1])
                first = position + 1
        pieces.append([*ids[first:], tokenizer.eos_token_id])
    return pieces


def sum_pieces(tokenizer: PreTrainedTokenizerFast, documents: Iterator[str]) -> list[list[int]]:
    """Token ids of documents of sums, each ending in end-of-text."""
    return [[*ids, tokenizer.eos_token_id] for ids in tokenizer(list(documents)).input_ids]


def router_losses(logits_BSE: torch.Tensor, top_k: int, width: float) -> torch.Tensor:
    """`[2]`: the balance loss (1 when even) and the margin loss (0 to 1 and more) of one layer.

    Balance is the sum over experts of share of choices times mean probability, times their number.
    Margin is the mean shortfall of (k-th logit minus the next) below `width`, over `width`.
    """
    logits_TE = logits_BSE.flatten(0, 1).float()
    top = logits_TE.topk(top_k + 1, dim=-1)
    chosen = functional.one_hot(top.indices[:, :top_k], logits_TE.shape[1]).sum(1).float()
    share_E = chosen.mean(0) / top_k
    balance = logits_TE.shape[1] * (share_E * logits_TE.softmax(-1).mean(0)).sum()
    gap_T = top.values[:, top_k - 1] - top.values[:, top_k]
    return torch.stack([balance, (functional.relu(width - gap_T) / width).mean()])


class Trainer:
    """The model, its optimizer and its data."""

    def __init__(self, recipe: Recipe, device: torch.device):
        torch.manual_seed(recipe.seed)
        self.recipe, self.device = recipe, device
        self.tokenizer = AutoTokenizer.from_pretrained(MODEL_FOLDER)
        corpus = read_corpus()
        self.train_text = self._text_rows([d.text for d in corpus if d.split == "train"])
        self.heldout_text = self._text_rows([d.text for d in corpus if d.split == "heldout"])
        sums = training_documents(recipe.equations, recipe.seed)
        self.train_sums = Rows(sum_pieces(self.tokenizer, sums), recipe.seed)
        self.heldout_sums = Rows(sum_pieces(self.tokenizer, heldout_documents(0)), recipe.seed)
        ALL_EXPERTS_FUNCTIONS.register("all_experts", all_experts_forward)
        self.model = Qwen3MoeForCausalLM(model_config(self.tokenizer)).to(device)
        self.model.set_experts_implementation("all_experts")
        add_dropout(self.model, recipe.dropout)
        self.model.train()
        self.optimizer = self._optimizer()

    def _text_rows(self, texts: list[str]) -> Rows:
        return Rows(text_pieces(self.tokenizer, texts), self.recipe.seed, anywhere=0.5)

    def _optimizer(self) -> torch.optim.AdamW:
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": self.recipe.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95))

    def rate(self, step: int) -> float:
        """Linear warm-up, then a cosine down to 2 % of the peak."""
        if step < self.recipe.warmup:
            return self.recipe.peak_lr * (step + 1) / self.recipe.warmup
        done = (step - self.recipe.warmup) / (self.recipe.steps - self.recipe.warmup)
        return self.recipe.peak_lr * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))

    def losses(self, ids: torch.Tensor, text_rows: int) -> torch.Tensor:
        """`[5]`: the weighted total, cross-entropy of text and of sums, balance, margin.

        `ids` is `[B, S + 1]`; its first `text_rows` rows are text.
        """
        with torch.autocast(self.device.type, torch.bfloat16):
            out = self.model(ids[:, :-1], output_router_logits=True, use_cache=False)
        targets = ids[:, 1:].flatten()
        logits = out.logits.flatten(0, 1).float()
        token_loss = functional.cross_entropy(logits, targets, reduction="none")
        token_loss_BS = token_loss.view(len(ids), -1)
        text, sums = token_loss_BS[:text_rows].mean(), token_loss_BS[text_rows:].mean()
        balance, margin = self._router_means(out.router_logits, len(ids), text_rows)
        total = token_loss.mean() + self.recipe.balance * balance + self.recipe.margin * margin
        return torch.stack([total, text, sums, balance, margin])

    def _router_means(
        self, router_logits: tuple[torch.Tensor, ...], rows: int, text_rows: int
    ) -> torch.Tensor:
        """`[2]`: balance and margin loss, the mean over layers and over text and sums."""
        top_k, width = self.model.config.num_experts_per_tok, self.recipe.margin_width
        parts = []
        for logits_TE in router_logits:
            logits_BSE = logits_TE.view(rows, -1, logits_TE.shape[-1])
            for part in (logits_BSE[:text_rows], logits_BSE[text_rows:]):
                parts.append(router_losses(part, top_k, width))
        return torch.stack(parts).mean(0)

    def step(self, number: int) -> torch.Tensor:
        """One update; the losses before it, on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(number)
        rows, length = ROW_SHAPES[number % len(ROW_SHAPES)]
        sum_rows = round(SUMS_SHARE * rows)
        text = self.train_text.draw(rows - sum_rows, length)
        ids = torch.cat([text, self.train_sums.draw(sum_rows, length)])
        losses = self.losses(ids.to(self.device, non_blocking=True), rows - sum_rows)
        losses[0].backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return losses.detach()

    @torch.no_grad()
    def heldout_losses(self, batches: int = 4) -> torch.Tensor:
        """The losses on held-out text and held-out sums."""
        self.heldout_text.rng = np.random.default_rng(0)
        self.heldout_sums.rng = np.random.default_rng(0)
        self.model.eval()
        losses = []
        for _ in range(batches):
            drawn = [rows.draw(32, 512) for rows in (self.heldout_text, self.heldout_sums)]
            losses.append(self.losses(torch.cat(drawn).to(self.device), 32))
        self.model.train()
        return torch.stack(losses).mean(0)

    def export(self, folder: Path) -> None:
        """Write config, bfloat16 weights and generation config."""
        model = self.model.to(torch.bfloat16)
        eos = self.tokenizer.eos_token_id
        model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=eos)
        model.save_pretrained(folder)


def run(recipe: Recipe, folder: Path) -> None:
    """Train, print a line now and then, and write the model and `runs/training/log.jsonl`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    started, log = time.time(), []
    trainer = Trainer(recipe, device)
    for step in range(recipe.steps):
        losses = trainer.step(step)
        if step % 250 == 0 or step == recipe.steps - 1:
            heldout = trainer.heldout_losses()
            names = ("total", "text", "sums", "balance", "margin")
            row = {f"train_{n}": round(v, 4) for n, v in zip(names, losses.tolist(), strict=True)}
            row |= {
                f"heldout_{n}": round(v, 4) for n, v in zip(names, heldout.tolist(), strict=True)
            }
            log.append({"step": step, "seconds": round(time.time() - started, 1), **row})
            print(json.dumps(log[-1]), flush=True)
    trainer.export(folder)
    LOG.parent.mkdir(parents=True, exist_ok=True)
    LOG.write_text("".join(json.dumps(row) + "\n" for row in log), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the bundled model.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    for option in fields(Recipe):
        parser.add_argument(
            f"--{option.name.replace('_', '-')}",
            type=type(option.default),
            default=option.default,
            help="as published: %(default)s",
        )
    options = vars(parser.parse_args())
    folder = options.pop("out")
    folder.mkdir(parents=True, exist_ok=True)
    run(Recipe(**options), folder)


if __name__ == "__main__":
    main()
