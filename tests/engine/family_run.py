"""One model family through the whole engine, judged by a plain transformers forward of the same model.

The engine runs in float64, in reference mode and then packed as in ordinary use, with prompts that share a prefix,
chunked prefill, decodes beside chunks, and sampling. The judge runs each finished sequence alone, with transformers'
own attention, and notes what the experts were given, without intercepting any top-k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from routebook.engine.llm import LLM
from routebook.engine.outputs import RequestOutput
from routebook.engine.sampling_params import SamplingParams
from routebook.routes import Origin
from tests.capture.recorder import ExpertsRecorder
from tests.families import VOCAB_SIZE, Family

PREFIX, PROMPTS, COMPLETION = 13, 4, 7


@dataclass(frozen=True, kw_only=True)
class FamilyResult:
    """What a run of one family showed, over (token, layer) pairs."""

    name: str
    pairs: int
    different: int
    """In the reference mode."""
    packed_different: int
    """In the packed mode."""
    largest_logprob_error: float
    """Between the engine's and transformers' log-probability of the sampled tokens, both modes."""
    cached_rows: int
    """Rows that came from another request's prefix."""
    bitwise: bool
    """Whether in reference mode other batches and chunks gave the same bits."""


def run_family(family: Family, dtype: torch.dtype = torch.float64) -> FamilyResult:
    """Run a served family."""
    outputs = generate(family, dtype, reference=True, budget=7, max_num_seqs=3)
    again = generate(family, dtype, reference=True, budget=64, max_num_seqs=PROMPTS)
    packed = generate(family, dtype, reference=False, budget=23, max_num_seqs=3)
    judge = family.build(dtype)
    judge.set_attn_implementation("eager")
    judge.set_experts_implementation("eager")
    verdicts = [judge_output(judge, output) for output in outputs]
    packed_verdicts = [judge_output(judge, output) for output in packed]
    return FamilyResult(
        name=family.name,
        pairs=sum(v.pairs for v in verdicts),
        different=sum(v.different for v in verdicts),
        packed_different=sum(v.different for v in packed_verdicts),
        largest_logprob_error=max(v.logprob_error for v in verdicts + packed_verdicts),
        cached_rows=sum(v.cached_rows for v in verdicts),
        bitwise=[o.choices[0].logprobs for o in outputs] == [o.choices[0].logprobs for o in again],
    )


def generate(
    family: Family, dtype: torch.dtype, *, reference: bool, budget: int, max_num_seqs: int
) -> list[RequestOutput]:
    """Complete a few prompts."""
    llm = LLM(
        family.build(dtype),
        device="cpu",
        reference=reference,
        block_size=4,
        num_blocks=40,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        max_model_len=40,
    )
    params = SamplingParams(max_tokens=COMPLETION, ignore_eos=True, logprobs=0, seed=5)
    outputs = llm.generate(prompts(), params)
    llm.check_integrity()
    return outputs


@dataclass(frozen=True)
class Verdict:
    """One sequence, judged."""

    pairs: int
    different: int
    cached_rows: int
    logprob_error: float


def judge_output(judge: Any, output: RequestOutput) -> Verdict:
    """Compare rows and log-probabilities with a plain forward."""
    choice = output.choices[0]
    record = choice.routed_experts
    assert record is not None
    assert record.complete
    assert record.num_rows == len(output.prompt_token_ids) + len(choice.token_ids) - 1
    rows, logprobs = judge_rows(judge, output.prompt_token_ids + choice.token_ids)
    same = (record.ids_TLK == rows.numpy()).all(axis=2)
    cached = [span for span in record.provenance if span.origin is Origin.PREFIX_CACHE]
    return Verdict(
        pairs=same.size,
        different=int((~same).sum()),
        cached_rows=sum(span.stop - span.start for span in cached),
        logprob_error=logprob_error(choice, logprobs),
    )


def prompts() -> list[list[int]]:
    """Token ids of prompts of different lengths with a common beginning, and one without it."""
    draw = np.random.default_rng(3)
    prefix = draw.integers(3, VOCAB_SIZE, PREFIX).tolist()
    tails = [draw.integers(3, VOCAB_SIZE, 3 * n + 1).tolist() for n in range(PROMPTS)]
    return [*(prefix + tail for tail in tails), tails[-1]]


@torch.inference_mode()
def judge_rows(model: Any, token_ids: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[T - 1, L, K]` and log-probabilities `[T - 1, V]` of a plain forward over all but the last token."""
    recorder = ExpertsRecorder()
    with recorder.recording(model):
        logits = model(input_ids=torch.tensor([token_ids[:-1]]), use_cache=False).logits[0]
    return recorder.rows, logits.float().log_softmax(-1)


def logprob_error(choice: Any, logprobs_TV: torch.Tensor) -> float:
    """Largest difference between the engine's log-probabilities and the judge's."""
    own = torch.tensor([entry.logprob for entry in choice.logprobs])
    sampled = logprobs_TV[-len(own) :].gather(-1, torch.tensor(choice.token_ids)[:, None])[:, 0]
    return float((own - sampled).abs().max())
