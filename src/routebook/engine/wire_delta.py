"""Steps in messages: a plan by what differs from the one before, its results by what the plan does not say.

Most steps compute the next token of the same requests, so both sides remember the last plan, and a message names a
request by its place in it. A digest of the whole plan goes with the message: what the worker rebuilds must have it.

The worker's word on whose rows it made is a digest as well, which it takes over the batch that it laid out: request
ids, first positions and counts. The engine takes the same over its plan, and equal digests say that both speak of the
same rows; a batch in another order than the plan's is spelled out. Both digests hold the number of the step, which
each side counts for itself, so a message that was lost or came twice shows too.

Legend of shape suffixes: R = requests of the step.
"""

from __future__ import annotations

from dataclasses import fields
from hashlib import blake2b

import msgspec
import numpy as np

from routebook.engine.step import (
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    SideOutputs,
    TokenLogprobs,
)
from routebook.errors import WorkerError

_DIGEST_NBYTES = 8
_TOKEN = np.dtype("<i4")
_ENCODER = msgspec.msgpack.Encoder()


class RunStep(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Run a step; answered with `StepDone` or `OtherOrder`."""

    digest: bytes
    """Of the plan; see `plan_digest`."""
    step: SchedulerOutput


# Sent in every step, so every byte of a tag counts.
class ContinueStep(msgspec.Struct, frozen=True, tag="+", array_like=True):
    """Run a step that goes on from the one before: its requests, but for some that are gone, then others.

    A request that was there takes its next token, in the same run. Answered as `RunStep`.
    """

    digest: bytes
    """Of the whole plan; see `plan_digest`."""
    weight_version: int
    capture: bool
    gone: list[int]
    """Places, in the step before, of requests that this one has not."""
    added: dict[str, tuple[int, int, int]]
    """Requests that the step before has not: (first position, tokens, run)."""
    counts: dict[int, int]
    """Tokens of requests that were there, by their place in this step, where they are not one."""
    new_block_ids: dict[int, list[int]]
    """Blocks appended, by the request's place in this step."""
    new_requests: list[NewRequestData]
    dropped_request_ids: list[str]


class StepDone(msgspec.Struct, frozen=True, tag="=", array_like=True):
    """Results of a step whose batch had the order of the plan."""

    digest: bytes
    """Of the batch that ran; see `batch_digest`."""
    sampled: bytes
    """Next tokens, little-endian int32, in batch order."""
    unsampled: list[int]
    """Places in the batch of requests without a next token."""
    logprobs: dict[str, TokenLogprobs]
    side: SideOutputs


class OtherOrder(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Results of a step whose batch had another order than the plan."""

    output: ModelRunnerOutput


def _check_fields() -> None:
    """A field that is added to a step must be added to its messages."""
    plan = {field.name for field in fields(SchedulerOutput)}
    told = {"num_scheduled_tokens", "num_computed_tokens", "runs"}
    assert plan - told == set(ContinueStep.__struct_fields__) - {
        "digest",
        "gone",
        "added",
        "counts",
    }
    results = {field.name for field in fields(ModelRunnerOutput)}
    told = {"request_ids", "starts_R", "counts_R", "sampled_token_ids"}
    assert results - told == set(StepDone.__struct_fields__) - {"digest", "sampled", "unsampled"}


_check_fields()


class PlanWriter:
    """The engine's side: plans become messages, in the order in which they are sent."""

    def __init__(self) -> None:
        self.number = 0
        """Steps told so far."""
        self._last: SchedulerOutput | None = None

    def write(self, step: SchedulerOutput) -> RunStep | ContinueStep:
        """The message for the next step."""
        last, self._last = self._last, step
        self.number += 1
        digest = plan_digest(self.number, step)
        message = None if last is None else _difference(digest, last, step)
        return message or RunStep(digest, step)


class PlanReader:
    """The worker's side: messages become plans, in the order in which they come."""

    def __init__(self) -> None:
        self.number = 0
        """Steps heard of so far."""
        self._last: SchedulerOutput | None = None

    def read(self, message: RunStep | ContinueStep) -> SchedulerOutput:
        """The plan.

        Raises:
            WorkerError: it is not the one that the engine made.
        """
        self.number += 1
        if isinstance(message, RunStep):
            step = message.step
        elif self._last is None:
            raise WorkerError(f"step {self.number} goes on from a step that never came")
        else:
            step = _continued(self._last, message)
        if plan_digest(self.number, step) != message.digest:
            raise WorkerError(
                f"step {self.number} is not the one that the engine planned: it builds upon another"
                " step than the last one that came"
            )
        self._last = step
        return step


def write_output(
    number: int, step: SchedulerOutput, output: ModelRunnerOutput
) -> StepDone | OtherOrder:
    """The message with the results of a step.

    Args:
        number: of the step, as this side counts.
        step: the plan that came.
        output: what ran.
    """
    unsampled = [r for r, i in enumerate(output.request_ids) if i not in output.sampled_token_ids]
    sampled_ids = [i for i in output.request_ids if i in output.sampled_token_ids]
    in_order = output.request_ids == list(step.num_scheduled_tokens)
    if not in_order or sampled_ids != list(output.sampled_token_ids):
        return OtherOrder(output)
    return StepDone(
        digest=batch_digest(
            number, output.request_ids, output.starts_R.tolist(), output.counts_R.tolist()
        ),
        sampled=np.array(list(output.sampled_token_ids.values()), _TOKEN).tobytes(),
        unsampled=unsampled,
        logprobs=output.logprobs,
        side=output.side,
    )


def read_output(
    number: int, step: SchedulerOutput, message: StepDone | OtherOrder
) -> ModelRunnerOutput:
    """The results of a step.

    Args:
        number: of the step, as this side counts.
        step: the plan that was sent.
        message: the answer.

    Raises:
        WorkerError: the worker ran something else than the plan.
    """
    if isinstance(message, OtherOrder):
        return message.output
    request_ids = list(step.num_scheduled_tokens)
    starts = [step.num_computed_tokens[request_id] for request_id in request_ids]
    counts = list(step.num_scheduled_tokens.values())
    if batch_digest(number, request_ids, starts, counts) != message.digest:
        raise WorkerError(
            f"the worker ran another batch in step {number} than the {len(request_ids)} requests of its"
            " plan; nothing of it was taken over"
        )
    return ModelRunnerOutput(
        request_ids=request_ids,
        starts_R=np.array(starts, np.int64),
        counts_R=np.array(counts, np.int64),
        sampled_token_ids=_sampled(number, request_ids, message),
        logprobs=message.logprobs,
        side=message.side,
    )


def plan_digest(number: int, step: SchedulerOutput) -> bytes:
    """Eight bytes that tell this step from all others, but for what new requests bring with them."""
    return _digest(
        number,
        step.weight_version,
        step.capture,
        step.num_scheduled_tokens,
        step.num_computed_tokens,
        step.runs,
        step.new_block_ids,
        step.dropped_request_ids,
        [new.request_id for new in step.new_requests],
    )


def batch_digest(
    number: int, request_ids: list[str], starts: list[int], counts: list[int]
) -> bytes:
    """Eight bytes that tell whose rows a step made, and in which order."""
    return _digest(number, request_ids, starts, counts)


def _digest(*values: object) -> bytes:
    return blake2b(_ENCODER.encode(values), digest_size=_DIGEST_NBYTES).digest()


def _difference(digest: bytes, last: SchedulerOutput, step: SchedulerOutput) -> ContinueStep | None:
    """What tells `step` from `last`, or None if it does not go on from it."""
    counts, starts, runs = step.num_scheduled_tokens, step.num_computed_tokens, step.runs
    place_of = {request_id: place for place, request_id in enumerate(counts)}
    kept = [request_id for request_id in last.num_scheduled_tokens if request_id in counts]
    request_ids = list(counts)
    goes_on = request_ids[: len(kept)] == kept and step.new_block_ids.keys() <= counts.keys()
    if not goes_on or not all(
        starts[i] == last.num_computed_tokens[i] + last.num_scheduled_tokens[i]
        and runs[i] == last.runs[i]
        for i in kept
    ):
        return None
    return ContinueStep(
        digest=digest,
        weight_version=step.weight_version,
        capture=step.capture,
        gone=[place for place, i in enumerate(last.num_scheduled_tokens) if i not in counts],
        added={i: (starts[i], counts[i], runs[i]) for i in request_ids[len(kept) :]},
        counts={place: counts[i] for place, i in enumerate(kept) if counts[i] != 1},
        new_block_ids={place_of[i]: block_ids for i, block_ids in step.new_block_ids.items()},
        new_requests=step.new_requests,
        dropped_request_ids=step.dropped_request_ids,
    )


def _continued(last: SchedulerOutput, message: ContinueStep) -> SchedulerOutput:
    """The plan that goes on from `last`. Whether it is the right one is for the digest to say."""
    gone = set(message.gone)
    kept = [i for place, i in enumerate(last.num_scheduled_tokens) if place not in gone]
    counts = {i: message.counts.get(place, 1) for place, i in enumerate(kept)}
    starts = {i: last.num_computed_tokens[i] + last.num_scheduled_tokens[i] for i in kept}
    runs = {i: last.runs[i] for i in kept}
    for request_id, (start, count, run) in message.added.items():
        starts[request_id], counts[request_id], runs[request_id] = start, count, run
    request_ids = list(counts)
    # A place beyond the end names nobody: the plan then lacks these blocks, and its digest differs.
    named = {p: blocks for p, blocks in message.new_block_ids.items() if p < len(request_ids)}
    return SchedulerOutput(
        num_scheduled_tokens=counts,
        num_computed_tokens=starts,
        runs=runs,
        weight_version=message.weight_version,
        new_requests=message.new_requests,
        new_block_ids={request_ids[place]: blocks for place, blocks in named.items()},
        dropped_request_ids=message.dropped_request_ids,
        capture=message.capture,
    )


def _sampled(number: int, request_ids: list[str], message: StepDone) -> dict[str, int]:
    """Next token by request."""
    without = set(message.unsampled)
    sampled_ids = [i for place, i in enumerate(request_ids) if place not in without]
    token_ids = np.frombuffer(message.sampled, _TOKEN).tolist()
    if len(token_ids) != len(sampled_ids):
        raise WorkerError(
            f"the worker sampled {len(token_ids)} tokens for {len(sampled_ids)} requests in step {number}"
        )
    return dict(zip(sampled_ids, token_ids, strict=True))
