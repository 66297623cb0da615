"""Answers without JSON: binary frames of samples, one per completion, one after the other."""

from __future__ import annotations

from collections.abc import Iterator

from routebook.client.assembly import Request
from routebook.client.outputs import Choice, Generation
from routebook.client.wire import parse
from routebook.errors import (
    DamagedError,
    FormatError,
    SchemaMismatchError,
    SpanError,
    TruncatedError,
)
from routebook.routes import RouteSample, decode_frame
from routebook.routes.frame import PREAMBLE_NBYTES, frame_nbytes


def read_generation(request: Request, body: bytes) -> Generation:
    """The generation in a body of frames.

    Raises:
        FormatError: the body is not frames of the completions that were asked for.
        SpanError: other positions than those that were asked for.
        RecordError: rows of other tokens or of another model.
    """
    samples = list(_samples(body))
    if len(samples) != request.params.n:
        raise FormatError(
            f"{len(samples)} completions came, but n={request.params.n} were asked for"
        )
    choices = sorted((_choice(request, sample) for sample in samples), key=lambda one: one.index)
    if [choice.index for choice in choices] != list(range(request.params.n)):
        raise FormatError("a completion came twice")
    return Generation(
        request_id=samples[0].meta.get("request_id", request.request_id),
        prompt_token_ids=request.prompt_token_ids,
        choices=tuple(choices),
    )


def _samples(body: bytes) -> Iterator[RouteSample]:
    at = 0
    view = memoryview(body)
    while at < len(body):
        nbytes = frame_nbytes(view[at : at + PREAMBLE_NBYTES])
        if nbytes > len(body) - at:
            raise TruncatedError(f"a frame takes {nbytes} bytes, but {len(body) - at} came")
        sample = decode_frame(view[at : at + nbytes])
        if not isinstance(sample, RouteSample):
            raise FormatError("a frame holds bare rows, where a completion with its tokens must be")
        yield sample
        at += nbytes


def _choice(request: Request, sample: RouteSample) -> Choice:
    record, meta = sample.record, sample.meta
    if tuple(sample.prompt_token_ids.tolist()) != request.prompt_token_ids:
        raise FormatError("a completion of another prompt came")
    if request.schema is not None and record.schema != request.schema:
        raise SchemaMismatchError(f"rows of {record.schema} came, not of {request.schema}")
    first = request.params.routed_experts_prompt_start
    num_tokens = len(sample.token_ids)
    has_rows = bool(record.num_rows) or num_tokens > sample.num_prompt_tokens
    if has_rows and (record.start, record.stop) != (first, num_tokens - 1):
        raise SpanError(
            f"rows of positions [{record.start}, {record.stop}) came, where those of "
            f"[{first}, {num_tokens - 1}) should be"
        )
    try:
        index = int(meta["index"])
        finish_reason = meta["finish_reason"]
    except (KeyError, ValueError) as error:
        raise DamagedError(f"a completion lacks its index or finish_reason: {meta}") from error
    return Choice(
        index=index,
        text=meta.get("text", "") if request.has_text else None,
        token_ids=tuple(sample.sampled_token_ids.tolist()),
        finish_reason=finish_reason,
        stop_reason=parse(meta.get("stop_reason", "null").encode(), int | str | None),
        logprobs=parse(meta.get("logprobs", "null").encode(), dict | None),
        routed_experts=record if has_rows else None,
    )
