from __future__ import annotations

import contextlib
import struct
import tracemalloc
import zlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routebook.errors import ConfigError, DamagedError, FormatError, TruncatedError
from routebook.routes import CODEC_NAMES, RoutedExperts, RouteSample, decode_frame, encode_frame
from routebook.routes.frame import PREAMBLE_NBYTES, _checksum, frame_nbytes, is_checksummed
from tests.routes.strategies import make_record, make_sample, records, samples, tokens

CODECS = st.sampled_from(CODEC_NAMES)
SOURCES = st.one_of(records(), samples())


def make_source(codec_and_kind: int) -> RouteSample | RoutedExperts:
    """A sample, or a record with absent rows."""
    if codec_and_kind % 2:
        return make_sample(9, seed=codec_and_kind, model="tiny", text="1+1=2")
    return make_record(9, seed=codec_and_kind).pad(tokens(12))


FRAMES = [
    (make_source(i), encode_frame(make_source(i), CODEC_NAMES[i // 2], checksum=True))
    for i in range(6)
]


@given(SOURCES, CODECS, st.booleans())
def test_what_was_written_is_read(source, codec, checksum):
    frame = encode_frame(source, codec, checksum)
    decoded = decode_frame(frame)
    assert type(decoded) is type(source)
    assert decoded == source
    assert frame_nbytes(frame[:PREAMBLE_NBYTES]) == len(frame)
    assert is_checksummed(frame) == checksum


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_any_buffer_can_be_read(kind):
    assert decode_frame(kind(encode_frame(make_sample()))) == make_sample()


def test_raw_ids_hashes_and_tokens_are_views_of_the_frame():
    frame = bytearray(encode_frame(make_sample(9), "raw"))
    sample = decode_frame(frame)
    memory = np.frombuffer(frame, np.uint8)
    record = sample.record
    for array in (record.ids_TLK, record.token_hash_T, sample.token_ids):
        assert np.shares_memory(array, memory)
        assert array.flags.aligned
        assert not array.flags.writeable


def test_an_unknown_codec_is_the_callers_mistake():
    with pytest.raises(ConfigError):
        encode_frame(make_record(), "lz4")


# Damage. A frame with a checksum never decodes after it was cut or changed.


@pytest.mark.parametrize("number", range(len(FRAMES)))
def test_every_cut_of_a_frame_is_noticed(number):
    frame = FRAMES[number][1]
    for length in range(len(frame)):
        with pytest.raises(TruncatedError):
            decode_frame(frame[:length])


@pytest.mark.parametrize("number", range(len(FRAMES)))
def test_every_damaged_byte_of_a_checksummed_frame_is_noticed(number):
    frame = FRAMES[number][1]
    for at in range(len(frame)):
        for change in (0x01, 0x80, 0xFF, frame[at] or 0x55):
            damaged = bytearray(frame)
            damaged[at] ^= change
            with pytest.raises(FormatError):
                decode_frame(damaged)


@given(st.sampled_from(FRAMES), st.data())
def test_a_checksummed_frame_after_any_damage_never_decodes_to_something_else(made, data):
    source, frame = made
    damaged = bytearray(frame)
    index = st.integers(0, len(frame) - 1)
    for at, value in data.draw(st.lists(st.tuples(index, st.integers(0, 255)), max_size=5)):
        damaged[at] = value
    try:
        decoded = decode_frame(damaged)
    except FormatError:
        assert damaged != frame
    else:
        assert decoded == source


def test_bytes_after_the_frame_are_noticed():
    with pytest.raises(DamagedError, match="1 bytes follow"):
        decode_frame(FRAMES[0][1] + b"\0")


def unprotected(number: int) -> bytes:
    return encode_frame(make_source(number), CODEC_NAMES[number // 2], checksum=False)


@given(st.integers(0, len(FRAMES) - 1), st.data())
def test_a_frame_without_checksum_raises_nothing_but_format_errors(number, data):
    damaged = bytearray(unprotected(number))
    index = st.integers(0, len(damaged) - 1)
    for at, value in data.draw(st.lists(st.tuples(index, st.integers(0, 255)), max_size=5)):
        damaged[at] = value
    raises_only_format_errors(bytes(damaged))


@pytest.mark.parametrize("number", range(len(FRAMES)))
def test_no_single_damaged_byte_makes_a_frame_without_checksum_raise_another_error(number):
    frame = unprotected(number)
    for at in range(len(frame)):
        for change in (0x01, 0x10, 0x80, 0xFF):
            damaged = bytearray(frame)
            damaged[at] ^= change
            raises_only_format_errors(bytes(damaged))


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_format_errors(noise):
    raises_only_format_errors(noise)
    raises_only_format_errors(unprotected(0)[:4] + noise)


@given(
    st.recursive(
        st.none() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(),
        st.lists,
        max_leaves=8,
    )
)
def test_random_headers_raise_nothing_but_format_errors(value):
    raises_only_format_errors(with_header({"meta": value, "provenance": value}))
    raises_only_format_errors(with_header({"layer_ids": value}))
    raises_only_format_errors(with_header({"later": value}))


def raises_only_format_errors(data: bytes) -> None:
    with contextlib.suppress(FormatError):
        decode_frame(data)


# Headers written by hand: what damage could spell, and what a newer version may write.


def parts_of(frame: bytes) -> tuple[dict[str, object], bytes]:
    """Header and payload, read by the layout in the module's docstring, not by its code."""
    header_nbytes, payload_nbytes = struct.unpack_from("<IQ", frame, 6)
    header = msgspec.msgpack.decode(frame[22 : 22 + header_nbytes])
    return header, frame[len(frame) - payload_nbytes :]


def build(header: bytes, payload: bytes, version: int = 1, flags: int = 0) -> bytes:
    preamble = struct.pack("<4sBBIQI", b"\x8fRBK", version, flags, len(header), len(payload), 0)
    return preamble + header + bytes(-(22 + len(header)) % 16) + payload


def with_header(changes: dict[str, object], number: int = 1, tail: bytes = b"") -> bytes:
    header, payload = parts_of(unprotected(number))
    return build(msgspec.msgpack.encode({**header, **changes}), payload + tail)


def test_a_frame_built_by_the_documented_layout_is_read():
    assert decode_frame(with_header({})) == make_source(1)


def test_the_documented_sections_hold_what_they_are_said_to_hold():
    source = make_source(0)
    header, payload = parts_of(encode_frame(source))
    at, found = 0, {}
    for section in header["sections"]:
        found[section["name"]] = payload[at : at + section["nbytes"]]
        at += section["nbytes"]
    assert found["token_hashes"] == source.token_hash_T.astype("<u4").tobytes()
    assert found["ids"] == source.ids_TLK.tobytes()
    assert found["valid"] == bytes([0b11111111, 0b00000001])
    assert list(found) == ["token_hashes", "ids", "valid"]


def test_unknown_fields_and_sections_of_a_newer_writer_are_ignored():
    header, _ = parts_of(unprotected(1))
    sections = [*header["sections"], {"name": "router_logits", "nbytes": 3, "dtype": "u1"}]
    frame = with_header({"sections": sections, "sharding": {"tp": 4}}, tail=b"abc")
    assert decode_frame(frame) == make_source(1)


def test_fields_with_defaults_may_be_missing():
    record = make_record(3).slice(0, 0)
    header, payload = parts_of(encode_frame(record))
    needed = {"layer_ids", "num_experts", "top_k", "num_hidden_layers", "num_rows", "sections"}
    assert set(header) == needed
    assert decode_frame(build(msgspec.msgpack.encode(header), payload)) == record


def test_a_newer_version_is_refused_by_its_number():
    header, payload = parts_of(unprotected(1))
    with pytest.raises(FormatError, match=r"version 2.* install a newer"):
        decode_frame(build(msgspec.msgpack.encode(header), payload, version=2))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"codec": "brotli"}, "brotli.*newer"),
        ({"provenance": [[0, 9, 0, 77]]}, "origin 77.*newer"),
        ({"provenance": [[0, 9, 0, 0]]}, "origin 0"),
    ],
)
def test_what_only_a_newer_version_knows_is_named(changes, word):
    with pytest.raises(FormatError, match=word):
        decode_frame(with_header(changes))


def test_unknown_flags_are_refused():
    header, payload = parts_of(unprotected(1))
    with pytest.raises(FormatError, match="flags 0x02"):
        decode_frame(build(msgspec.msgpack.encode(header), payload, flags=2))


def test_something_else_than_a_frame_is_called_so():
    with pytest.raises(FormatError, match="no frame of routed experts: it begins with 50 4b"):
        decode_frame(b"PK\3\4" + bytes(40))


HUGE = 2**62


@pytest.mark.parametrize(
    "changes",
    [
        {"num_rows": HUGE},
        {"num_rows": 8},
        {"num_rows": -1},
        {"num_rows": HUGE, "sections": []},
        {"sections": []},
        {"sections": [{"name": "ids", "nbytes": -4}]},
        {"sections": [{"name": "ids", "nbytes": HUGE}]},
        {"top_k": 3},
        {"top_k": HUGE, "num_experts": HUGE},
        {"num_experts": 3},
        {"layer_ids": [3, 1]},
        {"layer_ids": []},
        {"start": -1},
        {"start": 2},
        {"start": HUGE},
        {"start": 2**64 - 1},
        {"prefix_hash": 5},
        {"provenance": [[0, HUGE, 0, 1]]},
        {"provenance": [[0, 9, HUGE, 1]]},
        {"provenance": [[0, 9, 0]]},
        {"provenance": []},
        {"num_prompt_tokens": 0},
        {"num_prompt_tokens": HUGE},
        {"meta": {"a": 1}},
        {"codec": 5},
    ],
)
def test_headers_that_contradict_the_payload_are_refused(changes):
    with pytest.raises(FormatError):
        decode_frame(with_header(changes))


@pytest.mark.parametrize("name", ["token_hashes", "token_ids", "ids"])
def test_a_missing_section_is_refused(name):
    header, _ = parts_of(unprotected(1))
    renamed = [
        {**part, "name": "x"} if part["name"] == name else part for part in header["sections"]
    ]
    with pytest.raises(DamagedError):
        decode_frame(with_header({"sections": renamed}))


def test_a_section_listed_twice_is_refused():
    header, _ = parts_of(unprotected(1))
    sections = [*header["sections"], {"name": "ids", "nbytes": 0}]
    with pytest.raises(DamagedError, match="twice"):
        decode_frame(with_header({"sections": sections}))


@pytest.mark.parametrize("index", [0, 1])
def test_sections_of_another_length_are_refused(index):
    header, _ = parts_of(unprotected(1))
    sections = [dict(part) for part in header["sections"]]
    sections[index]["nbytes"] -= 1
    sections.insert(index + 1, {"name": "rest", "nbytes": 1})
    with pytest.raises(DamagedError, match=sections[index]["name"]):
        decode_frame(with_header({"sections": sections}))


def test_bytes_in_no_section_are_refused():
    with pytest.raises(DamagedError, match="the payload is"):
        decode_frame(with_header({}, tail=b"x"))


def test_bytes_between_header_and_payload_must_be_zero():
    frame = bytearray(unprotected(1))
    header_nbytes = struct.unpack_from("<I", frame, 6)[0]
    assert (PREAMBLE_NBYTES + header_nbytes) % 16
    frame[PREAMBLE_NBYTES + header_nbytes] = 1
    with pytest.raises(DamagedError, match="between header and payload"):
        decode_frame(frame)


def test_a_checksum_is_never_zero():
    data = b"\x9d\x0a\xd9\x6d"
    assert zlib.crc32(data) == 0
    assert _checksum([data]) == 1


def test_validity_bits_behind_the_last_row_must_be_zero():
    frame = bytearray(encode_frame(make_source(0)))
    frame[-1] |= 0x80
    with pytest.raises(DamagedError, match="'valid'"):
        decode_frame(frame)


def test_a_deeply_nested_field_of_a_newer_writer_is_refused_without_running_out_of_stack():
    header, payload = parts_of(unprotected(1))
    packed = bytearray(msgspec.msgpack.encode(header))
    packed[0] += 1
    with pytest.raises(DamagedError, match="header cannot be read"):
        decode_frame(build(bytes(packed) + b"\xa1z" + b"\x91" * 100_000 + b"\xc0", payload))


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_no_header_makes_a_small_frame_allocate_much(codec):
    header, payload = parts_of(encode_frame(make_record(9), codec))
    changes = {"num_experts": 65536, "top_k": 65536, "layer_ids": list(range(1000))}
    frame = build(msgspec.msgpack.encode({**header, **changes, "num_hidden_layers": 1000}), payload)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            decode_frame(frame)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
