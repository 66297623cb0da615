"""The keeper without vLLM: what its scheduler says is made up here, and every row's ids say whose row it is.

Legend of shape suffixes: T = rows, L = MoE layers, K = top-k.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from routebook.errors import IntegrityError, LedgerError
from routebook.hosts.vllm.config import ASKED, HostConfig
from routebook.hosts.vllm.message import StepMessage, attach
from routebook.hosts.vllm.row_keeper import RowKeeper
from routebook.routes import RouteSchema

SCHEMA = RouteSchema(layer_ids=(1, 2), num_experts=200, top_k=2, num_hidden_layers=3)
SIZE = 4
"""Tokens per KV block."""


def row(tag: int, position: int) -> list[list[int]]:
    return [[tag, position], [position, tag]]


class FakeRequest:
    """As much of vLLM's request as the keeper looks at."""

    def __init__(self, request_id: str, prompt: list[int], **extra: Any) -> None:
        self.request_id = request_id
        self.tokens = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        start = extra.pop("start", None)
        self.sampling_params = SimpleNamespace(
            extra_args=extra or None, routed_experts_prompt_start=start
        )
        self.status = SimpleNamespace(name="RUNNING")

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        full = self.num_tokens // SIZE
        return [repr(self.tokens[: (i + 1) * SIZE]).encode() for i in range(full)]


class Engine:
    """Schedules what a test says."""

    def __init__(self, *, prefix_caching: bool = True, rows: str = "all") -> None:
        self.keeper = RowKeeper(
            HostConfig(rows=rows), block_size=SIZE, group=0, prefix_caching=prefix_caching
        )
        self.requests: dict[str, FakeRequest] = {}

    def add(self, request: FakeRequest) -> FakeRequest:
        self.requests[request.request_id] = request
        self.keeper.begin(request)
        return request

    def schedule(
        self,
        *parts: tuple[FakeRequest, int, list[int] | None],
        fresh: bool = False,
        resumed: bool = False,
        drafts: int = 0,
    ) -> Any:
        """Schedule tokens of requests with the blocks that each is given."""
        new, cached = [], []
        for request, _, blocks in parts:
            told = ([*(blocks or [])],) if blocks is not None else None
            entry = SimpleNamespace(
                req_id=request.request_id,
                block_ids=told,
                num_computed_tokens=request.num_computed_tokens,
            )
            (new if fresh else cached).append(entry)
        output = SimpleNamespace(
            total_num_scheduled_tokens=sum(n for _, n, _ in parts),
            num_scheduled_tokens={r.request_id: n for r, n, _ in parts},
            scheduled_spec_decode_tokens={
                r.request_id: [7] * drafts for r, _, _ in parts if drafts
            },
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[e.req_id for e in cached],
                new_block_ids=[e.block_ids for e in cached],
                num_computed_tokens=[e.num_computed_tokens for e in cached],
                resumed_req_ids={e.req_id for e in cached} if resumed else set(),
            ),
        )
        for request, count, _ in parts:
            request.num_computed_tokens += count
        self.keeper.plan(output)
        return output

    def finish_step(
        self,
        output: Any,
        sampled: dict[str, list[int]],
        rows: dict[str, list[Any]] | None,
        ended: tuple[str, ...] = (),
    ) -> tuple[dict[str, Any], list[str]]:
        """The step has run; rows by request, or None if the worker lost them. Returns rows handed out."""
        ids = list(output.num_scheduled_tokens)[::-1]
        runner = SimpleNamespace(req_ids=ids, sampled_token_ids=[sampled.get(i, []) for i in ids])
        if rows is not None:
            ids_TLK = np.array([r for i in ids for r in rows[i]], SCHEMA.dtype)
            attach(runner, StepMessage(schema=SCHEMA, ids_TLK=ids_TLK))
        stored = self.keeper.store(output, runner)
        outputs = []
        for request_id, tokens in sampled.items():
            if tokens and request_id in self.requests:
                self.requests[request_id].tokens += tokens
                outputs.append(SimpleNamespace(request_id=request_id, routed_experts=None))
        broken = self.keeper.deliver(output, outputs, stored)
        for request_id in ended:
            del self.requests[request_id]
        self.keeper.drop(self.requests, output.num_scheduled_tokens)
        return {o.request_id: o.routed_experts for o in outputs}, [o.request_id for o in broken]


def tags(rows_THK: Any) -> list[tuple[int, int]]:
    """Whose rows these are: tag and position. The dense layer must be zeros."""
    assert not rows_THK[:, 0].any()
    assert (rows_THK[:, 1] == rows_THK[:, 2, ::-1]).all()
    return [(int(a), int(b)) for a, b in rows_THK[:, 1]]


def prefilled(engine: Engine, name: str, tag: int, blocks: list[int], prompt: list[int]) -> Any:
    """A request whose prompt was computed, and what it got."""
    request = engine.add(FakeRequest(name, prompt))
    step = engine.schedule((request, len(prompt), blocks), fresh=True)
    rows = {name: [row(tag, p) for p in range(len(prompt))]}
    got, broken = engine.finish_step(step, {name: [50]}, rows)
    assert not broken
    return request, got[name]


def test_rows_come_with_the_tokens_that_make_them_final():
    engine = Engine()
    request, got = prefilled(engine, "a", 1, [3, 4], [5, 6, 7, 8, 9])
    assert tags(got) == [(1, p) for p in range(5)]
    step = engine.schedule((request, 1, None))
    got, _ = engine.finish_step(step, {"a": [51]}, {"a": [row(1, 5)]}, ended=("a",))
    assert tags(got["a"]) == [(1, 5)]
    engine.keeper.check_integrity()


def test_a_prompt_in_chunks_is_handed_out_when_its_first_token_is_there():
    engine = Engine()
    request = engine.add(FakeRequest("a", [5, 6, 7, 8, 9, 10], start=2))
    step = engine.schedule((request, 4, [1]), fresh=True)
    got, _ = engine.finish_step(step, {"a": []}, {"a": [row(1, p) for p in range(4)]})
    assert got == {}
    step = engine.schedule((request, 2, [2]))
    got, _ = engine.finish_step(step, {"a": [50]}, {"a": [row(1, 4), row(1, 5)]})
    assert tags(got["a"]) == [(1, p) for p in range(2, 6)]


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_rows_of_rejected_drafts_are_never_handed_out(accepted):
    engine = Engine()
    request, _ = prefilled(engine, "a", 1, [3, 4], [5, 6, 7, 8])
    step = engine.schedule((request, 3, [8]), drafts=2)
    rows = {"a": [row(1, 4), row(60, 5), row(61, 6)]}
    got, _ = engine.finish_step(step, {"a": [7] * accepted + [52]}, rows)
    assert [t for t, _ in tags(got["a"])] == [1, 60, 61][: 1 + accepted]
    request.num_computed_tokens -= 2 - accepted
    step = engine.schedule((request, 1, None))
    position = 5 + accepted
    got, _ = engine.finish_step(step, {"a": [53]}, {"a": [row(1, position)]})
    assert tags(got["a"]) == [(1, position)]
    assert request.num_tokens == 7 + accepted
    # A block with rejected rows in its past, and somebody who hits it.
    count = 9 - request.num_tokens
    step = engine.schedule((request, count, None))
    rows = {"a": [row(1, position + 1 + i) for i in range(count)]}
    engine.finish_step(step, {"a": [54] * count}, rows)
    hit = engine.add(FakeRequest("c", request.tokens))
    hit.num_computed_tokens = 8
    step = engine.schedule((hit, 1, [3, 4, 9]), fresh=True)
    got, _ = engine.finish_step(step, {"c": [50]}, {"c": [row(3, 8)]})
    expected = [1] * 5 + [60, 61][:accepted] + [1] * (3 - accepted) + [3]
    assert [t for t, _ in tags(got["c"])] == expected


def test_rows_are_told_apart_by_the_order_of_the_batch_that_ran():
    engine = Engine()
    a = engine.add(FakeRequest("a", [5, 6, 7]))
    b = engine.add(FakeRequest("b", [8, 9]))
    step = engine.schedule((a, 3, [1]), (b, 2, [2]), fresh=True)
    rows = {"a": [row(1, p) for p in range(3)], "b": [row(2, p) for p in range(2)]}
    got, _ = engine.finish_step(step, {"a": [50], "b": [51]}, rows)
    assert tags(got["a"]) == [(1, 0), (1, 1), (1, 2)]
    assert tags(got["b"]) == [(2, 0), (2, 1)]


def test_a_prefix_hit_has_the_rows_of_the_block_that_was_hit():
    """Two requests computed the same tokens, each in a block of its own; the hit is the second's."""
    engine = Engine()
    prompt = [5, 6, 7, 8, 9]
    prefilled(engine, "a", 1, [3, 4], prompt)
    prefilled(engine, "b", 2, [7, 8], prompt)
    hit = engine.add(FakeRequest("c", prompt))
    hit.num_computed_tokens = 4
    step = engine.schedule((hit, 1, [7, 9]), fresh=True)
    got, _ = engine.finish_step(step, {"c": [50]}, {"c": [row(3, 4)]})
    assert tags(got["c"]) == [(2, p) for p in range(4)] + [(3, 4)]


def test_rows_of_a_blocks_former_content_are_never_handed_out(caplog):
    """vLLM hits a block whose content the keeper does not know: the request is told that there is nothing."""
    engine = Engine()
    prompt = [5, 6, 7, 8, 9]
    prefilled(engine, "a", 1, [3, 4], prompt)
    prefilled(engine, "other", 2, [3, 5], [15, 16, 17, 18, 19])
    hit = engine.add(FakeRequest("c", prompt))
    hit.num_computed_tokens = 4
    step = engine.schedule((hit, 1, [3, 9]), fresh=True)
    got, broken = engine.finish_step(step, {"c": [50]}, {"c": [row(3, 4)]})
    assert got["c"] is None
    assert not broken
    assert "gets no rows" in caplog.text


def test_nothing_is_shared_after_a_reset():
    engine = Engine()
    prompt = [5, 6, 7, 8, 9]
    prefilled(engine, "a", 1, [3, 4], prompt)
    engine.keeper.reset()
    hit = engine.add(FakeRequest("c", prompt))
    hit.num_computed_tokens = 4
    step = engine.schedule((hit, 1, [3, 9]), fresh=True)
    got, _ = engine.finish_step(step, {"c": [50]}, {"c": [row(3, 4)]})
    assert got["c"] is None


def test_after_a_preemption_a_token_keeps_the_row_it_was_sampled_with():
    engine = Engine()
    request, got = prefilled(engine, "a", 1, [3, 4], [5, 6, 7, 8, 9])
    # Planned before the preemption, back after it, as with asynchronous scheduling.
    late = engine.schedule((request, 1, None))
    request.num_computed_tokens, request.num_preemptions = 0, 1
    got, _ = engine.finish_step(late, {"a": [51]}, {"a": [row(1, 5)]})
    assert tags(got["a"]) == [(1, 5)]
    again = engine.schedule((request, 7, [6, 7]), resumed=True)
    got, _ = engine.finish_step(again, {"a": [52]}, {"a": [row(9, p) for p in range(7)]})
    assert tags(got["a"]) == [(9, 6)]
    assert engine.keeper._late.ledger.read("a", 0, 7).ids_TLK[:, 0, 0].tolist() == [1] * 6 + [9]


def test_rows_that_vllm_throws_away_do_not_stand_for_the_token_that_is_sampled_anew():
    engine = Engine()
    request, _ = prefilled(engine, "a", 1, [3, 4], [5, 6, 7, 8, 9])
    late = engine.schedule((request, 1, None))
    engine.keeper.throw_away(["a"])
    request.num_computed_tokens, request.num_preemptions = 0, 1
    again = engine.schedule((request, 6, [6, 7]), resumed=True)
    engine.finish_step(late, {}, {"a": [row(1, 5)]})
    got, _ = engine.finish_step(again, {"a": [52]}, {"a": [row(9, p) for p in range(6)]})
    assert tags(got["a"]) == [(9, 5)]


def test_a_request_whose_rows_are_lost_midway_fails_and_others_go_on():
    engine = Engine()
    a, _ = prefilled(engine, "a", 1, [3, 4], [5, 6, 7, 8, 9])
    b, _ = prefilled(engine, "b", 2, [5, 6], [5, 6, 7, 8, 10])
    step = engine.schedule((a, 1, None))
    got, broken = engine.finish_step(step, {"a": [51]}, None)
    assert got["a"] is None
    assert broken == ["a"]
    step = engine.schedule((b, 1, None))
    got, broken = engine.finish_step(step, {"b": [51]}, {"b": [row(2, 5)]})
    assert tags(got["b"]) == [(2, 5)]
    assert not broken


def test_requests_that_decline_get_none_and_fill_blocks_for_those_who_ask():
    engine = Engine(rows=ASKED)
    prompt = [5, 6, 7, 8, 9]
    _, got = prefilled(engine, "a", 1, [3, 4], prompt)
    assert got is None
    hit = engine.add(FakeRequest("c", prompt, routed_experts=True))
    hit.num_computed_tokens = 4
    step = engine.schedule((hit, 1, [3, 9]), fresh=True)
    got, _ = engine.finish_step(step, {"c": [50]}, {"c": [row(3, 4)]})
    assert tags(got["c"]) == [(1, p) for p in range(4)] + [(3, 4)]


@pytest.mark.parametrize("wish", ["yes", 2, [1], 1.0])
def test_a_wish_that_is_neither_yes_nor_no_costs_one_request_its_rows(wish, caplog):
    engine = Engine()
    request = engine.add(FakeRequest("a", [5, 6], routed_experts=wish))
    step = engine.schedule((request, 2, [1]), fresh=True)
    got, _ = engine.finish_step(step, {"a": [50]}, {"a": [row(1, 0), row(1, 1)]})
    assert got["a"] is None
    assert repr(wish) in caplog.text


def test_a_worker_that_ran_something_else_is_noticed():
    engine = Engine()
    request = engine.add(FakeRequest("a", [5, 6, 7]))
    step = engine.schedule((request, 3, [1]), fresh=True)
    with pytest.raises(LedgerError, match="3 rows were planned, 2 came"):
        engine.finish_step(step, {"a": [50]}, {"a": [row(1, 0), row(1, 1)]})


def test_nothing_is_held_when_all_requests_have_left():
    engine = Engine()
    prefilled(engine, "a", 1, [3, 4], [5, 6, 7, 8, 9])
    prefilled(engine, "b", 2, [5, 6], [5, 6, 7, 8, 10])
    engine.requests.clear()
    engine.keeper.drop(engine.requests)
    engine.keeper.check_integrity()
    ledger = engine.keeper._late.ledger
    assert ledger.usage().requests == ledger.usage().request_chunks == 0
    ledger.begin("leak", 1)
    with pytest.raises(IntegrityError):
        engine.keeper.check_integrity()
