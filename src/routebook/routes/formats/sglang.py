"""SGLang's form: base64 of raw little-endian int32, `[rows, num_hidden_layers, top_k]`, without a header.

It lives in `meta_info.routed_experts` of `/generate`. Shape, position of the first row
(`routed_experts_start_len` of the request) and everything else must be known to the reader.

Legend of shape suffixes: T = rows, H = hidden layers, L = MoE layers, K = top-k.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from routebook.routes.formats.base import RouteFormat
from routebook.routes.formats.base64_text import base64_pieces, decode_base64
from routebook.routes.formats.hidden_layers import hidden_layer_blocks, hidden_shape
from routebook.routes.formats.raw_ids import read_ids, record_of_hidden_layers
from routebook.routes.formats.tokens_after import TokensAfter
from routebook.routes.record import RoutedExperts
from routebook.routes.schema import RouteSchema

_DTYPE = np.dtype("<i4")


class SGLangFormat(RouteFormat):
    """The text of `meta_info.routed_experts`. Drops provenance and hashes; absent rows are refused."""

    name = "sglang"

    def json_parts(self, record: RoutedExperts) -> list[bytes]:
        """See :class:`RouteFormat`."""
        ids_TLK = record.complete_ids(
            "SGLang's form has no mask for them, so slice to valid rows or choose another format"
        )
        blocks = hidden_layer_blocks(ids_TLK, record.schema, _DTYPE)
        return [b'"', *base64_pieces(blocks), b'"']

    def decode_after(
        self, value: Any, schema: RouteSchema, tokens: TokensAfter, weight_version: int
    ) -> RoutedExperts:
        """See :class:`RouteFormat`.

        Raises:
            FormatError: also for ids in a dense layer, or a row that is all zeros, as rows are that
                were never computed.
        """
        shape = hidden_shape(schema, tokens.num_rows)
        ids_THK = read_ids(decode_base64(value), _DTYPE, shape)
        return record_of_hidden_layers(ids_THK, schema, tokens, weight_version)
