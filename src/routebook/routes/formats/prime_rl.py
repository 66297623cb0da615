"""prime-rl's form: an object `{data, shape, dtype, start}` in the dtype of the model, uint8 or uint16."""

from __future__ import annotations

from typing import Any

from routebook.errors import FormatError
from routebook.routes.formats.array_object import parse_array, read_array, write_array
from routebook.routes.formats.base import RouteFormat
from routebook.routes.formats.raw_ids import record_of_hidden_layers
from routebook.routes.formats.tokens_after import TokensAfter
from routebook.routes.record import RoutedExperts
from routebook.routes.schema import RouteSchema


class PrimeRLFormat(RouteFormat):
    """The object of `choices[i].routed_experts`. Drops provenance and hashes; absent rows are refused."""

    name = "prime_rl"

    def json_parts(self, record: RoutedExperts) -> list[bytes]:
        """See :class:`RouteFormat`."""
        ids_TLK = record.complete_ids(
            "prime-rl's form has no mask for them, so slice to valid rows or choose another format"
        )
        return write_array(ids_TLK, record.schema, record.schema.dtype, record.start)

    def decode_after(
        self, value: Any, schema: RouteSchema, tokens: TokensAfter, weight_version: int
    ) -> RoutedExperts:
        """See :class:`RouteFormat`.

        Raises:
            FormatError: also for another start than the one given, ids in a dense layer, or a row
                that is all zeros, as rows are that were never computed.
        """
        parsed = parse_array(value, (schema.dtype.name,))
        if parsed.start != tokens.start:
            raise FormatError(
                f"the rows say that they begin at position {parsed.start}, not at {tokens.start}; pass the "
                "start that was asked for"
            )
        ids_THK = read_array(parsed, schema, tokens)
        return record_of_hidden_layers(ids_THK, schema, tokens, weight_version)
