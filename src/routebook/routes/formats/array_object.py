"""An array as a JSON object `{data, shape, dtype[, start]}`, `data` being base64 of its bytes in C order.

Two trainers read such objects; they differ in who chooses the dtype and in the position of the
first row. The layer axis lists every hidden layer, dense ones as zeros, as in the engine's arrays
that the trainers wrap.

Legend of shape suffixes: T = rows, H = hidden layers, L = MoE layers, K = top-k.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any

import msgspec
import numpy as np

from routebook.errors import FormatError
from routebook.routes.formats.base64_text import base64_pieces, decode_base64
from routebook.routes.formats.hidden_layers import Ids, hidden_layer_blocks, hidden_shape
from routebook.routes.formats.raw_ids import check_shape, read_ids
from routebook.routes.formats.tokens_after import TokensAfter
from routebook.routes.record import RouteIds
from routebook.routes.schema import RouteSchema

_Size = Annotated[int, msgspec.Meta(ge=0, lt=2**40)]


class ArrayObject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The object's fields."""

    data: str
    shape: tuple[_Size, _Size, _Size]
    dtype: str
    start: int | None = None


def write_array(
    ids_TLK: RouteIds, schema: RouteSchema, dtype: np.dtype[Any], start: int | None
) -> list[bytes]:
    """Ids as the JSON text of an object, in pieces.

    Args:
        ids_TLK: `[T, L, K]` in the schema's dtype.
        schema: what the axes mean.
        dtype: of the data; the ids fit.
        start: value of the field `start`, which is left out for None.
    """
    blocks = hidden_layer_blocks(ids_TLK, schema, dtype.newbyteorder("<"))
    after: dict[str, Any] = {"shape": hidden_shape(schema, len(ids_TLK)), "dtype": dtype.name}
    if start is not None:
        after["start"] = start
    return [b'{"data":"', *base64_pieces(blocks), b'",' + msgspec.json.encode(after)[1:]]


def parse_array(value: Any, dtypes: Collection[str]) -> ArrayObject:
    """The object with its fields checked.

    Raises:
        FormatError: no such object, or a dtype that is not among `dtypes`.
    """
    try:
        parsed = msgspec.convert(value, ArrayObject)
    except msgspec.ValidationError as error:
        raise FormatError(f"the rows must be an object of data, shape, dtype: {error}") from error
    if parsed.dtype not in dtypes:
        raise FormatError(
            f"the array is {parsed.dtype!r}; in this format ids of this model are "
            f"{' or '.join(dtypes)}; check the schema"
        )
    return parsed


def read_array(parsed: ArrayObject, schema: RouteSchema, tokens: TokensAfter) -> Ids:
    """Ids `[T, H, K]` in the object's dtype.

    Raises:
        FormatError: not base64, or another shape or size than schema and tokens ask for.
    """
    shape = hidden_shape(schema, tokens.num_rows)
    check_shape(parsed.shape, shape)
    return read_ids(decode_base64(parsed.data), np.dtype(parsed.dtype), shape)
