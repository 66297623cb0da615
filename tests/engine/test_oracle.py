"""Rows of the engine against an independent recorder of every forward that ran."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from routebook.engine.llm import LLM
from routebook.engine.outputs import RequestOutput
from routebook.engine.sampling_params import SamplingParams
from routebook.routes import Origin
from tests.engine.forward_recorder import ForwardRecorder
from tests.families import SERVED, VOCAB_SIZE

MODEL = SERVED["qwen3_moe"]
CAPACITY = 112
"""Tokens of the KV pool: room for about three of the requests at their longest."""


def make_llm(
    block_size: int, budget: int, *, reference: bool, steps_in_flight: int = 1, **options: Any
) -> LLM:
    return LLM(
        MODEL.build(),
        dtype="float32",
        device="cpu",
        reference=reference,
        block_size=block_size,
        num_blocks=CAPACITY // block_size,
        max_num_batched_tokens=budget,
        max_model_len=64,
        max_steps_in_flight=steps_in_flight,
        **options,
    )


def requests() -> Iterator[tuple[list[int], SamplingParams]]:
    """Prompts with a common beginning, of different lengths; some ask for no rows, some for later ones."""
    draw = np.random.default_rng(0)
    prefix = draw.integers(3, VOCAB_SIZE, 21).tolist()
    for n in range(10):
        prompt = prefix[: 21 - n % 3] + draw.integers(3, VOCAB_SIZE, n).tolist()
        yield (
            prompt,
            SamplingParams(
                max_tokens=6 + 3 * n,
                ignore_eos=True,
                seed=n,
                routed_experts=n % 4 != 3,
                routed_experts_prompt_start=5 * (n % 2),
            ),
        )


def run(llm: LLM) -> tuple[list[RequestOutput], ForwardRecorder]:
    """Let requests arrive one per step, so that prompts, decodes and prefix hits mix."""
    engine, outputs = llm.engine, []
    recorder = ForwardRecorder(engine)
    for prompt, params in requests():
        engine.add_request(prompt, params)
        outputs += engine.step()
    while engine.has_work:
        outputs += engine.step()
        engine.check_integrity()
    return outputs, recorder


@pytest.mark.parametrize("reference", [False, True], ids=["packed", "reference"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("budget", [1, 7, 64])
def test_every_row_is_the_earliest_that_was_computed(
    budget: int, block_size: int, reference: bool
) -> None:
    llm = make_llm(block_size, budget, reference=reference)
    outputs, recorder = run(llm)
    compared = sum(check(output, recorder, outputs) for output in outputs)
    assert compared > 200
    assert (llm.engine.scheduler.num_preemptions > 0) == (budget > 1)


@pytest.mark.parametrize("steps_in_flight", [2, 3])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_steps_in_flight_change_no_row(block_size: int, steps_in_flight: int) -> None:
    llm = make_llm(block_size, 24, reference=False, steps_in_flight=steps_in_flight)
    outputs, recorder = run(llm)
    assert sum(check(output, recorder, outputs) for output in outputs) > 200
    assert llm.engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("ledger", ["request", "slot"])
@pytest.mark.parametrize("steps_in_flight", [1, 3])
def test_the_latest_row_where_that_is_asked_for(ledger: str, steps_in_flight: int) -> None:
    """Where a preempted request computed a position again the record has that row and says so."""
    options = {"ledger": ledger, "recompute": "latest", "prefix_caching": False}
    llm = make_llm(4, 24, reference=False, steps_in_flight=steps_in_flight, **options)
    outputs, recorder = run(llm)
    recomputed = 0
    for output in outputs:
        record = output.choices[0].routed_experts
        for span in record.provenance if record is not None else ():
            for position in range(span.start, span.stop):
                runs = recorder.computed[f"{output.request_id}.0", position]
                assert (span.origin is Origin.RECOMPUTED) == (len(runs) > 1)
                row = record.ids_TLK[position - record.start]
                np.testing.assert_array_equal(row, runs[-1][1])
                recomputed += len(runs) > 1
    assert recomputed > 50


def check(output: RequestOutput, recorder: ForwardRecorder, others: list[RequestOutput]) -> int:
    """Compare one completion; returns the number of rows."""
    choice = output.choices[0]
    record = choice.routed_experts
    if record is None:
        return 0
    tokens = output.prompt_token_ids + choice.token_ids
    assert record.complete
    assert record.stop == len(tokens) - 1
    request_id = f"{output.request_id}.0"
    for span in record.provenance:
        for position in range(span.start, span.stop):
            row = record.ids_TLK[position - record.start]
            if span.origin is Origin.PREFIX_CACHE:
                makers = computed_by_others(tokens, position, request_id, recorder, others)
                assert any(np.array_equal(row, maker) for maker in makers)
            else:
                np.testing.assert_array_equal(row, recorder.computed[request_id, position][0][1])
    return record.num_rows


def computed_by_others(
    tokens: tuple[int, ...],
    position: int,
    request_id: str,
    recorder: ForwardRecorder,
    others: list[RequestOutput],
) -> list[np.ndarray]:
    """Rows of this position that other requests with the same tokens up to it computed."""
    rows = []
    for other in others:
        other_tokens = other.prompt_token_ids + other.choices[0].token_ids
        other_id = f"{other.request_id}.0"
        if other_id != request_id and other_tokens[: position + 1] == tokens[: position + 1]:
            rows += [row for _, row in recorder.computed.get((other_id, position), [])]
    return rows


@pytest.mark.parametrize(("budget", "steps_in_flight"), [(7, 1), (64, 1), (64, 3)])
def test_the_reference_mode_is_blind_to_batch_chunks_and_preemption(
    budget: int, steps_in_flight: int
) -> None:
    def results(llm: LLM) -> list[tuple[object, ...]]:
        outputs, _ = run(llm)
        outputs.sort(key=lambda output: int(output.request_id))
        return [
            (
                o.choices[0].token_ids,
                r.ids_TLK.tobytes() if (r := o.choices[0].routed_experts) else 0,
            )
            for o in outputs
        ]

    crowded = make_llm(4, budget, reference=True, steps_in_flight=steps_in_flight)
    alone = LLM(
        MODEL.build(), dtype="float32", reference=True, prefix_caching=False, max_num_seqs=1
    )
    assert results(crowded) == results(alone)
