"""What every format of routed experts can do: write a record as a JSON value, and read that value back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import msgspec

from routebook.routes.formats.tokens_after import TokensAfter
from routebook.routes.record import RoutedExperts
from routebook.routes.schema import RouteSchema
from routebook.routes.token_hash import TokenIds


class RouteFormat(ABC):
    """One form of the value that a response carries. Implementations hold no state.

    A value holds the rows of positions `[start, N - 1)` of a sequence of `N` tokens: the last token
    was not an input yet. That is as true of an increment of a stream as of a whole answer; `N` then
    counts the tokens known so far.
    """

    name: ClassVar[str]
    """What a request calls it."""

    streams: ClassVar[bool] = True
    """Whether a value can be an increment; False where it always spans the whole sequence."""

    @abstractmethod
    def json_parts(self, record: RoutedExperts) -> list[bytes]:
        """The value as JSON text, in pieces that belong one behind the other.

        Made off the event loop: a record of 4096 rows takes a fraction of a millisecond, one of
        100,000 rows several. No single piece keeps other threads out for longer than about a tenth
        of a millisecond.

        Raises:
            RecordError: a row is absent, and the format cannot say so; with position and remedy.
        """

    @abstractmethod
    def decode_after(
        self, value: Any, schema: RouteSchema, tokens: TokensAfter, weight_version: int
    ) -> RoutedExperts:
        """Read a value whose rows follow tokens that were hashed before.

        Args:
            value: text or object, as it came out of a JSON parser.
            schema: what the axes mean.
            tokens: those of the rows, and the one after them.
            weight_version: version of the weights that computed the rows, for formats that do not
                tell it.

        Raises:
            FormatError: not a value of this format, or not of this shape, type, start or size.
            RecordError: ids that no expert of the schema has, or rows of other tokens.
        """

    def decode(
        self,
        value: Any,
        schema: RouteSchema,
        token_ids: TokenIds,
        start: int = 0,
        *,
        weight_version: int = 0,
    ) -> RoutedExperts:
        """Read a value as it came out of a JSON parser.

        Args:
            value: text or object.
            schema: what the axes mean.
            token_ids: all tokens known so far, prompt and sampled, from position 0 on.
            start: position of the first row.
            weight_version: version of the weights that computed the rows, for formats that do not
                tell it.

        Returns:
            Rows `[start, len(token_ids) - 1)`; their origin is `TRANSFERRED` unless the format
            tells it.

        Raises:
            FormatError: not a value of this format, or not of this shape, type, start or size.
            RecordError: ids that no expert of the schema has, or rows of other tokens.
        """
        tokens = TokensAfter.of(token_ids, start)
        return self.decode_after(value, schema, tokens, weight_version)

    def encode_json(self, record: RoutedExperts) -> bytes:
        """The value as JSON text; raises as :meth:`json_parts`."""
        return b"".join(self.json_parts(record))

    def encode(self, record: RoutedExperts) -> Any:
        """The value as a JSON parser gives it, text or object; raises as :meth:`json_parts`."""
        return msgspec.json.decode(self.encode_json(record))
