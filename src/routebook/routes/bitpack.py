"""Packing of ids into `bits` bits each, with numpy alone and without a Python loop over ids.

Ids below 256 (`bits <= 8`): eight ids make one little-endian word of `8 * bits` bits, id `j` at
bits `[j * bits, (j + 1) * bits)`; the last word is filled up with zeros. Larger ids (`bits` 9 to
16): first a plane of all low bytes, then the high parts packed with `bits - 8` bits each. Either
way an id takes `bits` bits, and the last word at most `bits` bytes more.

The words are built inside 64-bit lanes: neighbours are joined pairwise, 8 to 16 to 32 to 64 bits,
so each step is a few operations over whole arrays.

Legend of shape suffixes: N = ids, W = words of eight ids.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from routebook.errors import DamagedError

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

_GROUP = 8
_BLOCK_WORDS = 16384
"""Words handled at a time: intermediate arrays stay in the processor's cache."""


def bits_of(num_values: int) -> int:
    """Bits that tell `num_values` values apart; at least 1."""
    return max(1, (num_values - 1).bit_length())


def packed_nbytes(num_ids: int, bits: int) -> int:
    """Bytes that :func:`pack` makes of `num_ids` ids."""
    if bits > 8:
        return num_ids + packed_nbytes(num_ids, bits - 8)
    return -(-num_ids // _GROUP) * bits


def pack(ids_N: npt.NDArray[np.unsignedinteger], bits: int) -> Bytes:
    """Pack ids of `bits` bits, 1 to 16.

    Args:
        ids_N: uint8 or uint16 `[N]`; bits above the lowest `bits` are dropped.
        bits: width of an id.

    Returns:
        uint8 `[packed_nbytes(N, bits)]`.
    """
    if bits > 8:
        low_N, high_N = ids_N.astype(np.uint8), (ids_N >> 8).astype(np.uint8)
        return np.concatenate([low_N, pack(high_N, bits - 8)])
    words_W = _padded(ids_N.astype(np.uint8, copy=False)).view("<u8")
    out = np.empty(len(words_W) * bits, np.uint8)
    # Copied as opaque items, the odd-sized words move several times faster than as rows of bytes.
    out_W = out.view(f"V{bits}")
    low_bytes = np.dtype(
        {"names": ["low"], "formats": [f"V{bits}"], "offsets": [0], "itemsize": _GROUP}
    )
    for at in range(0, len(words_W), _BLOCK_WORDS):
        block_W = words_W[at : at + _BLOCK_WORDS].copy()
        _join(block_W, bits)
        out_W[at : at + _BLOCK_WORDS] = block_W.view(low_bytes)["low"]
    return out


def unpack(packed: Bytes, num_ids: int, bits: int) -> npt.NDArray[np.unsignedinteger]:
    """Invert :func:`pack`.

    Args:
        packed: uint8, exactly `packed_nbytes(num_ids, bits)` long.
        num_ids: N.
        bits: width of an id, 1 to 16.

    Returns:
        `[N]`, uint8 up to 8 bits, else uint16.

    Raises:
        DamagedError: another length, or the filling of the last word is not zero.
    """
    if len(packed) != packed_nbytes(num_ids, bits):
        raise DamagedError(
            f"{num_ids} ids of {bits} bits take {packed_nbytes(num_ids, bits)} bytes, "
            f"not {len(packed)}"
        )
    if bits > 8:
        high_N = unpack(packed[num_ids:], num_ids, bits - 8)
        return packed[:num_ids] | (high_N.astype(np.uint16) << np.uint16(8))
    words_W = np.empty(len(packed) // bits, "<u8")
    for at in range(0, len(words_W), _BLOCK_WORDS):
        block_W = words_W[at : at + _BLOCK_WORDS]
        block_W[:] = _words_at(packed, at * bits, len(block_W), bits)
        _split(block_W, bits)
    ids = words_W.view(np.uint8)
    if ids[num_ids:].any():
        raise DamagedError("the bits after the last id are not zero")
    return ids[:num_ids]


def _padded(ids_N: Bytes) -> Bytes:
    """Contiguous, filled with zeros to a multiple of eight; a view if it is that already."""
    missing = -len(ids_N) % _GROUP
    if missing:
        return np.concatenate([ids_N, np.zeros(missing, np.uint8)])
    return np.ascontiguousarray(ids_N)


def _words_at(packed: Bytes, offset: int, num_words: int, bits: int) -> Words:
    """Words of `bits` bytes as 64-bit integers, a read-only view; the bytes above are not zero.

    The view reads up to seven bytes past the last word, so where the data ends there it is copied
    with as many zeros behind it.
    """
    source = packed[offset : offset + num_words * bits + _GROUP]
    if len(source) < num_words * bits + _GROUP:
        source = np.concatenate([source, np.zeros(_GROUP, np.uint8)])
    return np.lib.stride_tricks.as_strided(
        source[:_GROUP].view("<u8"), (num_words,), (bits,), writeable=False
    )


def _lanes(bits: int, lane: int) -> tuple[np.uint64, np.uint64, np.uint64]:
    """Masks of the lower and the upper `bits` in every double lane, and the gap between them."""
    repeated = sum(1 << at for at in range(0, 64, 2 * lane))
    lower = ((1 << bits) - 1) * repeated
    return np.uint64(lower), np.uint64(lower << bits), np.uint64(lane - bits)


def _join(words_W: Words, bits: int) -> None:
    """From eight ids in lanes of 8 bits to `8 * bits` bits at the bottom of each word, in place."""
    moved_W = np.empty_like(words_W)
    for times in (1, 2, 4):
        lower, upper, gap = _lanes(bits * times, 8 * times)
        np.right_shift(words_W, gap, out=moved_W)
        np.bitwise_and(moved_W, upper, out=moved_W)
        np.bitwise_and(words_W, lower, out=words_W)
        np.bitwise_or(words_W, moved_W, out=words_W)


def _split(words_W: Words, bits: int) -> None:
    """Invert :func:`_join`, in place, and clear whatever lies above the `8 * bits` bits."""
    moved_W = np.empty_like(words_W)
    for times in (4, 2, 1):
        lower, upper, gap = _lanes(bits * times, 8 * times)
        np.bitwise_and(words_W, upper, out=moved_W)
        np.left_shift(moved_W, gap, out=moved_W)
        np.bitwise_and(words_W, lower, out=words_W)
        np.bitwise_or(words_W, moved_W, out=words_W)
