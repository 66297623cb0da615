from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routebook.errors import DamagedError
from routebook.routes.bitpack import bits_of, pack, packed_nbytes, unpack


def random_ids(bits: int, num_ids: int) -> np.ndarray:
    dtype = np.uint8 if bits <= 8 else np.uint16
    return np.random.default_rng(num_ids).integers(0, 2**bits, num_ids).astype(dtype)


@given(st.integers(1, 65536))
def test_bits_of_is_the_smallest_width_that_tells_all_values_apart(num_values):
    bits = bits_of(num_values)
    assert num_values <= 2**bits
    assert bits == 1 or 2 ** (bits - 1) < num_values


# 131072 ids fill a block of words exactly; 131081 begin another.
@pytest.mark.parametrize("num_ids", [0, 1, 7, 8, 9, 1001, 131072, 131081])
@pytest.mark.parametrize("bits", range(1, 17))
def test_every_width_survives_packing(bits, num_ids):
    ids = random_ids(bits, num_ids)
    packed = pack(ids, bits)
    unpacked = unpack(packed, num_ids, bits)
    assert len(packed) == packed_nbytes(num_ids, bits)
    assert unpacked.dtype == ids.dtype
    assert np.array_equal(unpacked, ids)


@pytest.mark.parametrize("bits", range(1, 9))
def test_narrow_ids_are_one_string_of_bits_as_numpy_packs_it(bits):
    ids = random_ids(bits, 83)
    bit_rows = np.unpackbits(ids[:, None], axis=1, bitorder="little")[:, :bits]
    expected = np.packbits(bit_rows.reshape(-1), bitorder="little")
    packed = pack(ids, bits)
    assert packed[: len(expected)].tolist() == expected.tolist()
    assert not packed[len(expected) :].any()
    assert len(packed) - len(expected) < bits


def test_ids_that_need_every_bit():
    assert unpack(pack(np.array([511, 256, 255, 0], np.uint16), 9), 4, 9).tolist() == [
        511,
        256,
        255,
        0,
    ]


@pytest.mark.parametrize("num_ids", [6, 8, 16])
def test_a_payload_of_another_length_is_refused(num_ids):
    packed = pack(np.zeros(9, np.uint8), 5)
    with pytest.raises(DamagedError):
        unpack(packed[:-1] if num_ids == 16 else packed, num_ids, 5)


def test_bits_after_the_last_id_must_be_zero():
    packed = pack(np.zeros(9, np.uint8), 5)
    packed[-1] = 0x80
    with pytest.raises(DamagedError, match="not zero"):
        unpack(packed, 9, 5)
