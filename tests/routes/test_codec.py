from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from routebook.errors import ConfigError, DamagedError, FormatError, TruncatedError
from routebook.routes import CODEC_NAMES
from routebook.routes.codec import decode_ids, encode_ids
from tests.routes.strategies import make_schema, random_ids, schemas


@pytest.mark.parametrize("codec", CODEC_NAMES)
@given(schemas(), st.integers(0, 20), st.integers(0, 9))
def test_ids_survive_every_codec(codec, schema, num_rows, seed):
    ids = random_ids(schema, num_rows, seed)
    decoded = decode_ids(codec, encode_ids(codec, ids, schema), schema, num_rows)
    assert decoded.dtype == schema.dtype
    assert decoded.shape == ids.shape
    assert np.array_equal(decoded, ids)


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_ids_around_the_width_of_a_byte_survive(codec):
    schema = make_schema(num_experts=512, layer_ids=(0,), top_k=4)
    ids = np.array([[[255, 256, 511, 0]]], np.uint16)
    assert decode_ids(codec, encode_ids(codec, ids, schema), schema, 1).tolist() == ids.tolist()


def test_raw_copies_nothing_either_way():
    schema = make_schema(num_experts=512)
    ids = random_ids(schema, 5, 0)
    payload = encode_ids("raw", ids, schema)
    assert np.shares_memory(payload, ids)
    assert np.shares_memory(decode_ids("raw", payload, schema, 5), ids)


@pytest.mark.parametrize(("num_experts", "nbytes"), [(16, 4), (128, 7), (256, 8), (512, 9)])
def test_packed_takes_the_bits_that_tell_the_experts_apart(num_experts, nbytes):
    schema = make_schema(num_experts=num_experts, layer_ids=(0,), top_k=8)
    ids = random_ids(schema, 100, 0)
    assert len(encode_ids("packed", ids, schema)) == 100 * nbytes


def test_zstd_shrinks_what_repeats_and_carries_a_checksum():
    schema = make_schema(num_experts=512)
    ids = np.repeat(random_ids(schema, 1, 0), 1000, axis=0)
    payload = encode_ids("zstd", ids, schema)
    assert len(payload) < ids.nbytes / 20
    assert zstandard.get_frame_parameters(payload.tobytes()).has_checksum


def test_unknown_codecs_are_refused_with_the_known_ones():
    schema = make_schema()
    with pytest.raises(ConfigError, match=r"'lz4'.*raw, packed, zstd"):
        encode_ids("lz4", random_ids(schema, 1, 0), schema)
    with pytest.raises(FormatError, match=r"'lz4'.*raw, packed, zstd.*newer"):
        decode_ids("lz4", np.zeros(4, np.uint8), schema, 1)


@pytest.mark.parametrize("codec", ["raw", "packed"])
def test_a_payload_that_does_not_hold_its_rows_is_refused(codec):
    schema = make_schema()
    payload = encode_ids(codec, random_ids(schema, 8, 0), schema)
    with pytest.raises(TruncatedError):
        decode_ids(codec, payload[:-1], schema, 8)
    with pytest.raises(DamagedError):
        decode_ids(codec, np.append(payload, np.uint8(0)), schema, 8)


@pytest.mark.parametrize("num_rows", [0, 1, 31, 33, 10**9, 2**62])
def test_zstd_never_unpacks_another_amount_than_its_rows_take(num_rows):
    schema = make_schema()
    payload = encode_ids("zstd", random_ids(schema, 32, 0), schema)
    with pytest.raises(DamagedError):
        decode_ids("zstd", payload, schema, num_rows)


def zstd_without_size(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(data)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x28",
        b"not zstd at all",
        zstd_without_size(bytes(128)),
        zstandard.compress(bytes(128)) + b"x",
        zstandard.compress(bytes(128))[:-1],
        zstandard.compress(bytes(10**6)),
    ],
    ids=["empty", "1 byte", "text", "no size", "tail", "cut", "bomb"],
)
def test_zstd_data_that_is_not_ours_is_refused(payload):
    with pytest.raises(DamagedError):
        decode_ids("zstd", np.frombuffer(payload, np.uint8), make_schema(), 32)


def test_the_payload_of_the_zstd_cases_would_be_accepted_if_whole():
    payload = np.frombuffer(zstandard.compress(bytes(128)), np.uint8)
    assert decode_ids("zstd", payload, make_schema(), 32).shape == (32, 2, 2)


def test_a_zstd_header_that_promises_much_allocates_nothing():
    num_rows = 2**50
    # Magic, "one segment, 8 bytes of size", the size, and an empty last block.
    promise = b"\x28\xb5\x2f\xfd\xe0" + (num_rows * 4).to_bytes(8, "little") + b"\1\0\0"
    payload = np.frombuffer(promise, np.uint8)
    assert zstandard.get_frame_parameters(promise).content_size == num_rows * 4
    with pytest.raises(DamagedError, match="cannot hold"):
        decode_ids("zstd", payload, make_schema(), num_rows)
