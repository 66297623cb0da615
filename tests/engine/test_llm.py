"""The offline interface on the bundled model."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from routebook import LLM, SamplingParams
from routebook.engine.request import FinishReason
from routebook.errors import ConfigError, ModelNotFoundError, RequestError
from routebook.models import bundled_model_path
from routebook.routes import Origin

PATH = str(bundled_model_path("tiny"))
PROSE = "It is a truth universally acknowledged, that a single man in possession"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", dtype="float32", max_num_seqs=32)


@pytest.fixture(scope="module")
def peer() -> tuple[object, object]:
    model = AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(PATH)


def test_greedy_text_is_that_of_transformers_generate(llm: LLM, peer) -> None:  # type: ignore[no-untyped-def]
    model, tokenizer = peer
    prompts = [PROSE, "And God said", "12+34=46\n17+25="]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24))
    for prompt, output in zip(prompts, outputs, strict=True):
        input_ids = tokenizer(prompt, return_tensors="pt").input_ids
        wanted = model.generate(input_ids, do_sample=False, max_new_tokens=24)[
            0, input_ids.shape[1] :
        ]
        assert output.choices[0].token_ids == tuple(wanted.tolist())
        assert output.choices[0].text == tokenizer.decode(wanted, skip_special_tokens=True)
    assert outputs[2].choices[0].text.startswith("42\n")


def test_a_row_for_every_token_but_the_last(llm: LLM) -> None:
    (output,) = llm.generate(PROSE, SamplingParams(max_tokens=9, ignore_eos=True))
    record = output.choices[0].routed_experts
    assert record is not None
    prompt, completion = len(output.prompt_token_ids), len(output.choices[0].token_ids)
    assert record.ids_TLK.shape == (prompt + completion - 1, 6, 4)
    assert record.ids_TLK.dtype == np.uint8
    assert record.complete
    record.check_tokens(output.prompt_token_ids + output.choices[0].token_ids)
    record.check_distinct()


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_the_shortest_completions_have_their_rows(llm: LLM, max_tokens: int) -> None:
    (output,) = llm.generate([[5]], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    record = output.choices[0].routed_experts
    assert record is not None
    assert record.num_rows == max_tokens


def test_start_cuts_the_front_and_nothing_else(llm: LLM) -> None:
    whole, cut = (
        llm.generate(PROSE, SamplingParams(seed=1, max_tokens=8, routed_experts_prompt_start=start))
        for start in (0, 5)
    )
    record, part = whole[0].choices[0].routed_experts, cut[0].choices[0].routed_experts
    assert record is not None
    assert part is not None
    assert part.start == 5
    np.testing.assert_array_equal(part.ids_TLK, record.ids_TLK[5:])
    assert part.token_hash_T.tolist() == record.token_hash_T[5:].tolist()


def test_start_at_the_prompt_end_with_one_token_is_an_empty_record(llm: LLM) -> None:
    (output,) = llm.generate([[5, 6]], SamplingParams(max_tokens=1, routed_experts_prompt_start=2))
    record = output.choices[0].routed_experts
    assert record is not None
    assert record.num_rows == 0


def test_off_means_no_record(llm: LLM) -> None:
    (output,) = llm.generate(PROSE, SamplingParams(max_tokens=3, routed_experts=False))
    assert output.choices[0].routed_experts is None


def test_completions_of_one_prompt_differ_and_share_its_blocks(llm: LLM) -> None:
    llm.engine.reset_prefix_cache()
    (output,) = llm.generate(PROSE * 3, SamplingParams(n=4, seed=3, max_tokens=12))
    assert [choice.index for choice in output.choices] == [0, 1, 2, 3]
    assert len({choice.token_ids for choice in output.choices}) == 4
    shared = len(output.prompt_token_ids) - 1 - (len(output.prompt_token_ids) - 1) % 16
    for choice in output.choices[1:]:
        assert choice.routed_experts is not None
        span = choice.routed_experts.provenance[0]
        assert (span.origin, span.start, span.stop) == (Origin.PREFIX_CACHE, 0, shared)


def test_a_seed_fixes_the_choice_whatever_runs_beside_it(llm: LLM) -> None:
    params = SamplingParams(seed=11, max_tokens=10, temperature=0.9)
    alone = llm.generate(PROSE, params)[0].choices[0].token_ids
    crowd = [PROSE, "And God said", "17+25=", PROSE[:20]]
    together = llm.generate(crowd, [params, *[SamplingParams(max_tokens=20)] * 3])
    assert together[0].choices[0].token_ids == alone


def test_logprobs_are_those_of_a_transformers_forward(llm: LLM, peer) -> None:  # type: ignore[no-untyped-def]
    model, _ = peer
    (output,) = llm.generate(PROSE, SamplingParams(seed=2, max_tokens=8, logprobs=3))
    choice = output.choices[0]
    assert choice.logprobs is not None
    tokens = torch.tensor([output.prompt_token_ids + choice.token_ids])
    with torch.inference_mode():
        logprobs = model(tokens).logits[0].log_softmax(-1)[len(output.prompt_token_ids) - 1 : -1]
    for entry, token_id, row in zip(choice.logprobs, choice.token_ids, logprobs, strict=True):
        assert entry.token_id == token_id
        assert entry.logprob == pytest.approx(row[token_id].item(), abs=1e-4)
        best = row.topk(3)
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_a_stop_text_ends_and_is_cut_off(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, stop="\n")
    (output,) = llm.generate("12+34=46\n50+27=77\n17+25=", params)
    choice = output.choices[0]
    assert choice.text == "42"
    assert (choice.finish_reason, choice.stop_reason) == (FinishReason.STOP, "\n")
    record = choice.routed_experts
    assert record is not None
    # The tokens of the stop text stay, and so do the rows: P + C - 1 as ever.
    assert record.num_rows == len(output.prompt_token_ids) + len(choice.token_ids) - 1
    assert len(choice.token_ids) == 3


def test_a_stop_text_across_tokens_is_found(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, stop=("2\n", "zzz"))
    choice = llm.generate("12+34=46\n50+27=77\n17+25=", params)[0].choices[0]
    assert (choice.text, choice.stop_reason) == ("4", "2\n")


def test_a_stop_token_ends(llm: LLM) -> None:
    newline = llm.engine.tokenize("\n")[0]
    params = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=(newline,))
    choice = llm.generate("12+34=46\n50+27=77\n17+25=", params)[0].choices[0]
    assert choice.token_ids[-1] == newline
    assert (choice.finish_reason, choice.stop_reason) == (FinishReason.STOP, newline)


def test_the_model_limit_ends_with_length() -> None:
    llm = LLM("tiny", dtype="float32", max_model_len=12)
    (output,) = llm.generate([[5] * 8], SamplingParams(ignore_eos=True))
    assert len(output.choices[0].token_ids) == 4
    assert output.choices[0].finish_reason is FinishReason.LENGTH
    record = output.choices[0].routed_experts
    assert record is not None
    assert record.num_rows == 11


def test_an_aborted_request_keeps_what_it_has(llm: LLM) -> None:
    engine = llm.engine
    request_id = engine.add_request(engine.tokenize(PROSE), SamplingParams(ignore_eos=True))
    for _ in range(5):
        engine.step()
    output = engine.abort(request_id)
    assert output is not None
    choice = output.choices[0]
    assert choice.finish_reason is FinishReason.ABORT
    assert len(choice.token_ids) == 5
    record = choice.routed_experts
    assert record is not None
    assert record.complete
    assert record.num_rows == len(output.prompt_token_ids) + 4
    assert engine.abort(request_id) is None
    engine.check_integrity()


def test_many_requests_of_mixed_length_leave_nothing_behind() -> None:
    draw = random.Random(0)
    llm = LLM("tiny", dtype="float32", num_blocks=512, max_num_seqs=64, max_model_len=256)
    prompts = [[draw.randrange(1, 2048) for _ in range(draw.randrange(1, 90))] for _ in range(256)]
    params = [SamplingParams(max_tokens=draw.randrange(1, 40)) for _ in prompts]
    outputs = llm.generate(prompts, params)
    assert len(outputs) == 256
    for output, prompt in zip(outputs, prompts, strict=True):
        record = output.choices[0].routed_experts
        assert record is not None
        assert record.complete
        assert record.num_rows == len(prompt) + len(output.choices[0].token_ids) - 1
    llm.check_integrity()
    usage = llm.engine.scheduler.ledger.usage()
    assert (usage.requests, usage.request_chunks) == (0, 0)
    assert llm.engine.scheduler.cache.pool.num_free == 512
    llm.engine.reset_prefix_cache()
    assert llm.engine.scheduler.ledger.usage().published == 0


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ("", {}, "the prompt is empty"),
        ([], {}, "the prompt is empty"),
        ([5] * 2048, {}, "2048 tokens; with max_model_len=2048 it may have 2047"),
        ([5, 2048], {}, "token id 2048 lies outside the vocabulary of 2048"),
        ([-1], {}, "token id -1 lies outside"),
        ([5], {"stop_token_ids": (9000,)}, "token id 9000 lies outside"),
        ([5, 6], {"routed_experts_prompt_start": 3}, "prompt_start=3 lies beyond the prompt of 2"),
    ],
)
def test_a_bad_prompt_is_named_and_nothing_is_queued(
    llm: LLM, prompt: object, params: dict[str, int], words: str
) -> None:
    with pytest.raises(RequestError, match=f"prompt 1: .*{words}"):
        llm.generate(["fine", prompt], [SamplingParams(), SamplingParams(**params)])  # type: ignore[arg-type, list-item]
    assert not llm.engine.has_work
    llm.check_integrity()


def test_a_model_without_tokenizer_takes_token_ids_only() -> None:
    model = AutoModelForCausalLM.from_pretrained(PATH)
    llm = LLM(model, dtype="float32")
    with pytest.raises(RequestError, match="no tokenizer; give token ids"):
        llm.generate("text")
    with pytest.raises(RequestError, match=r"stop=\['a'\] needs a tokenizer"):
        llm.generate([[5]], SamplingParams(stop="a"))
    assert llm.generate([[5]], SamplingParams(max_tokens=2))[0].choices[0].text == ""


@pytest.mark.parametrize("kind", [tuple, np.array, torch.tensor, lambda ids: [np.array(ids)]])
def test_token_ids_may_come_as_arrays(llm: LLM, kind: Callable[[list[int]], Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=2)
    (wanted,) = llm.generate([[5, 6, 7]], params)
    (output,) = llm.generate(kind([5, 6, 7]), params)
    assert output.prompt_token_ids == (5, 6, 7)
    assert output.choices[0].token_ids == wanted.choices[0].token_ids


@pytest.mark.parametrize("prompts", [[5.5, 6], [["5"]], [[1.0]], [None], 5, ["a", 6]])
def test_what_is_no_token_id_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match="prompt"):
        llm.generate(prompts)


def test_as_many_parameters_as_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 sampling parameters for 1 prompts"):
        llm.generate("a", [SamplingParams()] * 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_sizes": 4}, "unknown option 'block_sizes'; known: base_seed, block_size"),
        ({"block_size": 0}, "block_size=0 is too small"),
        ({"dtype": "float16"}, "dtype='float16' is not known; use one of auto, float32"),
        ({"max_model_len": 4096}, "max_model_len=4096 exceeds the model's limit of 2048"),
        ({"max_model_len": 512, "num_blocks": 4}, "needs more than 4 KV blocks of 16 tokens"),
        ({"kv_cache_gib": 1e-9}, "holds no KV block of"),
        ({"kv_cache_gib": float("nan")}, "kv_cache_gib=nan must be a number above 0"),
        ({"kv_cache_gib": float("inf")}, "kv_cache_gib=inf must be a number above 0"),
        ({"max_num_seqs": 99_999_999_999}, "max_num_seqs=99999999999 is too large"),
        ({"max_num_batched_tokens": 99_999_999_999}, "is too large; it must be at most 1048576"),
        ({"reference": True, "dtype": "bfloat16"}, "reference=True needs dtype='float32'"),
    ],
)
def test_options_that_cannot_work_are_named(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM("tiny", **options)


def test_an_unknown_model_says_where_it_was_sought(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ModelNotFoundError, match=r"holds no config.json"):
        LLM(str(tmp_path))


def test_the_reference_mode_widens_a_bfloat16_checkpoint() -> None:
    assert LLM("tiny", reference=True).engine.served.dtype == "float32"
    model = AutoModelForCausalLM.from_pretrained(PATH)
    with pytest.raises(
        ConfigError, match=r"needs float32 or float64, the model is in torch.bfloat16"
    ):
        LLM(model, reference=True)


def test_a_float16_model_is_refused_unless_cast() -> None:
    model = AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.float16)
    with pytest.raises(
        ConfigError, match=r"torch.float16, which is not served; use dtype='float32'"
    ):
        LLM(model)
