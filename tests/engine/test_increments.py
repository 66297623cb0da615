"""Increments of a stream, joined, are the completion that a caller gets who does not read along."""

from __future__ import annotations

from collections import defaultdict

import pytest

from routebook.engine.config import EngineConfig
from routebook.engine.detokenizer import Detokenizer
from routebook.engine.engine import Engine, PauseMode
from routebook.engine.increments import Increment
from routebook.engine.llm import LLM
from routebook.engine.outputs import RequestOutput
from routebook.engine.request import FinishReason
from routebook.engine.sampling_params import SamplingParams
from routebook.errors import RequestError
from routebook.routes import RoutedExperts

# Bitwise the same however requests are batched, so that two runs can be compared.
OPTIONS = {"dtype": "float32", "reference": True}
PROMPTS = ("12+34=46\n50+27=77\n8+5=13\n17+25=", "12+34=46\n50+27=77\n8+5=13\n40+41=", "7+8=")


def make_engine(**options) -> Engine:
    return Engine("tiny", EngineConfig.from_options(**OPTIONS, **options))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine()


@pytest.fixture(autouse=True)
def idle_after(engine):
    yield
    assert not engine.has_work
    engine.check_integrity()


def run_streamed(engine, prompts, params, every=1, **options) -> list[list[Increment]]:
    """Increments of each prompt, taken after every `every`-th step."""
    ids = [
        engine.add_request(engine.tokenize(p), params, streamed=True, **options) for p in prompts
    ]
    taken: dict[str, list[Increment]] = defaultdict(list)
    steps = 0
    while engine.has_work:
        assert engine.step() == []
        steps += 1
        for request_id in ids if steps % every == 0 else ():
            taken[request_id] += engine.take_increments(request_id)
    for request_id in ids:
        taken[request_id] += engine.take_increments(request_id)
        assert engine.take_increments(request_id) == []
    return [taken[request_id] for request_id in ids]


def run_whole(engine, prompts, params) -> list[RequestOutput]:
    ids = [engine.add_request(engine.tokenize(prompt), params) for prompt in prompts]
    outputs = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
    return [outputs[request_id] for request_id in ids]


def joined(increments: list[Increment], index: int = 0) -> dict:
    """One completion of a stream, as the fields of a whole one."""
    parts = [one for one in increments if one.index == index]
    assert [one.finish_reason is not None for one in parts] == [False] * (len(parts) - 1) + [True]
    records = [one.routed_experts for one in parts if one.routed_experts is not None]
    logprobs = None if parts[0].logprobs is None else sum((one.logprobs for one in parts), ())
    return {
        "token_ids": sum((one.token_ids for one in parts), ()),
        "text": "".join(one.text for one in parts),
        "logprobs": logprobs,
        "finish_reason": parts[-1].finish_reason,
        "stop_reason": parts[-1].stop_reason,
        "routed_experts": RoutedExperts.concat(records) if records else None,
    }


def fields(choice) -> dict:
    names = ("token_ids", "text", "logprobs", "finish_reason", "stop_reason", "routed_experts")
    return {name: getattr(choice, name) for name in names}


@pytest.mark.parametrize("every", [1, 3, 1000])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5, "logprobs": 2},
        {"temperature": 0.0, "routed_experts_prompt_start": 2},
        {"temperature": 0.0, "routed_experts_prompt_start": 4, "max_tokens": 1},
        {"temperature": 0.0, "routed_experts": False},
        {"temperature": 1.5, "seed": 7, "stop": ("\n5", "zzz")},
        {"temperature": 1.5, "seed": 7, "stop": ("3\n5", "\n58"), "stop_token_ids": (11,)},
        {"temperature": 2.5, "seed": 3, "max_tokens": 40, "ignore_eos": True},
    ],
    ids=str,
)
def test_joined_increments_are_the_whole_completion(engine, params, every):
    wanted = SamplingParams(**{"max_tokens": 12, **params})
    whole = run_whole(engine, PROMPTS, wanted)
    engine.reset_prefix_cache()
    streams = run_streamed(engine, PROMPTS, wanted, every)
    engine.reset_prefix_cache()
    for output, increments in zip(whole, streams, strict=True):
        assert joined(increments) == fields(output.choices[0])


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("ledger", ["request", "slot"])
def test_preemption_and_steps_in_flight_lose_no_row(depth, ledger):
    # Room for hardly more than one of the three.
    tight = make_engine(
        num_blocks=6, block_size=8, ledger=ledger, max_steps_in_flight=depth, prefix_caching=False
    )
    wanted = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    streams = run_streamed(tight, PROMPTS, wanted)
    assert tight.scheduler.num_preemptions
    roomy = make_engine(prefix_caching=False)
    for output, increments in zip(run_whole(roomy, PROMPTS, wanted), streams, strict=True):
        found, expected = joined(increments), fields(output.choices[0])
        same = ("token_ids", "text", "finish_reason")
        assert [found[name] for name in same] == [expected[name] for name in same]
        assert found["routed_experts"].complete
        assert (found["routed_experts"].ids_TLK == expected["routed_experts"].ids_TLK).all()
    tight.check_integrity()
    tight.shutdown()


def test_several_completions_send_equal_prompt_rows_once(engine):
    wanted = SamplingParams(n=3, max_tokens=6, temperature=1.0, seed=1, ignore_eos=True)
    (whole,) = run_whole(engine, PROMPTS[:1], wanted)
    (increments,) = run_streamed(engine, PROMPTS[:1], wanted)
    num_prompt_tokens = len(whole.prompt_token_ids)
    first = joined(increments, 0)["routed_experts"]
    assert first.start == 0
    for choice in whole.choices[1:]:
        record = joined(increments, choice.index)["routed_experts"]
        assert record.start == num_prompt_tokens
        rest = choice.routed_experts.slice(num_prompt_tokens, choice.routed_experts.stop)
        assert record == rest
        assert (
            first.ids_TLK[:num_prompt_tokens] == choice.routed_experts.ids_TLK[:num_prompt_tokens]
        ).all()


def test_prompt_rows_that_differ_are_not_left_out(engine, monkeypatch):
    from routebook.engine import increments as module

    monkeypatch.setattr(module, "_digest", lambda rows, num_rows: None)
    wanted = SamplingParams(n=2, max_tokens=3, temperature=0.0, ignore_eos=True)
    (increments,) = run_streamed(engine, PROMPTS[:1], wanted)
    assert joined(increments, 1)["routed_experts"].start == 0


def test_rows_that_may_be_replaced_are_not_streamed():
    llm = LLM("tiny", dtype="float32", recompute="latest")
    with pytest.raises(RequestError, match="may replace a row that a stream has handed out"):
        llm.engine.add_request([5, 6], SamplingParams(), streamed=True)
    llm.engine.add_request([5, 6], SamplingParams(routed_experts=False), streamed=True)
    llm.engine.add_request([5, 6], SamplingParams())


def test_an_abort_ends_the_stream_with_what_is_known(engine):
    wanted = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
    request_id = engine.add_request(engine.tokenize(PROMPTS[0]), wanted, streamed=True)
    taken = []
    for _ in range(5):
        engine.step()
        taken += engine.take_increments(request_id)
    engine.step()
    assert engine.abort(request_id) is None
    taken += engine.take_increments(request_id)
    found = joined(taken)
    assert found["finish_reason"] is FinishReason.ABORT
    record = found["routed_experts"]
    assert record.stop == len(engine.tokenize(PROMPTS[0])) + len(found["token_ids"]) - 1
    assert record.complete
    assert engine.take_increments(request_id) == []


def test_an_abort_before_the_first_step_has_no_rows(engine):
    wanted = SamplingParams(max_tokens=5)
    request_id = engine.add_request(engine.tokenize("7"), wanted, streamed=True)
    engine.abort(request_id)
    (only,) = engine.take_increments(request_id)
    assert (only.finish_reason, only.token_ids) == (FinishReason.ABORT, ())
    assert only.routed_experts.num_rows == 0


def test_a_pause_that_aborts_ends_streams(engine):
    request_id = engine.add_request([5, 6], SamplingParams(max_tokens=5), streamed=True)
    engine.step()
    engine.pause(PauseMode.ABORT)
    assert engine.take_increments(request_id)[-1].finish_reason is FinishReason.ABORT
    engine.resume()


def test_nothing_is_kept_of_a_forgotten_stream(engine):
    request_id = engine.add_request([5, 6], SamplingParams(max_tokens=1), streamed=True)
    while engine.has_work:
        engine.step()
    engine.forget([request_id])
    assert engine.take_increments(request_id) == []


def test_a_continued_completion_streams_its_old_rows_first(engine):
    tokens = engine.tokenize(PROMPTS[0])
    wanted = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    (whole,) = run_whole(engine, PROMPTS[:1], wanted)
    engine.reset_prefix_cache()
    earlier = whole.choices[0].routed_experts.truncate(len(tokens) + 3)
    known = [*tokens, *whole.choices[0].token_ids[:4]]
    rest = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    request_id = engine.add_request(known, rest, earlier=earlier, streamed=True)
    taken = []
    while engine.has_work:
        engine.step()
        taken += engine.take_increments(request_id)
    found = joined(taken)
    assert found["token_ids"] == whole.choices[0].token_ids[4:]
    assert found["routed_experts"].truncate(earlier.stop) == earlier
    assert (found["routed_experts"].ids_TLK == whole.choices[0].routed_experts.ids_TLK).all()


def test_text_that_may_be_cut_off_is_held_back(engine):
    """Every piece of text must be final: a stop text may begin in it, and never comes."""
    wanted = SamplingParams(
        max_tokens=30, temperature=1.5, seed=11, stop=("\n5678", "3\n5999"), ignore_eos=True
    )
    (increments,) = run_streamed(engine, PROMPTS[:1], wanted)
    (whole,) = run_whole(engine, PROMPTS[:1], wanted)
    text = ""
    for increment in increments:
        text += increment.text
        assert whole.choices[0].text.startswith(text)
    assert text == whole.choices[0].text


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
def test_stop_texts_are_kept_on_request(engine, streamed, keeps):
    wanted = SamplingParams(
        max_tokens=12, temperature=0.0, stop=("2\n",), include_stop_text=keeps, ignore_eos=True
    )
    if streamed:
        (increments,) = run_streamed(engine, PROMPTS[:1], wanted)
        found = joined(increments)
    else:
        found = fields(run_whole(engine, PROMPTS[:1], wanted)[0].choices[0])
    assert found["stop_reason"] == "2\n"
    assert found["text"] == ("42\n" if keeps else "4")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("stop", [(), ("zzz",)])
@pytest.mark.parametrize("keeps", [False, True])
def test_the_end_of_sequence_token_is_text_on_request_only(engine, keeps, stop, streamed):
    prompt = ["7+8=15"]
    plain = SamplingParams(max_tokens=6, temperature=0.0)
    # Whatever the model says: its next token counts as the end of the sequence.
    first = run_whole(engine, prompt, plain)[0].choices[0].token_ids[0]
    written = engine.tokenizer.decode([first])
    assert written
    eos = engine.scheduler.eos_token_ids
    engine.scheduler.eos_token_ids = frozenset({first})
    wanted = SamplingParams(max_tokens=6, temperature=0.0, stop=stop, include_stop_text=keeps)
    try:
        if streamed:
            (increments,) = run_streamed(engine, prompt, wanted)
            found = joined(increments)
        else:
            found = fields(run_whole(engine, prompt, wanted)[0].choices[0])
    finally:
        engine.scheduler.eos_token_ids = eos
    assert (found["finish_reason"], found["stop_reason"]) == (FinishReason.STOP, None)
    assert found["token_ids"] == (first,)
    assert found["text"] == (written if keeps else "")


@pytest.mark.parametrize("skips", [False, True])
def test_special_tokens_are_text_on_request(engine, skips):
    (special,) = engine.tokenizer.all_special_ids
    tokens = [*engine.tokenize("7+8"), special, *engine.tokenize("=1")]
    params = SamplingParams(skip_special_tokens=skips)
    stream = Detokenizer(engine.tokenizer, params, streamed=True)
    pieces = []
    for token in tokens:
        stream.add(token)
        pieces.append(stream.take())
    text = "7+8=1" if skips else "7+8<|endoftext|>=1"
    assert "".join([*pieces, stream.take_rest(tokens)]) == text
    assert Detokenizer(engine.tokenizer, params).text(tokens) == text


def test_prompts_of_another_salt_share_nothing(engine):
    wanted = SamplingParams(max_tokens=1, temperature=0.0)
    tokens = engine.tokenize(PROMPTS[0])

    def origins(salt: str) -> set[str]:
        engine.add_request(tokens, wanted, cache_salt=salt)
        outputs: list[RequestOutput] = []
        while engine.has_work:
            outputs += engine.step()
        record = outputs[0].choices[0].routed_experts
        return {span.origin.name for span in record.provenance}

    engine.reset_prefix_cache()
    assert origins("a") == {"PREFILL"}
    assert origins("b") == {"PREFILL"}
    assert origins("") == {"PREFILL"}
    assert "PREFIX_CACHE" in origins("a")
    assert "PREFIX_CACHE" in origins("")


@pytest.mark.parametrize(
    ("stop", "pieces"),
    [
        ("2\n5", ["4", "", "", ""]),
        ("2\n9", ["4", "", "", "2\n5"]),
        ("zz", ["4", "2", "\n", "5"]),
        ("42\n", ["", "", "", ""]),
        ("5", ["4", "2", "\n", ""]),
    ],
)
def test_what_may_be_the_beginning_of_a_stop_text_waits(engine, stop, pieces):
    params = SamplingParams(stop=(stop,))
    stream = Detokenizer(engine.tokenizer, params, streamed=True)
    tokens = engine.tokenize("42\n5")
    assert len(tokens) == 4
    taken, stopped = [], None
    for token in tokens:
        # Nothing is generated behind a stop text.
        stopped = stopped or stream.add(token)
        taken.append(stream.take())
    assert taken == pieces
    assert "".join([*taken, stream.take_rest(tokens)]) == stream.text(tokens)
