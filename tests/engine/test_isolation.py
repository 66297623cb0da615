"""One request's trouble is its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from routebook.engine.llm import LLM
from routebook.engine.outputs import CompletionOutput
from routebook.engine.sampling_params import SamplingParams
from routebook.errors import IntegrityError, RequestError, WorkerError
from tests.families import SERVED

FAMILY = SERVED["qwen3_moe"]
POISON = 3
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
PROMPT = list(range(20, 30))


def poisoned_model() -> Any:
    """A model that makes NaN of one token, and of every token that sees it."""
    model = FAMILY.build(torch.float32)
    model.get_input_embeddings().weight.data[POISON] = float("nan")
    return model


def choices(llm: LLM, prompts: list[list[int]]) -> list[CompletionOutput]:
    return [output.choices[0] for output in llm.generate(prompts, GREEDY)]


def rows_of(choice: CompletionOutput) -> list[Any]:
    record = choice.routed_experts
    assert record is not None
    assert record.complete
    rows: list[Any] = record.ids_TLK.tolist()
    return rows


@pytest.mark.parametrize("block_size", [1, 16])
def test_a_nan_stays_with_the_request_that_made_it(block_size: int) -> None:
    llm = LLM(
        poisoned_model(),
        device="cpu",
        block_size=block_size,
        num_blocks=128 // block_size,
        max_model_len=64,
    )
    (before,) = choices(llm, [PROMPT])
    llm.engine.reset_prefix_cache()
    # Fills the whole pool with NaN, then runs beside the others.
    llm.generate([[POISON] * 60] * 6, SamplingParams(max_tokens=2, temperature=0))
    llm.engine.reset_prefix_cache()
    after, _, longer = choices(llm, [PROMPT, [POISON] * 50, PROMPT * 3])
    assert after.token_ids == before.token_ids
    assert rows_of(after) == rows_of(before)
    (alone,) = choices(LLM(FAMILY.build(torch.float32), device="cpu"), [PROMPT * 3])
    assert longer.token_ids == alone.token_ids
    assert rows_of(longer) == rows_of(alone)


def test_a_nan_with_sampling_does_not_stop_the_others() -> None:
    llm = LLM(poisoned_model(), device="cpu", block_size=4, num_blocks=64)
    params = SamplingParams(max_tokens=6, ignore_eos=True, seed=1)
    _, good = llm.generate([[POISON] * 5, PROMPT], params)
    (alone,) = LLM(FAMILY.build(torch.float32), device="cpu").generate([PROMPT], params)
    assert good.choices[0].token_ids == alone.choices[0].token_ids
    llm.check_integrity()


def test_a_temperature_that_would_overflow_is_greedy() -> None:
    llm = LLM(FAMILY.build(torch.float32), device="cpu")
    cold = SamplingParams(max_tokens=6, temperature=1e-38, ignore_eos=True)
    (sampled,) = llm.generate([PROMPT], cold)
    assert sampled.choices[0].token_ids == choices(llm, [PROMPT])[0].token_ids


def test_one_long_context_does_not_pad_the_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read from the pool is less than twice what the sequences hold, rounded up to blocks."""
    llm = LLM("tiny", device="cpu", dtype="float32", max_num_batched_tokens=1024)
    pool = llm.engine.executor.worker.runner._pool  # type: ignore[attr-defined]
    read: list[int] = []
    original = pool.read_blocks

    def counting(layer: int, blocks: torch.Tensor) -> Any:
        read.append(blocks.numel())
        return original(layer, blocks)

    monkeypatch.setattr(pool, "read_blocks", counting)
    for length in (900, *[20] * 30):
        llm.engine.add_request([7] * length, GREEDY)
    llm.engine.step()
    llm.engine.step()
    read.clear()
    llm.engine.step()
    assert sum(read) / 6 < 2 * (900 + 30 * 24) / 16 + 31


def test_an_interrupted_step_leaves_no_prefix_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was planned and not computed must not be found by the next prompt with this prefix."""
    llm = LLM(FAMILY.build(torch.float32), device="cpu", block_size=4, num_blocks=64)
    runner = llm.engine.executor.worker.runner  # type: ignore[attr-defined]
    forward = runner._forward

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(runner, "_forward", forward)
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "_forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT], GREEDY)
    with pytest.raises(WorkerError, match="restart"):
        llm.generate([PROMPT], GREEDY)
    llm.restart()
    (again,) = choices(llm, [[*PROMPT, 60]])
    (alone,) = choices(LLM(FAMILY.build(torch.float32), device="cpu"), [[*PROMPT, 60]])
    assert again.token_ids == alone.token_ids
    assert rows_of(again) == rows_of(alone)
    llm.check_integrity()


def test_an_interrupted_generate_leaves_no_request_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An interrupt between two steps harms nothing: the engine goes on, and the prompts are forgotten."""
    llm = LLM(FAMILY.build(torch.float32), device="cpu", block_size=4, num_blocks=64)
    engine, step, calls = llm.engine, llm.engine.step, [0]

    def interrupted() -> list[Any]:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT, PROMPT[:4]], GREEDY)
    monkeypatch.undo()
    assert not engine.has_work
    llm.check_integrity()
    assert len(choices(llm, [PROMPT])[0].token_ids) == 6


def test_generate_leaves_other_peoples_outputs_alone() -> None:
    llm = LLM(FAMILY.build(torch.float32), device="cpu", block_size=4, num_blocks=64)
    other = llm.engine.add_request(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True))
    llm.generate([PROMPT[:3]], GREEDY)
    (output,) = llm.engine.step()
    assert output.request_id == other


def test_generate_on_a_paused_engine_is_refused() -> None:
    llm = LLM(FAMILY.build(torch.float32), device="cpu")
    llm.engine.pause()
    with pytest.raises(RequestError, match="resume"):
        llm.generate([PROMPT], GREEDY)
    llm.engine.resume()
    assert choices(llm, [PROMPT])


def test_neighbouring_seeds_share_no_completion() -> None:
    llm = LLM(FAMILY.build(torch.float32), device="cpu")
    seen = [
        choice.token_ids
        for seed in range(4)
        for output in llm.generate([PROMPT], SamplingParams(n=4, seed=seed, max_tokens=8))
        for choice in output.choices
    ]
    assert len(set(seen)) == 16


@pytest.mark.parametrize("ledger", ["request", "slot"])
def test_a_leak_is_told_when_the_engine_goes_idle(ledger: str) -> None:
    """The outputs are not lost: the next call returns them."""
    llm = LLM(FAMILY.build(torch.float32), device="cpu", ledger=ledger, check_when_idle=True)
    llm.generate([PROMPT], GREEDY)
    llm.engine.scheduler.ledger.begin("nobody's", 3)
    request_id = llm.engine.add_request(PROMPT, GREEDY)
    for _ in range(GREEDY.max_tokens - 1):
        llm.engine.step()
    with pytest.raises(IntegrityError, match="1 ledger entries, 0 requests"):
        llm.engine.step()
    assert [output.request_id for output in llm.engine.step()] == [request_id]


def test_what_the_worker_holds_is_recounted_when_the_engine_goes_idle() -> None:
    llm = LLM(FAMILY.build(torch.float32), device="cpu", check_when_idle=True)
    runner = llm.engine.executor.worker.runner  # type: ignore[attr-defined]
    runner.drop = lambda request_ids: None
    with pytest.raises(IntegrityError, match="the idle worker holds 1 requests"):
        llm.generate([PROMPT], GREEDY)
