"""What is refused before it is queued."""

from __future__ import annotations

from collections.abc import Sequence

from routebook.engine.sampling_params import SamplingParams
from routebook.engine.served_model import ServedModel
from routebook.errors import RequestError, SchemaMismatchError, SpanError, UncapturableError
from routebook.ledger.recompute import EARLIEST
from routebook.routes import RoutedExperts


def check_request(
    served: ServedModel, token_ids: Sequence[int], params: SamplingParams, has_tokenizer: bool
) -> None:
    """Refuse what cannot be served.

    Raises:
        RequestError: an empty or too long prompt, a token id outside the vocabulary, a start beyond the prompt.
    """
    if not token_ids:
        raise RequestError("the prompt is empty; give at least one token")
    if len(token_ids) >= served.max_model_len:
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens; with max_model_len={served.max_model_len} it may have"
            f" {served.max_model_len - 1} at most"
        )
    vocabulary = range(served.vocab_size)
    wrong = next((t for t in (*token_ids, *params.stop_token_ids) if t not in vocabulary), None)
    if wrong is not None:
        raise RequestError(f"token id {wrong} lies outside the vocabulary of {served.vocab_size}")
    if params.routed_experts_prompt_start > len(token_ids):
        raise RequestError(
            f"routed_experts_prompt_start={params.routed_experts_prompt_start} lies beyond the prompt of"
            f" {len(token_ids)} tokens"
        )
    if params.stop and not has_tokenizer:
        raise RequestError(f"stop={list(params.stop)} needs a tokenizer, which the model has not")


def check_continuation(
    served: ServedModel,
    token_ids: Sequence[int],
    params: SamplingParams,
    earlier: RoutedExperts,
    forced: bool,
) -> None:
    """Refuse to continue a record that does not belong to these tokens, this model or these parameters.

    Raises:
        RecordError: the record is of another model or other tokens.
        RequestError: the parameters leave out rows that the record has.
        UncapturableError: on this model no route can be forced.
    """
    if earlier.schema != served.schema:
        raise SchemaMismatchError(f"the record has {earlier.schema}, the model {served.schema}")
    if earlier.stop > len(token_ids):
        raise SpanError(
            f"the record ends at position {earlier.stop}, the prompt has {len(token_ids)} tokens"
        )
    earlier.check_tokens(token_ids)
    if not params.routed_experts or params.routed_experts_prompt_start:
        raise RequestError(
            "a record is continued whole; leave routed_experts=True, routed_experts_prompt_start=0"
        )
    if forced and served.unforcible is not None:
        raise UncapturableError(served.unforcible)


def check_streaming(params: SamplingParams, recompute: str) -> None:
    """Refuse to hand out rows that a later run may still replace.

    Raises:
        RequestError: rows are asked for, and the engine takes the latest ones.
    """
    if params.routed_experts and recompute != EARLIEST:
        raise RequestError(
            f"recompute={recompute!r} may replace a row that a stream has handed out; ask for the whole answer, for"
            f" no rows, or run the engine with recompute={EARLIEST!r}"
        )
