"""Requests for a running vLLM that meet what an engine does to requests, and the comparison of what they return."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from routebook.errors import RequestError
from tests.hosts.vllm.oracle import Tally

VOCAB = 500
Tokens = list[int]


class Workload:
    """Requests for one engine.

    Args:
        llm: `routebook.hosts.vllm.LLM`, its engine in this process.
        tally: where comparisons go.
        seed: of the prompts.
    """

    def __init__(self, llm: Any, tally: Tally, seed: int = 0) -> None:
        self.llm, self.tally = llm, tally
        self._random = random.Random(seed)

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def prompt(self, length: int) -> Tokens:
        """Random tokens."""
        return [self._random.randrange(1, VOCAB) for _ in range(length)]

    def check(self) -> None:
        """Recount what is held; when all is quiet, that is the prefix cache."""
        keeper = self.scheduler.row_keeper
        keeper.check_integrity()
        assert not self.scheduler.requests
        assert keeper.num_steps_under_way <= 1

    def run(self, prompts: Sequence[Tokens], compare: bool = True, **params: Any) -> list[Any]:
        """Generate, compare every completion, and see that nothing is held afterwards."""
        from vllm import SamplingParams

        options = {"max_tokens": 24, "temperature": 1.0, "ignore_eos": True} | params
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(**options),
            use_tqdm=False,
        )
        start = params.get("routed_experts_prompt_start", 0)
        for output in outputs:
            assert output.finished
            for completion in output.outputs if compare else ():
                self.tally.compare(output.prompt_token_ids, completion, start)
        self.check()
        return outputs


def plain(work: Workload) -> None:
    """Short prompts side by side, one token, and a prompt of one token."""
    work.run([work.prompt(n) for n in (5, 17, 31, 32, 33, 1)])
    work.run([work.prompt(9)], max_tokens=1)
    output = work.run([work.prompt(40)], routed_experts_prompt_start=35)[0]
    record, rows_THK = work.llm.record(output, start=35), output.outputs[0].routed_experts
    assert (record.start, record.num_rows) == (35, len(rows_THK))
    assert (record.ids_TLK == rows_THK[:, list(record.schema.layer_ids)]).all()
    with pytest.raises(RequestError, match="from start=0"):
        work.llm.record(output)


def chunked(work: Workload) -> None:
    """A prompt of several steps, among others."""
    work.run([work.prompt(200), work.prompt(20), work.prompt(150)])


def prefix_hits(work: Workload) -> None:
    """The same prefix by one after the other, and by several at once."""
    prefix = work.prompt(100)
    work.run([prefix + work.prompt(5)])
    later = work.run([prefix + work.prompt(9), prefix[:70] + work.prompt(3)])
    hits = [output.num_cached_tokens for output in later]
    assert hits == [96, 64], hits
    work.run([prefix + work.prompt(3)], routed_experts_prompt_start=97)
    work.tally.count(hit_tokens=sum(hits))
    together = work.prompt(64)
    work.run([together + work.prompt(1 + i) for i in range(6)])


def completions_hit(work: Workload) -> None:
    """A second turn, whose prefix is an answer: blocks that were filled token by token."""
    prompt = work.prompt(50)
    first = work.run([prompt], max_tokens=60)[0]
    turn = prompt + list(first.outputs[0].token_ids) + work.prompt(4)
    second = work.run([turn])[0]
    assert second.num_cached_tokens == 96, second.num_cached_tokens
    work.tally.count(hit_tokens=96)


def samples(work: Workload) -> None:
    """Several samples of one prompt."""
    outputs = work.run([work.prompt(70)], n=3)
    assert len({tuple(c.token_ids) for c in outputs[0].outputs}) == 3


def preemption(work: Workload) -> None:
    """More requests than the KV cache has room for."""
    outputs = work.run([work.prompt(40 + i) for i in range(8)], max_tokens=70)
    assert len(outputs) == 8


def declined(work: Workload) -> None:
    """Requests that decline rows get none, and others hit what they computed."""
    prefix = work.prompt(80)
    outputs = work.run([prefix], compare=False, extra_args={"routed_experts": False})
    assert outputs[0].outputs[0].routed_experts is None
    hit = work.run([prefix + work.prompt(8)], extra_args={"routed_experts": 1})[0]
    assert hit.num_cached_tokens == 64
    work.tally.count(hit_tokens=64)
    outputs = work.run([prefix], compare=False, extra_args={"routed_experts": "perhaps"})
    assert outputs[0].outputs[0].routed_experts is None


def stop_strings(work: Workload) -> None:
    """A stop string, which the front end finds and the engine's core does not."""
    tokenizer = work.llm.get_tokenizer()
    prompt = tokenizer("Once upon a time")["input_ids"]
    whole = work.run([prompt], temperature=0.0, max_tokens=40)[0].outputs[0]
    stop = whole.text[20:24]
    short = work.run([prompt], temperature=0.0, max_tokens=40, stop=[stop])[0].outputs[0]
    assert short.finish_reason == "stop"
    assert len(short.token_ids) < len(whole.token_ids)
    token = whole.token_ids[11]
    ended = work.run([prompt], temperature=0.0, max_tokens=40, stop_token_ids=[token])[0]
    assert ended.outputs[0].finish_reason == "stop"
    work.tally.count(stopped=2)


def repetitive(work: Workload) -> None:
    """Texts that repeat themselves, which n-gram speculation guesses."""
    tokenizer = work.llm.get_tokenizer()
    prompt = tokenizer("one two three four one two three four one two three")["input_ids"]
    work.run([prompt, prompt + prompt, work.prompt(6) * 5], temperature=0.0, max_tokens=60)
    work.run([work.prompt(4) * 8 for _ in range(6)], temperature=0.7, max_tokens=60)


def forced_reset(work: Workload) -> None:
    """The prefix cache is reset while requests run: they are computed anew."""
    from vllm import SamplingParams

    engine, prompts, done = work.llm.llm_engine, [work.prompt(40), work.prompt(70)], {}
    params = SamplingParams(max_tokens=30, temperature=1.0, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(f"reset-{index}", {"prompt_token_ids": prompt}, params)
    steps = 0
    while engine.has_unfinished_requests():
        done |= {o.request_id: o for o in engine.step() if o.finished}
        steps += 1
        if steps in (6, 17):
            assert work.scheduler.reset_prefix_cache(reset_running_requests=True)
    for index, prompt in enumerate(prompts):
        work.tally.compare(prompt, done[f"reset-{index}"].outputs[0])
    work.check()
    assert work.llm.reset_prefix_cache()
    again = work.run([prompts[0]])[0]
    assert again.num_cached_tokens == 0


def reloaded(work: Workload) -> None:
    """The weights are loaded again into the running engine, for which vLLM makes its kernels anew."""
    for _ in range(2):
        work.llm.collective_rpc("reload_weights")
        assert work.llm.reset_prefix_cache()
        work.run([work.prompt(n) for n in (5, 40)])
    work.tally.count(reloads=2)


ALL: dict[str, Callable[[Workload], None]] = {
    f.__name__: f
    for f in (
        *(plain, chunked, prefix_hits, completions_hit, samples, preemption, declined),
        *(stop_strings, repetitive, forced_reset, reloaded),
    )
}
