"""The three races of asynchronous scheduling, each with its guards in place and with one of them taken away.

Every scenario runs twice. With all guards, each row is the one that had to be. With one guard removed, the same check
finds wrong or missing rows, or the ledger refuses aloud: so the scenario is the race, and the guard is what wins it.

A step's rows are overwritten by the next step.
    The guard is `CaptureBuffer.snapshot`, which narrows into memory of its own. Both ledgers depend on it, as it comes
    before them. Removed, the rows of step N are those of step N + 1: in the caller's thread, in a thread of the
    worker's, and in a process, whose messages are sent from the memory where the rows lie.

A request is preempted by the plan of step N + 1, before the rows of step N are stored.
    `RequestLedger`: rows do not go with the blocks (removed: rows of the recomputation take their place). Late rows
    know their run (removed: they pass for the recomputation's, and whoever shares its block gets them). Nothing has to
    be done when late rows come: they go to chunks that are still the request's.
    `KVSlotLedger`: a snapshot before the blocks are freed, and `refresh_pending` after the next step was stored (either
    removed: rows of the recomputation take their place). Late rows know their run (removed: refused aloud, since the
    present run has no such block).

Freed blocks are used again before the rows are read.
    `RequestLedger`: cannot happen to a request's own rows, which stay until `release` whatever the blocks do; that is
    the guard of the second race, whose scenario also hands the blocks out. Its chunks are what could be used again: a
    sharer holds them by reference (removed: it reads a stranger's rows), and one that is handed out is blank (removed:
    an absent row reads as one of the chunk's last owner).
    `KVSlotLedger`: the snapshot, as above. A slot is tagged with the lease of its owner (removed: an absent row reads
    as one of the block's last owner). A record is made before anything else is planned (removed: rows are missing, as
    the tags say; with the tags removed as well they are those of the new owner). A sharer needs no guard of the ledger:
    it holds the KV block itself. That a late row is not written to a slot under an ended lease is a second line here:
    steps are stored in their order, so the row of the slot's new owner comes after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from routebook.engine import process_executor
from routebook.engine import scheduler as scheduler_module
from routebook.engine.config import LEDGERS
from routebook.engine.engine import Engine
from routebook.engine.executor import ThreadExecutor
from routebook.engine.llm import LLM
from routebook.engine.sampling_params import SamplingParams
from routebook.ledger.base import ReleaseReason, StepRows
from routebook.ledger.request_ledger import RequestLedger
from routebook.ledger.row_pool import RowPool
from routebook.ledger.slot_rows import RoutedExpertsManager
from routebook.ledger.snapshot_cache import RoutedExpertsCache
from tests.capture.recorder import ExpertsRecorder
from tests.engine.late_worker import ONE_BUFFER, take_snapshots_in_one_buffer
from tests.engine.races import (
    Race,
    aborted_in_the_blocks_of_another,
    overwritten_by_the_next_step,
    preempted_with_a_step_under_way,
    read_after_the_next_plan,
    shared_while_the_owner_goes,
)
from tests.families import SERVED

Patch = pytest.MonkeyPatch
WRONG_ROW = r"got    request (.*), position (\d+), forward (\d+), .*\n  wanted request"
ABSENT_ROW_INVENTED = r"got    request .*\n  wanted no row"
ROW_MISSING = r"got    no row\n  wanted request"


def one_snapshot_buffer(patch: Patch) -> None:
    """A snapshot is narrowed into memory that the next one takes too."""
    take_snapshots_in_one_buffer(patch.setattr)


def rows_go_with_the_blocks(patch: Patch) -> None:
    """A preempted request gives its rows up, as if they were the blocks'."""
    release = RequestLedger.release

    def giving_up(self: Any, request_id: str, reason: ReleaseReason) -> None:
        if reason is not ReleaseReason.PREEMPTED:
            release(self, request_id, reason)
            return
        row = self._table.row(request_id)
        prompt, run = int(self._table.prompt_N[row]), int(self._table.run_N[row])
        release(self, request_id, ReleaseReason.ABORTED)
        self.begin(request_id, prompt)
        self._table.run_N[self._table.row(request_id)] = run + 1

    patch.setattr(RequestLedger, "release", giving_up)


def late_rows_forget_their_run(patch: Patch) -> None:
    def runless(**step: Any) -> StepRows:
        return StepRows(**{**step, "runs_R": None})

    patch.setattr(scheduler_module, "StepRows", runless)


def no_snapshot_before_freeing(patch: Patch) -> None:
    patch.setattr(RoutedExpertsCache, "capture", lambda *_: None)


def no_refresh_after_storing(patch: Patch) -> None:
    patch.setattr(RoutedExpertsCache, "refresh_pending", lambda *_: None)


def chunks_keep_what_is_in_them(patch: Patch) -> None:
    """A chunk is handed out as its last owner left it."""

    def keeping(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, *args: Any) -> Any:
            before = self._origin_CB.copy()
            chunks = method(self, *args)
            known = np.atleast_1d(chunks)
            known = known[known < len(before)]
            self._origin_CB[known] = before[known]
            return chunks

        return wrapped

    for name in ("allocate", "allocate_one", "allocate_each"):
        patch.setattr(RowPool, name, keeping(getattr(RowPool, name)))


def sharers_hold_no_reference(patch: Patch) -> None:
    release = RowPool.release

    def tolerant(self: Any, chunks_C: np.ndarray) -> Any:
        return release(self, chunks_C[self.refs_C[chunks_C] > 0])

    patch.setattr(RowPool, "retain", lambda *_: None)
    patch.setattr(RowPool, "release", tolerant)


def tags_are_not_looked_at(patch: Patch) -> None:
    """A slot answers with what lies in it."""
    get = RoutedExpertsManager.get

    def unproven(self: Any, leases_M: np.ndarray, first_block: int) -> Any:
        ids_TLK, _, version_T = get(self, leases_M, first_block)
        blocks_M = leases_M & (2**32 - 1)
        return ids_TLK, self._origin_PB[blocks_M].reshape(-1), version_T

    patch.setattr(RoutedExpertsManager, "get", unproven)


@dataclass(frozen=True)
class Guard:
    """What keeps a ledger right in a scenario, and what the check says without it."""

    ledger: str
    scenario: Callable[[str], Race]
    remove: Callable[[Patch], None]
    words: str = WRONG_ROW


GUARDS = (
    *(Guard(ledger, overwritten_by_the_next_step, one_snapshot_buffer) for ledger in LEDGERS),
    Guard("request", preempted_with_a_step_under_way, rows_go_with_the_blocks),
    Guard("request", preempted_with_a_step_under_way, late_rows_forget_their_run),
    Guard("slot", preempted_with_a_step_under_way, no_snapshot_before_freeing),
    Guard("slot", preempted_with_a_step_under_way, no_refresh_after_storing),
    Guard(
        "slot",
        preempted_with_a_step_under_way,
        late_rows_forget_their_run,
        words=r"^block \d+ of '1.0' is not in its table of 0 blocks",
    ),
    Guard("request", shared_while_the_owner_goes, sharers_hold_no_reference),
    Guard(
        "request",
        aborted_in_the_blocks_of_another,
        chunks_keep_what_is_in_them,
        words=ABSENT_ROW_INVENTED,
    ),
    Guard(
        "slot",
        aborted_in_the_blocks_of_another,
        tags_are_not_looked_at,
        words=ABSENT_ROW_INVENTED,
    ),
)


@pytest.mark.parametrize(
    "guard", GUARDS, ids=lambda g: f"{g.ledger}-{g.scenario.__name__}-{g.remove.__name__}"
)
def test_a_guard_wins_its_race(guard: Guard, monkeypatch: Patch) -> None:
    assert guard.scenario(guard.ledger).faults == []
    guard.remove(monkeypatch)
    faults = guard.scenario(guard.ledger).faults
    assert any(re.search(guard.words, fault) for fault in faults), faults


@pytest.mark.parametrize("ledger", LEDGERS)
def test_a_sharer_keeps_its_rows_when_their_owner_goes(ledger: str) -> None:
    assert shared_while_the_owner_goes(ledger).faults == []


def test_a_record_is_made_before_anything_else_is_planned(monkeypatch: Patch) -> None:
    """The scenario is the removal of this guard: `Race.step`, like the engine, reads as soon as a request has ended."""
    assert read_after_the_next_plan("request").faults == []
    missing = read_after_the_next_plan("slot").faults
    assert any(re.search(ROW_MISSING, fault) for fault in missing), missing
    tags_are_not_looked_at(monkeypatch)
    swapped = read_after_the_next_plan("slot").faults
    assert any(
        re.search(r"got    request 1.0, .*\n  wanted request 0.0", fault) for fault in swapped
    )


PROMPTS = [[7, 3, 11, 5, 19, 2, 23, 29], [31, 8, 4]]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
FAMILY = SERVED["qwen3_moe"]


def num_wrong_rows(llm: LLM) -> int:
    """Rows that differ from those of a plain forward of transformers over the same tokens."""
    model = FAMILY.build(torch.float64)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    wrong = 0
    for output in llm.generate(PROMPTS, PARAMS):
        record = output.choices[0].routed_experts
        assert record is not None
        assert record.complete
        tokens = [*output.prompt_token_ids, *output.choices[0].token_ids]
        recorder = ExpertsRecorder()
        with torch.inference_mode(), recorder.recording(model):
            model(input_ids=torch.tensor([tokens[:-1]]), use_cache=False)
        wrong += int((record.ids_TLK != recorder.rows.numpy()).any(axis=(1, 2)).sum())
    return wrong


def take_results_when_all_steps_have_run(patch: Patch) -> None:
    """A step's results are looked at when the thread has run all that are in flight."""
    take_results = Engine._take_results

    def late(self: Any) -> None:
        wait([step.launched for _, step in self._in_flight])
        take_results(self)

    patch.setattr(Engine, "_take_results", late)


@pytest.mark.parametrize("ledger", LEDGERS)
@pytest.mark.parametrize("steps_in_flight", [2, 3])
@pytest.mark.parametrize("executor", ["inline", "thread"])
def test_later_steps_do_not_touch_rows_in_this_process(
    executor: str, steps_in_flight: int, ledger: str, monkeypatch: Patch
) -> None:
    llm = LLM(
        FAMILY.build(torch.float64),
        device="cpu",
        executor=executor,
        max_steps_in_flight=steps_in_flight,
        ledger=ledger,
    )
    if executor == "thread":
        assert isinstance(llm.engine.executor, ThreadExecutor)
        take_results_when_all_steps_have_run(monkeypatch)
    assert num_wrong_rows(llm) == 0
    llm.engine.reset_prefix_cache()
    one_snapshot_buffer(monkeypatch)
    assert num_wrong_rows(llm) > 0
    llm.shutdown()


@pytest.mark.parametrize("guarded", [True, False])
def test_later_steps_do_not_touch_rows_in_a_process(
    guarded: bool, tmp_path: Path, monkeypatch: Patch
) -> None:
    """The worker sends a step's rows from where they lie, and here not before two more steps have run."""
    FAMILY.build(torch.float64).save_pretrained(tmp_path)
    monkeypatch.setattr(process_executor, "_PROGRAM", "tests.engine.late_worker")
    if not guarded:
        monkeypatch.setenv(ONE_BUFFER, "1")
    llm = LLM(
        str(tmp_path),
        dtype="float64",
        device="cpu",
        executor="process",
        max_steps_in_flight=3,
    )
    wrong = num_wrong_rows(llm)
    llm.shutdown()
    assert (wrong == 0) == guarded
