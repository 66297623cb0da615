from __future__ import annotations

import base64
import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routebook.errors import RecordError, RequestError
from routebook.routes import Origin, Provenance, RoutedExperts
from routebook.routes.formats import FORMAT_NAMES, FORMATS, get_format, hidden_layers, nemo_rl
from routebook.routes.formats import frame as frame_format
from routebook.routes.formats.base64_text import base64_pieces
from tests.routes import peers
from tests.routes.strategies import make_record, make_schema, random_ids, rows_and_tokens, tokens

PEERS = ("vllm", "sglang", "skyrl", "prime_rl", "nemo_rl")
WITHOUT_MASK = ("vllm", "sglang", "skyrl", "prime_rl")


@pytest.fixture(autouse=True)
def _tiny_blocks(monkeypatch):
    """Blocks of a few bytes, so that small records cross their borders."""
    for module in (hidden_layers, nemo_rl, frame_format):
        monkeypatch.setattr(module, "_BLOCK_NBYTES", 40)


def rows_as_peers_see_them(name: str, record: RoutedExperts) -> np.ndarray:
    if name == "nemo_rl":
        return peers.read(name, peers.write(name, record), record.schema, record.num_rows)
    return peers.all_layers(np.array(record.ids_TLK), record.schema)


def test_the_table_of_formats_is_what_it_says():
    assert (*PEERS, "frame") == FORMAT_NAMES
    assert [get_format(name).name for name in FORMAT_NAMES] == list(FORMAT_NAMES)
    assert [name for name in FORMAT_NAMES if not FORMATS[name].streams] == ["nemo_rl"]


@pytest.mark.parametrize("name", ["", "VLLM", "handle", "__class__"])
def test_an_unknown_format_is_refused_with_the_known_ones(name):
    with pytest.raises(RequestError, match=rf"'{name}'.*vllm, sglang, .*frame"):
        get_format(name)


@pytest.mark.parametrize("name", PEERS)
@given(made=rows_and_tokens(all_valid=True))
def test_peers_read_what_we_write(name, made):
    record, _, _ = made
    value = json.loads(get_format(name).encode_json(record))
    found = peers.read(name, value, record.schema, record.num_rows)
    expected = rows_as_peers_see_them(name, record)
    assert found.shape == expected.shape
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("name", PEERS)
@given(made=rows_and_tokens(all_valid=True))
def test_our_bytes_are_the_peers_bytes(name, made):
    record, _, _ = made
    assert get_format(name).encode(record) == peers.write(name, record)


@pytest.mark.parametrize("name", PEERS)
@given(made=rows_and_tokens(all_valid=True), weight_version=st.integers(0, 5))
def test_we_read_what_peers_write(name, made, weight_version):
    record, token_ids, ids = made
    read = get_format(name).decode(
        peers.write(name, record),
        record.schema,
        token_ids,
        record.start,
        weight_version=weight_version,
    )
    transferred = Provenance(record.start, record.stop, weight_version, Origin.TRANSFERRED)
    assert read.schema == record.schema
    assert (read.start, read.stop) == (record.start, record.stop)
    assert np.array_equal(read.ids_TLK, ids)
    assert read.complete
    assert read.provenance == ((transferred,) if record.num_rows else ())
    read.check_tokens(token_ids)


@given(rows_and_tokens())
def test_absent_rows_survive_as_minus_one(made):
    record, token_ids, ids = made
    nemo = get_format("nemo_rl")
    value = nemo.encode(record)
    assert value == peers.write("nemo_rl", record)
    read = nemo.decode(value, record.schema, token_ids, record.start)
    assert np.array_equal(read.valid_T, record.valid_T)
    assert np.array_equal(read.ids_TLK[read.valid_T], ids[record.valid_T])


@given(rows_and_tokens())
def test_arrays_over_all_layers_with_missing_rows_are_read(made):
    record, token_ids, ids = made
    schema = record.schema
    rows = np.full((len(token_ids), schema.num_hidden_layers, schema.top_k), -1, np.int32)
    valid_rows = record.start + np.flatnonzero(record.valid_T)
    rows[valid_rows] = peers.all_layers(ids.astype(np.int32), schema)[record.valid_T]
    rows[-1] = np.arange(schema.top_k)  # the placeholder that the last token gets
    value = f"nrlre1:int32:{'x'.join(map(str, rows.shape))}:{peers.b64(rows)}"
    read = get_format("nemo_rl").decode(value, schema, token_ids, record.start)
    assert np.array_equal(read.valid_T, record.valid_T)
    assert np.array_equal(read.ids_TLK[read.valid_T], ids[record.valid_T])


@given(rows_and_tokens())
def test_a_frame_gives_back_the_very_record(made):
    record, token_ids, _ = made
    frame = get_format("frame")
    value = json.loads(frame.encode_json(record))
    assert frame.decode(value) == record
    assert frame.decode(value, record.schema, token_ids, record.start) == record


@pytest.mark.parametrize("name", FORMAT_NAMES)
@given(made=rows_and_tokens(all_valid=True))
def test_the_value_and_its_json_are_the_same(name, made):
    record, _, _ = made
    fmt = get_format(name)
    assert json.loads(b"".join(fmt.json_parts(record))) == fmt.encode(record)


@pytest.mark.parametrize("name", FORMAT_NAMES)
@given(made=rows_and_tokens(all_valid=True), data=st.data())
def test_increments_of_a_stream_join_to_the_whole(name, made, data):
    record, token_ids, ids = made
    fmt = get_format(name)
    if not fmt.streams:
        return
    cut = st.integers(record.start, record.stop)
    edges = [record.start, *sorted(data.draw(st.lists(cut, max_size=4))), record.stop]
    parts = [
        fmt.decode(fmt.encode(record.slice(a, b)), record.schema, token_ids[: b + 1], a)
        for a, b in pairwise(edges)
    ]
    joined = RoutedExperts.concat(parts)
    assert np.array_equal(joined.ids_TLK, ids)
    joined.check_tokens(token_ids)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_ids_around_the_width_of_a_byte_survive(name):
    schema = make_schema(num_experts=512, top_k=4)
    ids = np.array([[[255, 256, 511, 0], [256, 0, 255, 511]]], np.uint16)
    record = RoutedExperts.from_rows(schema, ids, tokens(2))
    fmt = get_format(name)
    assert fmt.decode(fmt.encode(record), schema, tokens(2)).ids_TLK.tolist() == ids.tolist()


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_the_largest_ids_survive(name):
    schema = make_schema(num_experts=65536, top_k=2)
    ids = np.array([[[65535, 32768], [32767, 0]]], np.uint16)
    record = RoutedExperts.from_rows(schema, ids, tokens(2))
    fmt = get_format(name)
    assert fmt.decode(fmt.encode(record), schema, tokens(2)).ids_TLK.tolist() == ids.tolist()


@pytest.mark.parametrize("name", WITHOUT_MASK)
def test_a_format_without_a_mask_refuses_absent_rows_and_names_the_first(name):
    with pytest.raises(RecordError, match=r"absent, the first at position 4; .*no mask.*slice"):
        get_format(name).json_parts(make_record(4).pad(tokens(6)))


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("layer_ids", [(0, 1, 2, 3), (1, 2, 3), (0, 2), (3,), (0, 1, 3)])
def test_layers_keep_their_places(name, layer_ids):
    schema = make_schema(layer_ids=layer_ids)
    ids = random_ids(schema, 23, 5)
    record = RoutedExperts.from_rows(schema, ids, tokens(24))
    fmt = get_format(name)
    assert np.array_equal(fmt.decode(fmt.encode(record), schema, tokens(24)).ids_TLK, ids)


@given(st.lists(st.binary(max_size=9), max_size=8))
def test_base64_in_pieces_is_base64_of_the_whole(buffers):
    pieces = list(base64_pieces(memoryview(buffer) for buffer in buffers))
    assert b"".join(pieces) == base64.b64encode(b"".join(buffers))
