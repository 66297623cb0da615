from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routebook.errors import (
    DamagedError,
    FormatError,
    RecordError,
    SchemaMismatchError,
    SpanError,
    TokenMismatchError,
    TruncatedError,
)
from routebook.routes import RoutedExperts, RouteSample
from routebook.routes.formats import FORMAT_NAMES, get_format
from routebook.routes.formats.tokens_after import TokensAfter
from routebook.routes.frame import describe_frame
from tests.routes import peers
from tests.routes.strategies import make_record, make_schema, random_ids, tokens

SCHEMA = make_schema()
IDS = random_ids(SCHEMA, 6, 1) % 15 + 1
FULL = peers.all_layers(IDS, SCHEMA)
RECORD = RoutedExperts.from_rows(SCHEMA, IDS, tokens(7))
ROWS = np.concatenate([IDS.astype(np.int8), np.full((1, 2, 2), -1, np.int8)])


def changed(array: np.ndarray, index: tuple[object, ...], value: int) -> np.ndarray:
    array = array.copy()
    array[index] = value
    return array


def sglang(array: np.ndarray) -> str:
    return peers.b64(array)


def array_object(array: np.ndarray, **changes: Any) -> dict[str, Any]:
    described = {"shape": list(array.shape), "dtype": array.dtype.name}
    return {"data": peers.b64(array), **described, **changes}


def prime_rl(array: np.ndarray, **changes: Any) -> dict[str, Any]:
    return array_object(array, **{"start": 0, **changes})


def nemo_rl(array: np.ndarray, shape: str = "") -> str:
    shape = shape or "x".join(map(str, array.shape))
    return f"nrlre1:{array.dtype.name}:{shape}:{peers.b64(array)}"


def refused(name: str, value: Any, start: int = 0) -> str:
    with pytest.raises((FormatError, RecordError)) as caught:
        get_format(name).decode(value, SCHEMA, tokens(7), start)
    return str(caught.value)


WIDE = FULL.astype(np.int32)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (sglang(WIDE[:5]), "array takes 192 bytes, but only 160 are there"),
        (sglang(WIDE[:, :3]), "only 144"),
        (sglang(np.concatenate([WIDE, WIDE[:1]])), "32 bytes follow"),
        (sglang(FULL), "only 48"),
        (sglang(WIDE.astype(np.int64)), "192 bytes follow"),
        (sglang(changed(WIDE, (4, 3, 1), 16)), "position 4, layer 3, names expert 16"),
        (sglang(changed(WIDE, (4, 3, 1), 257)), "names expert 257"),
        (sglang(changed(WIDE, (4, 3, 1), -1)), "names expert -1"),
        (sglang(changed(WIDE, (2, 0, 1), 3)), "layer 0 has ids"),
        (sglang(changed(WIDE, (4, 3), 0)), r"position 4, layer 3, is [0 0]: it was not captured"),
        (sglang(WIDE)[:-1], "not base64"),
        ("", "only 0"),
        (None, "not NoneType"),
        (array_object(WIDE), "not dict"),
    ],
)
def test_what_sglang_would_not_have_written_is_refused(value, word):
    assert word in refused("sglang", value)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (array_object(FULL.astype(np.int16)), "its ids fit uint8"),
        (array_object(FULL.astype(np.uint16)), "'uint16'; in this format"),
        (array_object(FULL.astype(np.float64)), "'float64'"),
        (array_object(FULL, dtype="O"), "'O'"),
        (array_object(FULL[:5]), "5 rows, but the tokens after the start leave 6"),
        (array_object(FULL[:, :3]), "3 layers"),
        (array_object(FULL[:, :, :1]), "top-k 1"),
        (array_object(FULL, shape=[6, 8]), "shape"),
        (array_object(FULL, shape=[6, 4, -2]), "shape"),
        (array_object(FULL, shape=[True, 4, 2]), "shape"),
        (array_object(FULL, shape=[6, 4, 2.0]), "shape"),
        (prime_rl(FULL), "has a start"),
        (array_object(FULL[:5], shape=[6, 4, 2]), "array takes 48 bytes, but only 40 are there"),
        (array_object(FULL, data="!"), "not base64"),
        (array_object(FULL, data=None), "data"),
        (array_object(FULL, layers=[1, 3]), "layers"),
        (array_object(changed(FULL, (4, 3, 0), 16)), "names expert 16"),
        (array_object(changed(WIDE, (4, 3, 0), 70000)), "names expert 70000"),
        (array_object(changed(FULL, (2, 0, 1), 3)), "layer 0 has ids"),
        (array_object(changed(FULL, (4, 3), 0)), "not captured"),
        ({}, "missing required field"),
        (peers.b64(FULL), "object"),
    ],
)
def test_what_skyrl_would_not_have_written_is_refused(value, word):
    assert word in refused("skyrl", value)


@pytest.mark.parametrize(
    ("value", "start", "word"),
    [
        (prime_rl(FULL, start=1), 0, "begin at position 1, not at 0"),
        (prime_rl(FULL[1:], start=0), 1, "begin at position 0, not at 1"),
        (array_object(FULL), 0, "begin at position None"),
        (prime_rl(FULL, start="0"), 0, "start"),
        (
            prime_rl(FULL.astype(np.uint16)),
            0,
            "'uint16'; in this format ids of this model are uint8",
        ),
        (prime_rl(FULL), -1, "start=-1 lies outside"),
        (prime_rl(FULL, start=9), 9, "start=9 lies outside"),
        (prime_rl(FULL, start=1), 1, "6 rows, but the tokens after the start leave 5"),
        (prime_rl(changed(FULL, (4, 3, 0), 16)), 0, "names expert 16"),
    ],
)
def test_what_prime_rl_would_not_have_written_is_refused(value, start, word):
    assert word in refused("prime_rl", value, start)


@pytest.mark.parametrize(
    ("value", "start", "word"),
    [
        (nemo_rl(ROWS[:-1]), 0, "6 rows, but"),
        (nemo_rl(np.concatenate([ROWS, ROWS[-1:]])), 0, "8 rows"),
        (nemo_rl(ROWS[:, :1]), 0, "1 layers"),
        (nemo_rl(ROWS[:, :, :1]), 0, "top-k 1"),
        (nemo_rl(ROWS.view(np.uint8)), 0, "does not begin with nrlre1:"),
        (nemo_rl(ROWS, shape="7x2"), 0, "does not begin"),
        (nemo_rl(ROWS, shape="-7x2x2"), 0, "does not begin"),
        (nemo_rl(ROWS).replace("nrlre1", "nrlre2"), 0, "does not begin"),
        (nemo_rl(ROWS)[:-4], 0, "takes 28 bytes, but only"),
        (nemo_rl(ROWS) + "AAAA", 0, "not base64"),
        (nemo_rl(changed(ROWS, (4, 1, 0), -1)), 0, "position 4 is -1 in some places"),
        (nemo_rl(changed(ROWS, (4, 1, 0), -2)), 0, "names expert -2"),
        (nemo_rl(changed(ROWS, (4, 1, 0), 16)), 0, "layer 3, names expert 16"),
        (nemo_rl(changed(ROWS, (4, 1), 0)), 0, "not captured"),
        (nemo_rl(ROWS), 2, "a row at position 0, before start=2"),
        (array_object(ROWS), 0, "must be text"),
    ],
)
def test_what_nemo_rl_would_not_have_written_is_refused(value, start, word):
    assert word in refused("nemo_rl", value, start)


def frame(**changes: Any) -> dict[str, Any]:
    value = get_format("frame").encode(RECORD)
    value.update(changes)
    return {name: field for name, field in value.items() if field is not Ellipsis}


@pytest.mark.parametrize(
    ("value", "error", "word"),
    [
        (frame(version=2), FormatError, "version 2"),
        (frame(version=...), FormatError, "version None"),
        (frame(version=True), FormatError, "version True"),
        (frame(data=...), FormatError, "NoneType"),
        (frame(data="!"), FormatError, "not base64"),
        (frame(data="AAAA"), DamagedError, "payload is 3"),
        (frame(num_rows=5), DamagedError, "token_hashes"),
        (frame(num_rows=10**12), DamagedError, "token_hashes"),
        (frame(num_experts=3), DamagedError, "names expert"),
        (frame(top_k=...), FormatError, "top_k"),
        (frame(codec="rle"), FormatError, "'rle'"),
        (frame(start=1), DamagedError, "contradicts"),
        (frame(provenance=[[0, 6, 0, 9]]), FormatError, "origin 9"),
        ("text", FormatError, "must be an object"),
    ],
)
def test_frames_that_contradict_themselves_are_refused(value, error, word):
    with pytest.raises(error, match=word):
        get_format("frame").decode(value)


def test_a_frame_with_a_field_of_a_newer_version_is_read():
    assert get_format("frame").decode(frame(temperature="warm")) == RECORD


def test_a_frame_of_a_sample_is_no_bare_record():
    sample = RouteSample(record=RECORD, token_ids=np.array(tokens(7)), num_prompt_tokens=2)
    header, sections = describe_frame(sample)
    payload = b"".join(section.tobytes() for section in sections.values())
    fields = {"version": 1, **json.loads(msgspec.json.encode(header))}
    fields["data"] = base64.b64encode(payload).decode()
    with pytest.raises(FormatError, match="a sample with its tokens"):
        get_format("frame").decode(fields)


def test_a_frame_of_other_tokens_schema_or_start_is_refused():
    fmt, value = get_format("frame"), frame()
    with pytest.raises(SchemaMismatchError, match="top_k=3"):
        fmt.decode(value, make_schema(top_k=3))
    with pytest.raises(SpanError, match="begin at position 0, not at start=2"):
        fmt.decode(value, SCHEMA, tokens(7), 2)
    with pytest.raises(SpanError, match="end at position 6, but those of 8 tokens end at 7"):
        fmt.decode(value, SCHEMA, tokens(8))
    with pytest.raises(TokenMismatchError, match=r"shifted by \+1"):
        fmt.decode(value, SCHEMA, [1, *tokens(6)])


def test_rows_that_follow_other_tokens_are_refused_even_where_there_are_none():
    fmt = get_format("frame")
    for stop in (3, 6):
        value = fmt.encode(RECORD.slice(3, stop))
        after = TokensAfter.of([9, *tokens(7)[1 : stop + 1]], 3)
        with pytest.raises(TokenMismatchError, match="tokens before position 3"):
            fmt.decode_after(value, SCHEMA, after, 0)
        after = TokensAfter.of(tokens(7)[: stop + 1], 3)
        assert fmt.decode_after(value, SCHEMA, after, 0) == RECORD.slice(3, stop)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_other_numbers_of_tokens_are_refused(name):
    fmt = get_format(name)
    value = fmt.encode(make_record(6))
    for count in (0, 1, 5, 6, 8, 20):
        with pytest.raises((FormatError, RecordError)):
            fmt.decode(value, SCHEMA, tokens(count))


@pytest.mark.parametrize("name", ["sglang", "skyrl", "prime_rl", "nemo_rl"])
def test_a_cut_value_is_refused_at_every_length(name):
    value = peers.write(name, RECORD)
    text = value if isinstance(value, str) else value["data"]
    for length in range(0, len(text) - 3, 4):
        cut = text[:length] if isinstance(value, str) else {**value, "data": text[:length]}
        with pytest.raises(FormatError) as caught:
            get_format(name).decode(cut, SCHEMA, tokens(7))
        assert isinstance(caught.value, TruncatedError) or name == "nemo_rl"


@pytest.mark.parametrize("name", ["sglang", "skyrl", "prime_rl", "nemo_rl"])
@given(data=st.data())
@settings(max_examples=300)
def test_damage_raises_nothing_but_errors_of_ours_or_is_what_peers_see(name, data):
    text = json.dumps(peers.write(name, RECORD))
    characters = st.sampled_from([*"0123456789ABCxyz+/=:-.,[]{}", "é", " "])
    damaged = list(text)
    for at, character in data.draw(
        st.lists(st.tuples(st.integers(0, len(text) - 1), characters), max_size=4)
    ):
        damaged[at] = character
    try:
        value = json.loads("".join(damaged))
    except ValueError:
        return
    try:
        read = get_format(name).decode(value, SCHEMA, tokens(7))
    except (FormatError, RecordError):
        return
    seen = peers.read(name, value, SCHEMA, 6)
    if name == "nemo_rl":
        expected_valid = (seen[:-1] != -1).all(axis=(1, 2))
        assert np.array_equal(read.valid_T, expected_valid)
        assert np.array_equal(read.ids_TLK[read.valid_T], seen[:-1][expected_valid])
    else:
        assert np.array_equal(read.ids_TLK, seen[:, list(SCHEMA.layer_ids)])
