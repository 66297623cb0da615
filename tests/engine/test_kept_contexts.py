"""Contexts that are kept from step to step hold what the pool holds, whatever comes and goes in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from routebook.engine.kept_contexts import Contexts, KeptContexts
from routebook.engine.llm import LLM
from routebook.engine.sampling_params import SamplingParams


class Comparison:
    """Compares every kept context with the pool's, up to the step's own tokens."""

    def __init__(self) -> None:
        self.original = KeptContexts.extended
        self.num_continued = 0
        self.num_different = 0

    def extended(self, kept: KeptContexts, gather: Callable[[], Contexts], *call: Any) -> Contexts:
        gathered: list[bool] = []

        def counting() -> Contexts:
            gathered.append(True)
            return gather()

        result = self.original(kept, *call, counting)
        self.num_continued += not gathered
        positions_B = call[1]
        for mine, pool in zip(result, gather(), strict=True):
            for b, position in enumerate(positions_B.tolist()):
                seen = slice(0, position + 1)
                self.num_different += not torch.equal(mine[b, :, seen], pool[b, :, seen])
        return result


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> Iterator[Comparison]:
    compared = Comparison()

    def extended(kept: KeptContexts, *arguments: Any) -> Contexts:
        return compared.extended(kept, arguments[-1], *arguments[:-1])

    monkeypatch.setattr(KeptContexts, "extended", extended)
    yield compared
    assert compared.num_different == 0


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_while_requests_come_and_go(comparison: Comparison, block_size: int) -> None:
    llm = LLM("tiny", device="cpu", dtype="float32", block_size=block_size, num_blocks=96)
    prompts = [[7 + i] * (3 + i) for i in range(6)]
    for i, prompt in enumerate(prompts):
        llm.engine.add_request(prompt, params(5 + 7 * i))
        for _ in range(i):
            llm.engine.step()
    aborted = llm.engine.add_request([9] * 9, params(50))
    for _ in range(5):
        llm.engine.step()
    llm.engine.abort(aborted)
    while llm.engine.has_work:
        llm.engine.step()
    assert comparison.num_continued > (20 if block_size > 1 else -1)


def test_after_a_preemption(comparison: Comparison) -> None:
    llm = LLM("tiny", device="cpu", dtype="float32", block_size=4, num_blocks=14)
    llm.generate([[5] * 9, [6] * 9, [7] * 9], params(14))
    assert llm.engine.scheduler.num_preemptions > 0
    assert comparison.num_continued > 0


def test_a_newcomer_in_the_row_of_one_that_left(comparison: Comparison) -> None:
    """Same rows of the batch, one token each, the next positions: only that somebody left tells them apart."""
    llm = LLM("tiny", device="cpu", dtype="float32", max_num_seqs=2, max_num_batched_tokens=2)
    llm.generate([[3] * 33], params(1))
    longest = llm.engine.add_request([5] * 60, params(60))
    # The last step of this one computes position 31.
    llm.engine.add_request([4] * 32, params(1))
    # This one finds 32 positions in the prefix cache, so that its first step computes position 32.
    newcomer = llm.engine.add_request([3] * 36, params(1))
    outputs = {}
    while llm.engine.has_work:
        outputs |= {output.request_id: output for output in llm.engine.step()}
    assert outputs.keys() >= {longest, newcomer}
    record = outputs[newcomer].choices[0].routed_experts
    assert record.provenance[0].stop == 32
    assert comparison.num_continued > 0


def test_an_idle_engine_keeps_nothing() -> None:
    llm = LLM("tiny", device="cpu", dtype="float32")
    llm.generate([[5, 6, 7]], params(4))
    kept = llm.engine.executor.worker.runner._kept  # type: ignore[attr-defined]
    assert kept._last is None
    assert not kept._layers
