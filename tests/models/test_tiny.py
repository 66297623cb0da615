"""The bundled model does what its card says, from its own files alone."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from routebook.errors import ModelNotFoundError
from routebook.models import BUNDLED_MODELS, bundled_model_path

PROSE = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, "
    "must be in want of a wife. However little known the feelings or views of such a man may be on "
    "his first entering a neighbourhood, this truth is so well fixed in the minds of the "
    "surrounding families, that he is considered the rightful property of some one or other of "
    "their daughters.\n\nAnd God said, Let there be light: and there was light.\n\nHAMLET.\nTo be, "
    "or not to be,--that is the question:--\nWhether 'tis nobler in the mind to suffer\n"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return AutoTokenizer.from_pretrained(bundled_model_path("tiny"))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    path = bundled_model_path("tiny")
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ModelNotFoundError, match=r"'big'.*tiny"):
        bundled_model_path("big")


@pytest.mark.parametrize("name", BUNDLED_MODELS)
def test_every_bundled_model_has_a_card_with_its_load_table(name: str) -> None:
    card = (bundled_model_path(name) / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert "| layer | 0 | 1 |" in card
    assert "$" not in card, "a field of the template was left open"


@given(text=st.text(max_size=60).filter(lambda text: "<|endoftext|>" not in text))
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_each_digit_is_a_token_and_nothing_is_put_in_front(tokenizer: Tokenizer) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer("17+25=42").input_ids) == list("17+25=42")


def test_the_end_of_text_token_stops_generation(
    tokenizer: Tokenizer, model: PreTrainedModel
) -> None:
    assert tokenizer("<|endoftext|>").input_ids == [tokenizer.eos_token_id]
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_it_adds_two_digit_numbers(tokenizer: Tokenizer, model: PreTrainedModel) -> None:
    rng = random.Random(3)
    pairs = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in range(100)]
    inputs = tokenizer([f"{a}+{b}=" for a, b in pairs], return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    answers = tokenizer.batch_decode(out[:, inputs.input_ids.shape[1] :])
    right = sum(
        answer.startswith(f"{a + b}\n") for (a, b), answer in zip(pairs, answers, strict=True)
    )
    assert right >= 95


def test_it_knows_its_books(tokenizer: Tokenizer, model: PreTrainedModel) -> None:
    ids = tokenizer(PROSE, return_tensors="pt").input_ids
    with torch.no_grad():
        loss = float(model(ids, labels=ids).loss)
    # 3.23 as exported, 3.29 with one layer's attention gone, 3.44 with one router's experts
    # swapped; chance is 7.6.
    assert loss < 3.26


def test_no_expert_is_dead_and_none_takes_all(tokenizer: Tokenizer, model: PreTrainedModel) -> None:
    sums = "".join(
        f"{a}+{b}={a + b}\n" for a, b in zip(range(3, 60, 7), range(90, 9, -9), strict=True)
    )
    loads = torch.zeros(model.config.num_hidden_layers, model.config.num_experts)
    for text in (PROSE, sums):
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            router_logits = model(ids, output_router_logits=True).router_logits
        for layer, logits_TE in enumerate(router_logits):
            chosen = logits_TE.topk(model.config.num_experts_per_tok).indices
            loads[layer] += torch.bincount(chosen.flatten(), minlength=len(loads[layer]))
    assert loads.min() > 0
    assert (loads.max(1).values <= 3 * loads.mean(1)).all()


def test_the_shipped_configuration_asks_for_no_training_output(model: PreTrainedModel) -> None:
    ids = torch.tensor([[1, 2, 3]])
    assert not model.config.output_router_logits
    assert model.config.router_aux_loss_coef == 0.0
    assert model(ids).router_logits is None
