"""Payload codecs: how the ids of a record are written as bytes.

| name     | bytes per id                              | order of the ids                     |
|----------|-------------------------------------------|--------------------------------------|
| `raw`    | 1 or 2, little-endian                     | as in memory; decoding is a view     |
| `packed` | `ceil(log2(num_experts)) / 8` (`bitpack`) | as in memory                         |
| `zstd`   | what zstd level 1 reaches, with checksum  | layers outermost, low bytes before high |

On balanced routing `packed` is within about 1 % of what any codec that keeps the order of a row's
ids can reach; `zstd` gains where routing is skewed or repeats. The order within a row is always
kept: it is the order in which an engine adds up the experts' outputs.

What absent rows hold is not kept; the validity mask, which a frame carries beside the ids, restores
it.

Legend of shape suffixes: T = rows, L = MoE layers, K = top-k.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import zstandard

from routebook.errors import ConfigError, DamagedError, FormatError, TruncatedError
from routebook.routes.bitpack import bits_of, pack, packed_nbytes, unpack
from routebook.routes.schema import RouteSchema

RouteIds = npt.NDArray[np.unsignedinteger]
Bytes = npt.NDArray[np.uint8]

_ZSTD_LEVEL = 1
_ZSTD_MAX_RATIO = 128 * 1024 // 4
"""A zstd block of at most 128 KiB takes at least 4 bytes, so no honest payload promises more."""


class Codec(Protocol):
    """One way to write ids. Implementations hold no state."""

    def encode(self, ids_TLK: RouteIds, schema: RouteSchema) -> Bytes:
        """Ids `[T, L, K]` in the schema's dtype as bytes; a view where the codec allows it."""

    def decode(self, payload: Bytes, schema: RouteSchema, num_rows: int) -> RouteIds:
        """Invert `encode`: `[num_rows, L, K]`, allocating no more than that.

        Raises:
            FormatError: the payload is not what `encode` makes of so many rows.
        """


class Raw:
    """The array as it lies in memory."""

    def encode(self, ids_TLK: RouteIds, schema: RouteSchema) -> Bytes:
        """See :class:`Codec`; a view on a little-endian machine."""
        return np.ascontiguousarray(_little_endian(ids_TLK)).reshape(-1).view(np.uint8)

    def decode(self, payload: Bytes, schema: RouteSchema, num_rows: int) -> RouteIds:
        """See :class:`Codec`; a view on a little-endian machine."""
        _check_nbytes(len(payload), num_rows * schema.row_nbytes)
        return _as_ids(payload, schema).reshape(schema.shape(num_rows))


class Packed:
    """As few whole bits per id as tell the experts apart."""

    def encode(self, ids_TLK: RouteIds, schema: RouteSchema) -> Bytes:
        """See :class:`Codec`."""
        return pack(ids_TLK.reshape(-1), bits_of(schema.num_experts))

    def decode(self, payload: Bytes, schema: RouteSchema, num_rows: int) -> RouteIds:
        """See :class:`Codec`."""
        bits = bits_of(schema.num_experts)
        num_ids = num_rows * schema.num_layers * schema.top_k
        _check_nbytes(len(payload), packed_nbytes(num_ids, bits))
        return unpack(payload, num_ids, bits).reshape(schema.shape(num_rows))


class Zstd:
    """zstd over byte planes, one layer after the other: neighbours there resemble each other."""

    def encode(self, ids_TLK: RouteIds, schema: RouteSchema) -> Bytes:
        """See :class:`Codec`."""
        if not ids_TLK.size:
            return np.zeros(0, np.uint8)
        planes = _little_endian(ids_TLK).transpose(1, 0, 2).reshape(-1, 1).view(np.uint8).T
        compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True)
        return np.frombuffer(compressor.compress(planes.reshape(-1).data), np.uint8)

    def decode(self, payload: Bytes, schema: RouteSchema, num_rows: int) -> RouteIds:
        """See :class:`Codec`."""
        nbytes = num_rows * schema.row_nbytes
        planes = np.frombuffer(_decompressed(payload.data, nbytes), np.uint8)
        shuffled = planes.reshape(schema.dtype.itemsize, -1).T
        ids_LTK = _as_ids(np.ascontiguousarray(shuffled).reshape(-1), schema).reshape(
            schema.num_layers, num_rows, schema.top_k
        )
        return np.ascontiguousarray(ids_LTK.transpose(1, 0, 2))


_CODECS: dict[str, Codec] = {"raw": Raw(), "packed": Packed(), "zstd": Zstd()}
CODEC_NAMES = tuple(_CODECS)


def check_codec(name: str) -> None:
    """Raise ConfigError unless `name` is a codec that :func:`encode_ids` knows."""
    if name not in _CODECS:
        raise ConfigError(f"codec={name!r} is not known; use one of {', '.join(CODEC_NAMES)}")


def encode_ids(codec: str, ids_TLK: RouteIds, schema: RouteSchema) -> Bytes:
    """Ids as the bytes of a codec.

    Args:
        codec: one of `CODEC_NAMES`.
        ids_TLK: `[T, L, K]` in the schema's dtype.
        schema: what the axes mean.

    Returns:
        uint8, one axis; with `raw` a view of the ids on a little-endian machine.

    Raises:
        ConfigError: no such codec.
    """
    check_codec(codec)
    return _CODECS[codec].encode(ids_TLK, schema)


def decode_ids(codec: str, payload: Bytes, schema: RouteSchema, num_rows: int) -> RouteIds:
    """Invert :func:`encode_ids`. Allocates at most what `num_rows` rows take, whatever is in there.

    Args:
        codec: name that came with the payload.
        payload: uint8, one axis.
        schema: what the axes mean.
        num_rows: rows that the payload is said to hold.

    Returns:
        `[num_rows, L, K]` in the schema's dtype; with `raw` a view on a little-endian machine.

    Raises:
        FormatError: an unknown codec, or a payload that does not hold exactly these rows.
    """
    if codec not in _CODECS:
        raise FormatError(
            f"the ids are written with codec {codec!r}, which this version does not know "
            f"(it knows {', '.join(CODEC_NAMES)}); install a newer routebook"
        )
    return _CODECS[codec].decode(payload, schema, num_rows)


def _little_endian(ids_TLK: RouteIds) -> RouteIds:
    return ids_TLK.astype(ids_TLK.dtype.newbyteorder("<"), copy=False)


def _as_ids(payload: Bytes, schema: RouteSchema) -> RouteIds:
    return payload.view(schema.dtype.newbyteorder("<")).astype(schema.dtype, copy=False)


def _check_nbytes(given: int, expected: int) -> None:
    if given < expected:
        raise TruncatedError(f"the ids are {given} bytes long, but their rows take {expected}")
    if given > expected:
        raise DamagedError(f"the ids are {given} bytes long, but their rows take only {expected}")


def _decompressed(payload: memoryview, nbytes: int) -> bytes:
    """Decompress what must be exactly `nbytes` long, after its own header has promised so."""
    if not nbytes:
        _check_nbytes(len(payload), 0)
        return b""
    if nbytes > len(payload) * _ZSTD_MAX_RATIO:
        raise DamagedError(f"{len(payload)} bytes of zstd cannot hold {nbytes} bytes of ids")
    try:
        promised = zstandard.get_frame_parameters(payload).content_size
        if promised != nbytes:
            raise DamagedError(f"zstd data holds {promised} bytes, but its rows take {nbytes}")
        return zstandard.ZstdDecompressor().decompress(payload, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DamagedError(f"the ids cannot be decompressed: {error}") from error
