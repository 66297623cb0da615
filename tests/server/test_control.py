"""Pauses, aborts, new weights, tokens, health and metrics."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from routebook.engine.sampling_params import SamplingParams
from routebook.models import bundled_model_path
from routebook.routes import Origin, RoutedExperts
from routebook.routes.formats import get_format
from tests.server.conftest import PROMPT, running
from tests.server.events import join_choice

PATH = "/inference/v1/generate"
LONG = {"max_tokens": 200, "ignore_eos": True, "temperature": 0.0}


@pytest.fixture
def paused(http):
    """No step is planned, so that what is sent stays open; ends with the engine running."""
    http.post("/pause").raise_for_status()
    yield
    http.post("/resume").raise_for_status()


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory) -> Path:
    """The bundled model with other numbers."""
    path = tmp_path_factory.mktemp("other")
    model = AutoModelForCausalLM.from_pretrained(bundled_model_path("tiny"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.add_(noise * (0.3 * parameter.abs().mean()))
    model.save_pretrained(path)
    return path


def events_of(lines) -> list[dict]:
    texts = [line.removeprefix("data: ") for line in lines if line]
    return [json.loads(text) for text in texts if text != "[DONE]"]


def in_background(function, *args, **options):
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function, *args, **options)
    pool.shutdown(wait=False)
    return future


def wait_until(server, condition) -> None:
    done = threading.Event()

    async def look() -> None:
        import asyncio

        while not condition():
            await asyncio.sleep(0.005)
        done.set()

    server.run(look())
    assert done.wait(30)


def test_an_abort_answers_with_what_is_there(server, http, llm):
    prompt = llm.engine.tokenize(PROMPT)
    body = {
        "request_id": "mine",
        "token_ids": prompt,
        "sampling_params": LONG,
        "return_routed_experts": True,
        "stream": True,
    }
    with http.stream("POST", PATH, json=body) as answer:
        lines = answer.iter_lines()
        got = [next(lines) for _ in range(4)]
        with server.http() as other:
            asked = {"request_ids": ["generate-tokens-mine", "nobody's"]}
            other.post("/inference/v1/abort_requests", json=asked).raise_for_status()
        events = events_of([*got, *lines])
    assert events[-1]["choices"][0]["finish_reason"] == "abort"
    tokens, record = join_choice(events, 0, prompt, llm.schema)
    assert len(tokens) < 200
    assert record.stop == len(prompt) + len(tokens) - 1
    (whole,) = llm.generate([prompt], SamplingParams(**{**LONG, "max_tokens": len(tokens)}))
    assert (record.ids_TLK == whole.choices[0].routed_experts.ids_TLK).all()


def test_an_abort_of_a_request_that_has_not_begun(server, http, paused):
    body = {"request_id": "early", "token_ids": [5, 6, 7], "return_routed_experts": True}
    answer = in_background(http.post, PATH, json=body)
    wait_until(server, lambda: "early" in server.serving._jobs)
    with server.http() as other:
        other.post("/inference/v1/abort_requests", json={"request_ids": ["early"]})
    (choice,) = answer.result(30).raise_for_status().json()["choices"]
    assert (choice["finish_reason"], choice["token_ids"]) == ("abort", [])
    assert choice["routed_experts"] is None
    assert "rows are absent" in choice["routed_experts_error"]


def test_an_abort_ends_all_prompts_of_a_request(server, http, paused):
    body = {"request_id": "many", "prompt": ["1+1=", "2+2="]}
    answer = in_background(http.post, "/v1/completions", json=body)
    wait_until(server, lambda: server.client.num_open == 2)
    with server.http() as other:
        other.post("/inference/v1/abort_requests", json={"request_ids": ["many"]})
    choices = answer.result(30).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["abort", "abort"]


def test_a_request_id_is_taken_once(server, http, paused):
    body = {"request_id": "same", "token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 2}}
    first = in_background(http.post, PATH, json=body)
    wait_until(server, lambda: "same" in server.serving._jobs)
    with server.http() as other:
        for stream in (False, True):
            answer = other.post(PATH, json={**body, "stream": stream})
            assert answer.status_code == 400
            assert "request_id='same'" in answer.json()["error"]["message"]
        other.post("/resume")
    assert first.result(30).status_code == 200


def test_while_paused_requests_wait(server, http, paused):
    answer = in_background(http.post, PATH, json={"token_ids": [5], "sampling_params": LONG})
    wait_until(server, lambda: server.client.num_open == 1)
    assert not answer.done()
    with server.http() as other:
        other.post("/resume").raise_for_status()
    assert len(answer.result(30).json()["choices"][0]["token_ids"]) == 200


def test_a_pause_that_aborts_and_one_that_waits(server, http):
    body = {"token_ids": [5, 6], "sampling_params": LONG}
    for mode, reason in (("abort", "abort"), ("wait", "length")):
        answer = in_background(http.post, PATH, json=body)
        wait_until(server, lambda: server.client.num_open == 1)
        with server.http() as other:
            other.post("/pause", json={"mode": mode}).raise_for_status()
            assert answer.result(30).json()["choices"][0]["finish_reason"] == reason
            other.post("/resume").raise_for_status()


def test_kept_streams_have_rows_of_both_weights(server, http, llm, other_weights):
    prompt = llm.engine.tokenize(PROMPT)
    body = {
        "token_ids": prompt,
        "sampling_params": {**LONG, "max_tokens": 60},
        "return_routed_experts": True,
        "routed_experts_format": "frame",
        "stream": True,
    }
    with server.http() as other, http.stream("POST", PATH, json=body) as answer:
        lines = answer.iter_lines()
        got = [next(lines) for _ in range(6)]
        asked = {"model_path": str(other_weights), "mode": "keep"}
        version = other.post("/update_weights", json=asked).raise_for_status().json()
        events = events_of([*got, *lines])
        first = version["weight_version"]
        back = other.post("/update_weights", json={"model_path": "tiny"}).json()
    assert back["weight_version"] == first + 1
    records = [
        get_format("frame").decode(choice["routed_experts"], llm.schema, None)
        for event in events
        for choice in event["choices"]
    ]
    record = RoutedExperts.concat(records)
    tokens = [t for event in events for c in event["choices"] for t in c["token_ids"]]
    record.check_tokens([*prompt, *tokens])
    versions = [span.weight_version for span in record.provenance]
    assert versions == sorted(versions)
    assert set(versions) == {first - 1, first}
    (old,) = llm.generate([prompt], SamplingParams(**{**LONG, "max_tokens": 60}))
    changed = next(s.start for s in record.provenance if s.weight_version == first)
    kept = record.truncate(changed)
    assert (kept.ids_TLK == old.choices[0].routed_experts.truncate(changed).ids_TLK).all()


def test_an_update_that_waits_lets_streams_run_and_others_come_after(server, http, other_weights):
    """While the update waits, increments still arrive; what comes meanwhile is served by the new weights."""
    body = {
        "token_ids": [5, 6, 7],
        "sampling_params": {**LONG, "max_tokens": 60},
        "return_routed_experts": True,
        "routed_experts_format": "frame",
    }
    with (
        server.http() as a,
        server.http() as b,
        http.stream("POST", PATH, json={**body, "stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        got = [next(lines), next(lines)]
        asked = {"model_path": str(other_weights), "mode": "wait"}
        updated = in_background(a.post, "/update_weights", json=asked)
        wait_until(server, lambda: server.client._thread._when_idle)
        later = in_background(b.post, PATH, json=body)
        got += [next(lines) for _ in range(4)]
        assert not updated.done()
        events = events_of([*got, *lines])
        version = updated.result(60).json()["weight_version"]
        (after,) = later.result(60).json()["choices"]
        a.post("/update_weights", json={"model_path": "tiny"}).raise_for_status()
    assert len([t for e in events for c in e["choices"] for t in c["token_ids"]]) == 60
    read = get_format("frame").decode
    spans = [
        span
        for event in events
        for choice in event["choices"]
        for span in read(choice["routed_experts"], None, None).provenance
    ]
    assert {span.weight_version for span in spans} == {version - 1}
    assert {s.weight_version for s in read(after["routed_experts"], None, None).provenance} == {
        version
    }


def test_weights_that_are_not_there_change_nothing(http):
    before = http.get("/v1/models").json()["data"][0]["fingerprint"]
    answer = http.post("/update_weights", json={"model_path": "/nowhere"})
    assert answer.status_code == 400
    assert "/nowhere" in answer.json()["error"]["message"]
    assert http.get("/v1/models").json()["data"][0]["fingerprint"] == before


def test_a_reset_forgets_prefixes(http):
    body = {
        "token_ids": list(range(1, 40)),
        "sampling_params": {"max_tokens": 1},
        "return_routed_experts": True,
        "routed_experts_format": "frame",
    }

    def origins() -> set[Origin]:
        (choice,) = http.post(PATH, json=body).json()["choices"]
        record = get_format("frame").decode(choice["routed_experts"], None, None)
        return {span.origin for span in record.provenance}

    http.post("/reset_prefix_cache").raise_for_status()
    assert origins() == {Origin.PREFILL}
    assert Origin.PREFIX_CACHE in origins()
    http.post("/reset_prefix_cache").raise_for_status()
    assert origins() == {Origin.PREFILL}


def test_tokens_and_texts(http, llm):
    answer = http.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
    assert answer["tokens"] == llm.engine.tokenize(PROMPT)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 256
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": PROMPT}


@pytest.mark.parametrize(
    ("path", "body", "part"),
    [
        ("/tokenize", {}, "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user"}]}, "either prompt or messages"),
        ("/detokenize", {"tokens": [2048]}, "2048 lies outside"),
        ("/detokenize", {"tokens": [-1]}, "-1 lies outside"),
        ("/pause", {"mode": "soon"}, "mode"),
        ("/update_weights", {"model_path": ""}, "model_path"),
    ],
    ids=str,
)
def test_mistakes_are_named(http, path, body, part):
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert part in answer.json()["error"]["message"]


def test_metrics_count_what_was_done(http):
    def read() -> dict[str, float]:
        lines = http.get("/metrics").raise_for_status().text.splitlines()
        return {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
        }

    before = read()
    for stream in (False, True):
        body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4, "ignore_eos": True}}
        http.post(PATH, json={**body, "stream": stream})
    http.post("/v1/completions", json={"prompt": []})
    after = read()
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["routebook_prompt_tokens_total"] == 6
    assert grown["routebook_completion_tokens_total"] == 8
    assert grown['routebook_http_requests_total{path="/inference/v1/generate",status="200"}'] == 2
    assert grown['routebook_http_requests_total{path="/v1/completions",status="400"}'] == 1
    assert grown["routebook_generation_seconds_count"] == 2
    assert after["routebook_completions_open"] == 0


def test_a_failed_engine_is_told_by_health_and_refuses_work():
    with running(engine={"executor": "inline"}) as server, server.http() as http:
        assert http.get("/health").json() == {"status": "ok"}

        def break_worker(engine) -> None:
            def fail(step):
                from routebook.errors import WorkerError

                raise WorkerError("the worker broke")

            engine.executor.submit = fail

        server.run(server.client._call(break_worker))
        answer = http.post(PATH, json={"token_ids": [5]})
        assert answer.status_code == 500
        assert "the worker broke" in answer.json()["error"]["message"]
        stream = http.post(PATH, json={"token_ids": [5], "stream": True})
        refused = http.post(PATH, json={"token_ids": [5]})
        health = http.get("/health")
        for one in (stream, refused, health):
            assert one.status_code == 503
            assert one.json()["error"]["code"] == 503


def test_a_failure_in_the_middle_of_a_stream_is_an_event():
    with running(engine={"executor": "inline"}) as server, server.http() as http:
        body = {"token_ids": [5], "sampling_params": LONG, "stream": True}
        with http.stream("POST", PATH, json=body) as answer:
            lines = answer.iter_lines()
            got = [next(lines) for _ in range(3)]
            server.run(server.client._call(lambda engine: engine.shutdown()))
            got += list(lines)
        last = json.loads([line for line in got if line][-2].removeprefix("data: "))
        assert "shut down" in last["error"]["message"]
        assert [line for line in got if line][-1] == "data: [DONE]"


def test_requests_that_are_open_when_the_server_ends_get_an_answer():
    with running() as server, server.http() as http:
        http.post("/pause").raise_for_status()
        answer = in_background(http.post, PATH, json={"token_ids": [5]})
        wait_until(server, lambda: server.client.num_open == 1)
        server.run(server.client.aclose())
        assert answer.result(30).status_code == 500
        assert http.get("/health").status_code == 503
        assert http.post(PATH, json={"token_ids": [5]}).status_code == 503
