"""The records of one generation of rollouts, found by the tokens that they were computed for.

Legend of shape suffixes: T = tokens of one sequence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from routebook.errors import RecordError, ReplayError, SchemaMismatchError, SpanError
from routebook.routes import RoutedExperts, RouteSchema
from routebook.routes.token_hash import as_token_ids

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One sequence of a generation."""

    token_ids: Tokens
    """int32 `[P + C]`, prompt and completion."""
    num_prompt_tokens: int
    record: RoutedExperts | None

    @property
    def num_needed(self) -> int:
        """Rows that a log-probability of the sequence depends on: one per token but the last."""
        return len(self.token_ids) - 1

    @property
    def num_absent(self) -> int:
        """Rows of those that are not there."""
        record = self.record
        if record is None:
            return self.num_needed
        return self.num_needed - int(record.valid_T[: self.num_needed - record.start].sum())


class RouteBook:
    """Holds the rollouts of the last generation, no others.

    Sequences of the same tokens are told apart by the number that each has in its generation: all of their records are
    valid for these tokens, but each is that of its own run.

    Args:
        schema: layers, experts and top-k of the model that is trained.
        refuses_absent: every row that a log-probability depends on must be there.
        masks_truncated: the trainer may cut a sequence to its prompt, and gives its completion no weight then.
    """

    def __init__(
        self, schema: RouteSchema, *, refuses_absent: bool, masks_truncated: bool = False
    ) -> None:
        self.schema = schema
        self.refuses_absent = refuses_absent
        self.masks_truncated = masks_truncated
        self.rollouts: list[Rollout] = []
        self._numbers: dict[bytes, list[int]] = {}

    def replace(
        self,
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Sequence[Sequence[int]],
        records: Sequence[RoutedExperts | None],
    ) -> None:
        """Forget the generation before and keep this one.

        Args:
            prompt_ids, completion_ids: tokens, one entry per sequence.
            records: their rows, from position 0 on; None where there are none.

        Raises:
            RecordError: another number of records than sequences, or a record of another model, of other tokens, or
                of more tokens than the sequence has; or a completion without a token.
            ReplayError: a sequence lacks rows and the book refuses that.
        """
        if not len(prompt_ids) == len(completion_ids) == len(records):
            raise RecordError(
                f"{len(records)} records for {len(prompt_ids)} prompts and {len(completion_ids)} completions; give "
                "one each, None for a completion that has no record"
            )
        self.rollouts = [
            self._rollout(number, [*prompt, *completion], len(prompt), record)
            for number, (prompt, completion, record) in enumerate(
                zip(prompt_ids, completion_ids, records, strict=True)
            )
        ]
        numbers: defaultdict[bytes, list[int]] = defaultdict(list)
        for number, rollout in enumerate(self.rollouts):
            numbers[rollout.token_ids.tobytes()].append(number)
        self._numbers = dict(numbers)

    def numbers_of(self, tokens_T: Tokens) -> Sequence[int]:
        """Numbers of the rollouts that have exactly these tokens, ascending."""
        return self._numbers.get(tokens_T.tobytes(), ())

    @property
    def num_twins(self) -> int:
        """Rollouts that share all their tokens with another one."""
        return sum(len(numbers) for numbers in self._numbers.values() if len(numbers) > 1)

    def find(
        self, sequences: Sequence[Tokens], numbers: Sequence[int] | None
    ) -> list[Rollout | None]:
        """The rollout of each sequence, by its tokens.

        Args:
            sequences: tokens without padding.
            numbers: which rollout each of them is. None for all of them, in the order of their generation.

        Returns:
            One each: without a record where there is none, and None for a prompt whose completion the trainer has
            masked.

        Raises:
            ReplayError: a sequence is none that was rolled out, and the book refuses that; or not all are asked for.
        """
        if numbers is None:
            if len(sequences) != len(self.rollouts):
                raise ReplayError(
                    f"a pass of a generation has {len(sequences)} sequences, but {len(self.rollouts)} were rolled out"
                )
            numbers = range(len(sequences))
        return [self._one(*pair) for pair in zip(sequences, numbers, strict=True)]

    def check_order(self, sequences: Sequence[Tokens]) -> None:
        """Refuse sequences that stand where others were rolled out: their numbers would be those of others.

        Raises:
            ReplayError: naming the first.
        """
        for number, tokens_T in enumerate(sequences):
            numbers = self.numbers_of(tokens_T)
            if not numbers or number in numbers or self._is_masked(tokens_T, number):
                continue
            raise ReplayError(
                f"sequence {number} of a generation was rolled out as number {numbers[0]}; leave them in their order, "
                "which tells those of the same tokens apart"
            )

    def _is_masked(self, tokens_T: Tokens, number: int) -> bool:
        """Whether this is what the trainer has left of a rollout: its prompt."""
        if not self.masks_truncated or number >= len(self.rollouts):
            return False
        rollout = self.rollouts[number]
        return np.array_equal(rollout.token_ids[: rollout.num_prompt_tokens], tokens_T)

    def _one(self, tokens_T: Tokens, number: int) -> Rollout | None:
        if number in self.numbers_of(tokens_T):
            return self.rollouts[number]
        if self._is_masked(tokens_T, number):
            return None
        if self.refuses_absent:
            raise ReplayError(
                f"a sequence of {len(tokens_T)} tokens, beginning with {tokens_T[:8].tolist()}, is not the one of "
                f"{len(self.rollouts)} that was rolled out, so it has no routes; leave out what changes tokens between "
                "rollout and loss, or set missing='native'"
            )
        return Rollout(token_ids=tokens_T, num_prompt_tokens=len(tokens_T), record=None)

    def _rollout(
        self,
        number: int,
        token_ids: list[int],
        num_prompt_tokens: int,
        record: RoutedExperts | None,
    ) -> Rollout:
        if len(token_ids) == num_prompt_tokens:
            raise RecordError(f"completion {number} of the generation has no token; leave it out")
        tokens_T = as_token_ids(token_ids)
        rollout = Rollout(token_ids=tokens_T, num_prompt_tokens=num_prompt_tokens, record=record)
        if record is not None:
            self._check(number, rollout, record)
        if self.refuses_absent and rollout.num_absent:
            raise ReplayError(
                f"completion {number} of the generation lacks {rollout.num_absent} of {len(tokens_T) - 1} rows; hand "
                "out all rows, those of the prompt too, or set missing='native'"
            )
        return rollout

    def _check(self, number: int, rollout: Rollout, record: RoutedExperts) -> None:
        if not isinstance(record, RoutedExperts):
            raise RecordError(
                f"the record of completion {number} is a {type(record).__name__}; give RoutedExperts, which "
                "RoutedExperts.from_rows makes of ids and tokens"
            )
        if record.schema != self.schema:
            raise SchemaMismatchError(
                f"the record of completion {number} has {record.schema}, the trainer's model {self.schema}"
            )
        if record.stop > len(rollout.token_ids):
            raise SpanError(
                f"the record of completion {number} ends at position {record.stop}, but prompt and completion are "
                f"{len(rollout.token_ids)} tokens; truncate it where the completion was cut"
            )
        record.check_tokens(rollout.token_ids)
