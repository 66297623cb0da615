"""What became known of a completion since the last time that somebody asked.

A row at position `p` is final once the token at `p + 1` is known: it will be handed out as it is. The increments of a
completion follow each other without gap or overlap, so joined they are the completion that a caller who does not
read along gets at its end. Nothing is computed or copied for a completion before it is asked for: who reads
slowly gets fewer and larger increments, and the rows wait where they are kept anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

from routebook.engine.detokenizer import Detokenizer
from routebook.engine.record_builder import first_row, join_rows, last_row, read_rows
from routebook.engine.request import FinishReason, Request, RequestStatus
from routebook.engine.step import TokenLogprobs
from routebook.ledger import Ledger
from routebook.ledger.base import RowRange
from routebook.routes import RoutedExperts, RouteSchema
from routebook.routes.provenance import ABSENT
from routebook.routes.token_hash import Hashes, token_hashes


class IncrementRows:
    """Rows taken out of the ledger; the thread that wants the record makes it, while the engine goes on.

    Args:
        schema: the model's.
        rows: the rows.
        prefix_hash: hash of the tokens before them.
        token_hash_T: hashes of their tokens.
    """

    def __init__(
        self, schema: RouteSchema, rows: RowRange, prefix_hash: int, token_hash_T: Hashes
    ) -> None:
        self._parts = (schema, rows, prefix_hash, token_hash_T)

    @cached_property
    def record(self) -> RoutedExperts:
        """The rows with what is known of them."""
        return join_rows(*self._parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Increment:
    """The news of one completion."""

    index: int
    """Which of the prompt's completions."""
    token_ids: tuple[int, ...]
    """Tokens that were generated."""
    text: str
    """Text that follows; it may lag behind the tokens, by a stop text that could begin or an unfinished character."""
    logprobs: tuple[TokenLogprobs, ...] | None
    """One per token, if asked for."""
    rows: IncrementRows | None
    """What `routed_experts` is made of."""
    finish_reason: FinishReason | None
    """None as long as more follows."""
    stop_reason: int | str | None

    @property
    def routed_experts(self) -> RoutedExperts | None:
        """Rows that became final, if asked for and there are some; of a completion without any, the last increment has
        an empty record. The first increment that has rows begins with those of the prompt. Where a prompt has several
        completions, those with an index above 0 leave out prompt rows of the same ids as the first completion's, so
        that their first position tells what is shared.
        """
        return None if self.rows is None else self.rows.record


@dataclass(slots=True)
class SharedPrompt:
    """The prompt rows that the first completion has handed out, by which the others see whether theirs are equal."""

    digest: bytes | None = None


class CompletionStream:
    """How much of one completion has been handed out.

    Args:
        index: which of the prompt's completions.
        detokenizer: makes its text, None without a tokenizer.
        shared: what the first completion of the same prompt has handed out.
    """

    def __init__(self, index: int, detokenizer: Detokenizer | None, shared: SharedPrompt) -> None:
        self._index = index
        self._detokenizer = detokenizer
        self._shared = shared
        self._num_tokens = 0
        self._next_row: int | None = None
        self._has_told_rows = False
        self._hash = 0

    def take(self, ledger: Ledger, request: Request) -> Increment | None:
        """The news of a completion that the scheduler knows; None if there are none."""
        is_finished = request.status is RequestStatus.FINISHED
        done, total = self._num_tokens, request.num_tokens - request.num_prompt_tokens
        if total == done and not is_finished:
            return None
        self._num_tokens = total
        at = request.num_prompt_tokens + done
        return Increment(
            index=self._index,
            token_ids=tuple(request.token_ids[at:]),
            text=self._take_text(request, is_finished),
            logprobs=None if request.params.logprobs is None else tuple(request.logprobs[done:]),
            rows=self._take_rows(ledger, request),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )

    def _take_text(self, request: Request, is_finished: bool) -> str:
        if self._detokenizer is None:
            return ""
        if is_finished:
            return self._detokenizer.take_rest(request.text_token_ids)
        return self._detokenizer.take()

    def _take_rows(self, ledger: Ledger, request: Request) -> IncrementRows | None:
        if not request.params.routed_experts:
            return None
        if self._next_row is None:
            rows = self._begin(ledger, request)
        else:
            rows = read_rows(ledger, request, self._next_row, last_row(request))
        self._next_row = rows.start + len(rows.ids_TLK)
        is_finished = request.status is RequestStatus.FINISHED
        if self._next_row == rows.start and (self._has_told_rows or not is_finished):
            return None
        self._has_told_rows = True
        token_ids = request.token_ids[rows.start : self._next_row]
        hash_T = token_hashes(token_ids, rows.start, self._hash)
        taken = IncrementRows(ledger.schema, rows, self._hash, hash_T)
        self._hash = int(hash_T[-1]) if len(hash_T) else self._hash
        return taken

    def _begin(self, ledger: Ledger, request: Request) -> RowRange:
        """The first rows: the prompt's too, unless the first completion has handed out the same ones."""
        start, stop, num_prompt_tokens = (
            first_row(request),
            last_row(request),
            request.num_prompt_tokens,
        )
        rows = read_rows(ledger, request, start, stop)
        if start < num_prompt_tokens <= stop and self._is_shared(rows, num_prompt_tokens - start):
            start = num_prompt_tokens
            rows = read_rows(ledger, request, start, stop)
        if start:
            self._hash = int(token_hashes(request.token_ids[:start])[-1])
        return rows

    def _is_shared(self, rows: RowRange, num_prompt_rows: int) -> bool:
        digest = _digest(rows, num_prompt_rows)
        if self._index == 0:
            self._shared.digest = digest
            return False
        return digest is not None and digest == self._shared.digest


def _digest(rows: RowRange, num_rows: int) -> bytes | None:
    """Tells the first rows from others; None if one of them is absent."""
    if (rows.origin_T[:num_rows] == ABSENT).any():
        return None
    return blake2b(rows.ids_TLK[:num_rows].tobytes(), digest_size=32).digest()
