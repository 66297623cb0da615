"""Stateful mixers on packed batches, against each sequence alone in transformers' own forward.

Full attention is played by a plain implementation that keeps every request's keys and values in a dictionary.

Legend of shape suffixes: T = tokens of the step, N = rows of a request, S = keys so far, H = heads, D = head size,
V = vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from routebook.engine.mixers import Segment, StatefulMixers
from routebook.errors import ModelError, RequestError
from tests.families import HYBRIDS, SERVED, VOCAB_SIZE, Family

LENGTHS = {"a": 21, "b": 9, "c": 14}


@dataclass
class DictStep:
    """What `dict_attention` needs to know of a step."""

    segments: list[Segment]
    keys_values: dict[tuple[Any, int], tuple[torch.Tensor, torch.Tensor]] = field(repr=False)


def dict_attention(  # noqa: PLR0917
    module: Any,
    q_1HTD: torch.Tensor,
    k_1HTD: torch.Tensor,
    v_1HTD: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    routebook_step: DictStep | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of each request's new rows to all of its rows."""
    assert attention_mask is None
    assert routebook_step is not None
    outputs = []
    for segment in routebook_step.segments:
        rows = slice(segment.start_row, segment.start_row + segment.num_rows)
        k_HSD, v_HSD = k_1HTD[0, :, rows], v_1HTD[0, :, rows]
        key = (segment.request_id, module.layer_idx)
        if segment.position:
            past_k_HSD, past_v_HSD = routebook_step.keys_values[key]
            k_HSD, v_HSD = torch.cat([past_k_HSD, k_HSD], 1), torch.cat([past_v_HSD, v_HSD], 1)
        routebook_step.keys_values[key] = (k_HSD, v_HSD)
        groups = q_1HTD.shape[1] // k_HSD.shape[0]
        scale = q_1HTD.shape[-1] ** -0.5 if scaling is None else scaling
        scores_HNS = q_1HTD[0, :, rows] @ k_HSD.repeat_interleave(groups, 0).mT * scale
        causal_NS = torch.ones(scores_HNS.shape[1:], dtype=torch.bool).tril(segment.position)
        weights_HNS = scores_HNS.masked_fill(~causal_NS, float("-inf")).softmax(-1)
        outputs.append(weights_HNS @ v_HSD.repeat_interleave(groups, 0))
    return torch.cat(outputs, dim=1).transpose(0, 1)[None], None


AttentionInterface.register("dict_attention", dict_attention)


class PackedModel:
    """Runs segments of sequences as packed batches, as an engine does."""

    def __init__(self, model: Any, sequences: dict[str, torch.Tensor]) -> None:
        self.model = model
        self.sequences = sequences
        mixers = StatefulMixers.bind(model)
        assert mixers is not None
        self.mixers = mixers
        self.done = dict.fromkeys(sequences, 0)
        self.keys_values: dict[tuple[Any, int], tuple[torch.Tensor, torch.Tensor]] = {}
        model.set_attn_implementation("dict_attention")

    def step(self, scheduled: dict[str, int]) -> dict[str, torch.Tensor]:
        """Run `scheduled` tokens of each request; return each request's logits `[N, V]`."""
        segments, row = [], 0
        for name, num_rows in scheduled.items():
            segments.append(Segment(name, row, num_rows, self.done[name]))
            row += num_rows
        spans = [
            slice(segment.position, segment.position + segment.num_rows) for segment in segments
        ]
        input_ids = [
            self.sequences[s.request_id][span] for s, span in zip(segments, spans, strict=True)
        ]
        self.mixers.begin_step([tuple(segment) for segment in segments])  # type: ignore[misc]
        logits_TV = self.model(
            input_ids=torch.cat(input_ids)[None],
            position_ids=torch.cat([torch.arange(s.start, s.stop) for s in spans])[None],
            use_cache=False,
            logits_to_keep=torch.arange(row),
            routebook_step=DictStep(segments, self.keys_values),
        ).logits[0]
        for name, num_rows in scheduled.items():
            self.done[name] += num_rows
        return dict(zip(scheduled, logits_TV.split(list(scheduled.values())), strict=True))


def schedules(seed: int) -> Iterator[dict[str, int]]:
    """Chunks of different sizes, in changing order, that finish all sequences; sizes of one are frequent."""
    rng = random.Random(seed)
    left = dict(LENGTHS)
    while left:
        names = rng.sample(list(left), rng.randint(1, len(left)))
        step = {name: min(left[name], rng.choice([1, 1, 2, 3, 5, 9])) for name in names}
        for name, num_rows in step.items():
            left[name] -= num_rows
        left = {name: rows for name, rows in left.items() if rows}
        yield step


def build(family: Family) -> Any:
    model = family.build(torch.float64)
    model.set_experts_implementation("eager")
    return model


def make_sequences() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randint(0, VOCAB_SIZE, (length,), generator=generator)
        for name, length in LENGTHS.items()
    }


@torch.no_grad()
@pytest.mark.parametrize("name", HYBRIDS)
def test_packed_chunks_equal_each_sequence_alone(name: str) -> None:
    model = build(HYBRIDS[name])
    sequences = make_sequences()
    alone = {
        request: model(input_ids=ids[None], use_cache=False).logits[0]
        for request, ids in sequences.items()
    }
    for seed in range(3):
        packed = PackedModel(model, sequences)
        pieces: dict[str, list[torch.Tensor]] = {request: [] for request in sequences}
        for scheduled in schedules(seed):
            for request, logits_NV in packed.step(scheduled).items():
                pieces[request].append(logits_NV)
        for request, wanted_NV in alone.items():
            # Some norms and scans of the library compute in float32 whatever the weights are.
            torch.testing.assert_close(torch.cat(pieces[request]), wanted_NV, atol=1e-4, rtol=0.0)
        packed.mixers.unbind()


@torch.no_grad()
@pytest.mark.parametrize("name", HYBRIDS)
def test_without_the_mixers_sequences_leak_into_each_other(name: str) -> None:
    """The test above can fail: the same packed batch through the model as it is."""
    model = build(HYBRIDS[name])
    sequences = make_sequences()
    alone_NV = model(input_ids=sequences["b"][None], use_cache=False).logits[0]
    packed = PackedModel(model, sequences)
    packed.mixers.unbind()
    packed.mixers.begin_step = lambda segments: None  # type: ignore[method-assign]
    logits = packed.step(LENGTHS)
    assert (logits["b"] - alone_NV).abs().max() > 0.05


@torch.no_grad()
def test_a_request_from_position_zero_gets_a_fresh_state() -> None:
    packed = PackedModel(build(HYBRIDS["qwen3_next"]), make_sequences())
    first = packed.step({"a": 5, "b": 3})
    packed.step({"a": 4, "b": 1})
    packed.done["a"] = 0
    again = packed.step({"b": 2, "a": 5})
    torch.testing.assert_close(again["a"], first["a"])
    assert packed.mixers.num_states == 2


@torch.no_grad()
def test_states_live_until_they_are_dropped() -> None:
    packed = PackedModel(build(HYBRIDS["lfm2_moe"]), make_sequences())
    assert packed.mixers.num_states == 0
    packed.step({"a": 5, "b": 3, "c": 2})
    packed.step({"c": 1})
    assert packed.mixers.num_states == 3
    packed.mixers.drop("b")
    packed.mixers.drop("b")
    assert packed.mixers.num_states == 2
    packed.step({"a": 1, "c": 1})
    with pytest.raises(RequestError, match=r"'b' continues at position 3, .*covers \[0\] tokens"):
        packed.step({"b": 1})


@pytest.mark.parametrize("position", [3, 4, 6, 16])
def test_a_position_that_does_not_follow_is_refused(position: int) -> None:
    packed = PackedModel(build(HYBRIDS["lfm2_moe"]), make_sequences())
    with torch.no_grad():
        packed.step({"a": 5})
        with pytest.raises(RequestError, match=rf"'a' continues at position {position}.*\[5\]"):
            packed.mixers.begin_step([("b", 0, 2, 0), ("a", 2, 1, position)])
        assert packed.mixers.num_states == 1  # the refused step has begun nothing
        packed.step({"a": 2})


@torch.no_grad()
def test_a_forward_that_failed_half_way_leaves_no_usable_state() -> None:
    packed = PackedModel(build(HYBRIDS["qwen3_5_moe"]), make_sequences())
    packed.step({"a": 5})
    layer = packed.model.model.layers[1]
    fail = layer.register_forward_pre_hook(lambda module, args: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        packed.step({"a": 2})
    fail.remove()
    with pytest.raises(RequestError, match=r"covers \[5, 7\] tokens"):
        packed.step({"a": 2})
    packed.done["a"] = 0
    packed.step({"a": 7})


@torch.no_grad()
def test_a_forward_needs_its_own_step() -> None:
    packed = PackedModel(build(HYBRIDS["lfm2_moe"]), make_sequences())
    ids = packed.sequences["a"][None]
    with pytest.raises(AssertionError, match="begin_step"):
        packed.model(input_ids=ids, use_cache=False)
    packed.step({"a": 5})
    with pytest.raises(AssertionError, match="one forward per begin_step"):
        packed.model(input_ids=ids[:, :5], use_cache=False)
    packed.mixers.begin_step([("a", 0, 4, 5)])
    with pytest.raises(AssertionError):
        packed.model(input_ids=ids[:, :5], use_cache=False)


@pytest.mark.parametrize(
    "segments",
    [
        [("a", 0, 2, 0), ("b", 3, 1, 0)],
        [("a", 1, 2, 0)],
        [("a", 0, 0, 0)],
        [("a", 0, 2, 0), ("a", 2, 2, 0)],
    ],
)
def test_segments_must_cover_the_batch(segments: list[tuple[str, int, int, int]]) -> None:
    mixers = StatefulMixers.bind(build(HYBRIDS["lfm2_moe"]))
    assert mixers is not None
    with pytest.raises(AssertionError):
        mixers.begin_step(segments)


@pytest.mark.parametrize("name", [name for name in SERVED if name not in HYBRIDS])
def test_models_without_a_state_have_no_mixers(name: str) -> None:
    assert StatefulMixers.bind(SERVED[name].build()) is None


def test_an_unknown_mixer_is_refused() -> None:
    family = Family(
        name="bamba",
        config_class="BambaConfig",
        options={"mamba_n_heads": 8, "mamba_d_head": 16, "attn_layer_indices": [1]},
    )
    with pytest.raises(ModelError, match=r"layers \[0, 2\] of BambaForCausalLM"):
        StatefulMixers.bind(family.build())


def test_unbinding_restores_every_forward() -> None:
    model = build(HYBRIDS["minimax"])
    before = {name: "forward" in module.__dict__ for name, module in model.named_modules()}
    mixers = StatefulMixers.bind(model)
    assert mixers is not None
    assert sum("forward" in module.__dict__ for module in model.modules()) > sum(before.values())
    mixers.unbind()
    assert {n: "forward" in m.__dict__ for n, m in model.named_modules()} == before
