"""SkyRL's form: an object `{data, shape, dtype}` whose dtype is the smallest of uint8, int16, int32.

The smallest for the ids that are there, not for the model: its reader refuses any other. So two
answers of one model can differ in dtype.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from routebook.errors import FormatError
from routebook.routes.formats.array_object import parse_array, read_array, write_array
from routebook.routes.formats.base import RouteFormat
from routebook.routes.formats.hidden_layers import Ids
from routebook.routes.formats.raw_ids import record_of_hidden_layers
from routebook.routes.formats.tokens_after import TokensAfter
from routebook.routes.record import RoutedExperts
from routebook.routes.schema import RouteSchema

_DTYPES = ("uint8", "int16", "int32")


class SkyRLFormat(RouteFormat):
    """The object of `choices[i].routed_experts`. Drops start, provenance and hashes; absent rows are refused."""

    name = "skyrl"

    def json_parts(self, record: RoutedExperts) -> list[bytes]:
        """See :class:`RouteFormat`."""
        ids_TLK = record.complete_ids(
            "SkyRL's form has no mask for them, so slice to valid rows or choose another format"
        )
        return write_array(ids_TLK, record.schema, _smallest_dtype(ids_TLK), start=None)

    def decode_after(
        self, value: Any, schema: RouteSchema, tokens: TokensAfter, weight_version: int
    ) -> RoutedExperts:
        """See :class:`RouteFormat`.

        Raises:
            FormatError: also for a dtype that is not the smallest, ids in a dense layer, or a row
                that is all zeros, as rows are that were never computed.
        """
        parsed = parse_array(value, _DTYPES)
        if parsed.start is not None:
            raise FormatError(
                f"the object has a start ({parsed.start}), which SkyRL's form does not; read it as "
                "prime_rl"
            )
        ids_THK = read_array(parsed, schema, tokens)
        smallest = _smallest_dtype(ids_THK)
        if ids_THK.dtype != smallest:
            raise FormatError(
                f"the array is {parsed.dtype}, but its ids fit {smallest.name}, which this format "
                "asks for; the data was not written for SkyRL"
            )
        return record_of_hidden_layers(ids_THK, schema, tokens, weight_version)


def _smallest_dtype(ids: Ids) -> np.dtype[Any]:
    greatest = int(ids.max(initial=0))
    return np.dtype("uint8" if greatest < 2**8 else "int16" if greatest < 2**15 else "int32")
