"""Measure the exported model and write its card.

    python training/evaluate.py

loads the folder's bfloat16 weights in float32 on the CPU and measures, on documents and sums that
training never saw: the loss on text, the share of sums that greedy decoding gets right, how evenly
the router loads its experts, and how far its last choice lies from the first expert it rejected.
`MODEL_CARD.md` is `CARD_TEMPLATE.md` with these figures filled in.

Shape suffixes: T tokens, L MoE layers, E experts, N sums.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from string import Template

import torch
import transformers
from arithmetic import heldout_documents, heldout_pairs, line, training_pairs
from corpus import HELDOUT_ONE_IN, SOURCES, Document, read_corpus
from measurement import Measurement
from tokenizer import MODEL_FOLDER
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

WINDOW = 512
SAMPLE_SEED = 7
SHOTS = "12+34=46\n50+27=77\n8+5=13\n"

TEXT_PROMPTS = (
    "It is a truth universally acknowledged, that",
    "She was not at all surprised by this letter;",
    "The captain stood upon the deck, and looked at the sea.",
    "And it came to pass in those days, that",
    "HAMLET.\n",
)
SUM_PROMPTS = ("17+25=", f"{SHOTS}68+59=", "9+90=")


class Evaluation:
    """The exported model in float32, and the passes over what was kept back from its training."""

    def __init__(self, folder: Path):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def windows(self, documents: list[str]) -> list[torch.Tensor]:
        """Token ids of documents, end-of-text behind each, cut into windows of 512."""
        windows: list[torch.Tensor] = []
        for ids in self.tokenizer(documents, verbose=False).input_ids:
            windows += torch.tensor([*ids, self.tokenizer.eos_token_id]).split(WINDOW)
        return [w for w in windows if len(w) > 1]

    @torch.no_grad()
    def measure(self, documents: list[str]) -> Measurement:
        """Loss and routing over every token of the documents."""
        return Measurement.joined([self._window(ids) for ids in self.windows(documents)])

    def _window(self, ids_T: torch.Tensor) -> Measurement:
        top_k = self.model.config.num_experts_per_tok
        out = self.model(ids_T[None], output_router_logits=True)
        scores_LTE = torch.stack([logits.float() for logits in out.router_logits]).softmax(-1)
        top = scores_LTE.topk(top_k + 1, dim=-1)
        chosen_LTKE = functional.one_hot(top.indices[..., :top_k], scores_LTE.shape[-1])
        loss = functional.cross_entropy(out.logits[0, :-1], ids_T[1:], reduction="sum")
        return Measurement(
            loss=float(loss),
            predicted=len(ids_T) - 1,
            load_LE=chosen_LTKE.sum(dim=(1, 2)).numpy(),
            gap_LT=(top.values[..., top_k - 1] - top.values[..., top_k]).numpy(),
        )

    @torch.no_grad()
    def sums_right(self, pairs: list[tuple[int, int]], context: str = "") -> int:
        """How many sums greedy decoding answers exactly, newline included, behind `context`.

        Greedy decoding writes the answer exactly if each of its tokens is the likeliest one after
        the right tokens before it, so one forward pass tells.
        """
        batches: dict[tuple[int, int], list[list[int]]] = {}
        for a, b in pairs:
            ids = self.tokenizer(context + line(a, b)).input_ids
            answer = len(self.tokenizer(f"{a + b}\n").input_ids)
            batches.setdefault((len(ids), answer), []).append(ids)
        right = 0
        for (_, answer), same_length in batches.items():
            ids_NT = torch.tensor(same_length)
            best_NT = self.model(ids_NT).logits.argmax(-1)
            equal_NT = best_NT[:, -answer - 1 : -1] == ids_NT[:, -answer:]
            right += int(equal_NT.all(1).sum())
        return right

    def continuation(self, prompt: str, tokens: int, *, sample: bool) -> str:
        """What the model writes after `prompt`; temperature 0.8 and top-p 0.95 when sampling."""
        torch.manual_seed(SAMPLE_SEED)
        options = {"temperature": 0.8, "top_p": 0.95, "top_k": 0} if sample else {}
        inputs = self.tokenizer(prompt, return_tensors="pt")
        out = self.model.generate(**inputs, max_new_tokens=tokens, do_sample=sample, **options)
        return str(self.tokenizer.decode(out[0, inputs.input_ids.shape[1] :]))

    def samples(self) -> str:
        """Markdown: what the model writes after a few prompts."""
        blocks = [(p, self.continuation(p, 100, sample=True)) for p in TEXT_PROMPTS]
        blocks += [(p, self.continuation(p, 4, sample=False)) for p in SUM_PROMPTS]
        return "\n\n".join(f"```text\n{prompt}|{text.rstrip()}\n```" for prompt, text in blocks)


def sources_table(corpus: list[Document]) -> str:
    """Markdown rows: each text, its author, its package and its characters."""
    rows: dict[tuple[str, str], int] = {}
    for document in corpus:
        title = "37 plays and 5 poems" if document.source == "shakespeare" else document.title
        key = (document.source, title)
        rows[key] = rows.get(key, 0) + len(document.text)
    return "\n".join(
        f"| {title} | {SOURCES[source].author} | {SOURCES[source].package} | {characters:,} |"
        for (source, title), characters in rows.items()
    )


def architecture(evaluation: Evaluation, folder: Path) -> dict[str, object]:
    """The card's fields that the model's own files tell."""
    config = evaluation.model.config
    return {
        "parameters": f"{evaluation.model.num_parameters():,}",
        "megabytes": f"{(folder / 'model.safetensors').stat().st_size / 1e6:.1f}",
        "layers": config.num_hidden_layers,
        "experts": config.num_experts,
        "top_k": config.num_experts_per_tok,
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "inner": config.moe_intermediate_size,
        "context": config.max_position_embeddings,
        "vocab": config.vocab_size,
        "eos": config.eos_token_id,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }


def measured(evaluation: Evaluation, heldout: list[str]) -> dict[str, object]:
    """The card's fields that come from running the model."""
    text = evaluation.measure(heldout)
    # Six shuffles of the held-out sums are a third as many tokens as the held-out text.
    sums = evaluation.measure([d for seed in range(6) for d in heldout_documents(seed)])
    both = Measurement.joined([text, sums])
    parts = {"all": both, "text": text, "sums": sums}
    bits = text.loss / math.log(2) / sum(len(document) + 1 for document in heldout)
    return {
        "text_loss": f"{text.loss / text.predicted:.3f}",
        "text_bits": f"{bits:.3f}",
        "text_tokens": f"{text.predicted:,}",
        "sums_heldout": evaluation.sums_right(heldout_pairs()),
        "sums_shots": evaluation.sums_right(heldout_pairs(), SHOTS),
        "sums_heldout_number": len(heldout_pairs()),
        "sums_seen": f"{evaluation.sums_right(training_pairs()):,}",
        "sums_seen_number": f"{len(training_pairs()):,}",
        "summary": Measurement.summary(parts),
        **{f"load_{name}": part.load_table() for name, part in parts.items()},
        "seed": SAMPLE_SEED,
        "samples": evaluation.samples(),
    }


def card(folder: Path) -> str:
    """The whole card of the model in `folder`."""
    evaluation, corpus = Evaluation(folder), read_corpus()
    template = Path(__file__).with_name("CARD_TEMPLATE.md").read_text(encoding="utf-8")
    plays = dict.fromkeys(d.title for d in corpus if d.source == "shakespeare")
    characters = sum(len(d.text) for d in corpus if d.split == "train")
    return Template(template).substitute(
        architecture(evaluation, folder)
        | measured(evaluation, [d.text for d in corpus if d.split == "heldout"])
        | {"heldout_one_in": HELDOUT_ONE_IN, "train_characters": f"{characters:,}"}
        | {"sources": sources_table(corpus), "plays": "; ".join(plays)}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the model and write its card.")
    parser.add_argument("--model", type=Path, default=MODEL_FOLDER, help="default: %(default)s")
    folder = parser.parse_args().model
    (folder / "MODEL_CARD.md").write_text(card(folder), encoding="utf-8")
    print(folder / "MODEL_CARD.md")


if __name__ == "__main__":
    main()
