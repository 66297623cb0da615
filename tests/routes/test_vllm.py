from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routebook.errors import DamagedError, FormatError, RecordError, TruncatedError
from routebook.routes import Origin, Provenance, RoutedExperts, from_vllm, to_vllm
from tests.routes.strategies import make_record, make_schema, random_ids, rows_and_tokens, tokens


def npy(array: np.ndarray) -> str:
    """As vLLM writes it: numpy's own np.save, then base64."""
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def load(text: str) -> np.ndarray:
    """As vLLM's consumers read it."""
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


def all_layers(ids: np.ndarray, layer_ids: tuple[int, ...], num_hidden_layers: int) -> np.ndarray:
    full = np.zeros((len(ids), num_hidden_layers, ids.shape[2]), ids.dtype)
    for entry, layer in enumerate(layer_ids):
        full[:, layer] = ids[:, entry]
    return full


@given(rows_and_tokens(all_valid=True))
def test_what_is_written_is_what_numpy_would_write(made):
    record, _, ids = made
    schema = record.schema
    expected = all_layers(ids, schema.layer_ids, schema.num_hidden_layers)
    loaded = load(to_vllm(record))
    assert loaded.dtype == expected.dtype
    assert np.array_equal(loaded, expected)
    assert to_vllm(record) == npy(expected)


@given(rows_and_tokens(all_valid=True), st.integers(0, 5))
def test_what_numpy_wrote_is_read(made, weight_version):
    record, token_ids, ids = made
    schema = record.schema
    text = npy(all_layers(ids, schema.layer_ids, schema.num_hidden_layers))
    read = from_vllm(text, schema, token_ids, record.start, weight_version=weight_version)
    transferred = Provenance(record.start, record.stop, weight_version, Origin.TRANSFERRED)
    assert read.schema == schema
    assert (read.start, read.stop) == (record.start, len(token_ids) - 1)
    assert np.array_equal(read.ids_TLK, ids)
    assert read.provenance == ((transferred,) if record.num_rows else ())
    read.check_tokens(token_ids)


def test_ids_around_the_width_of_a_byte_survive():
    schema = make_schema(num_experts=512, top_k=4)
    ids = np.array([[[255, 256, 511, 0], [256, 0, 255, 511]]], np.uint16)
    record = RoutedExperts.from_rows(schema, ids, tokens(2))
    assert from_vllm(to_vllm(record), schema, tokens(2)).ids_TLK.tolist() == ids.tolist()


def test_absent_rows_cannot_be_written():
    with pytest.raises(RecordError, match=r"absent.*no mask"):
        to_vllm(make_record(4).pad(tokens(6)))


SCHEMA = make_schema()
IDS = random_ids(SCHEMA, 6, 1) % 15 + 1
FULL = all_layers(IDS, SCHEMA.layer_ids, 4)


def changed(index: tuple[object, ...], value: int) -> np.ndarray:
    array = FULL.copy()
    array[index] = value
    return array


@pytest.mark.parametrize(
    ("array", "word"),
    [
        (FULL.astype(np.int32), "header"),
        (FULL.astype(np.uint16), "uint16, but ids of this model are uint8"),
        (FULL.astype(np.uint64), "uint64"),
        (FULL[:, :3], "3 layers"),
        (FULL[:, :, :1], "top-k 1"),
        (FULL[:5], "5 rows, but the tokens after the start leave 6"),
        (np.concatenate([FULL, FULL]), "12 rows"),
        (FULL.reshape(6, -1), "header"),
        (FULL[None], "header"),
        (np.asfortranarray(FULL), "Fortran"),
        (changed((2, 0, 1), 3), "layer 0 has ids"),
        (changed((slice(None), 2), 3), "layer 2 has ids"),
        (changed((4, 3), 0), r"position 4, layer 3, is \[0 0\]: it was not captured"),
    ],
)
def test_another_array_than_the_model_and_the_tokens_ask_for_is_refused(array, word):
    assert len(load(npy(array)))  # numpy itself reads it
    with pytest.raises(FormatError, match=word):
        from_vllm(npy(array), SCHEMA, tokens(7))


def test_an_id_that_no_expert_has_is_refused():
    with pytest.raises(RecordError, match="expert 16"):
        from_vllm(npy(changed((4, 3, 0), 16)), SCHEMA, tokens(7))


def test_the_only_pick_may_be_expert_0():
    schema = make_schema(top_k=1)
    read = from_vllm(npy(np.zeros((2, 4, 1), np.uint8)), schema, tokens(3))
    assert read.ids_TLK.tolist() == np.zeros((2, 2, 1)).tolist()


@pytest.mark.parametrize("start", [-1, 7, 99])
def test_a_start_outside_the_tokens_is_refused(start):
    with pytest.raises(FormatError, match=f"start={start}"):
        from_vllm(npy(FULL), SCHEMA, tokens(7), start)


@pytest.mark.parametrize("number", [0, *range(2, 10)])
def test_another_digit_in_the_dtype_is_refused(number):
    data = base64.b64decode(npy(FULL)).replace(b"|u1", b"|u%d" % number)
    with pytest.raises(FormatError):
        from_vllm(base64.b64encode(data).decode(), SCHEMA, tokens(7))


def test_pickles_are_never_opened():
    pickled = np.empty((6, 4, 2), object)
    with pytest.raises(FormatError, match="header"):
        from_vllm(npy(pickled), SCHEMA, tokens(7))


@pytest.mark.parametrize("text", ["", "!", "AAA", "é", "AAAA", "PK"])
def test_text_that_is_not_base64_of_an_array_is_refused(text):
    with pytest.raises(FormatError):
        from_vllm(text, SCHEMA, tokens(7))


@pytest.mark.parametrize("noise", ["!", "\n", "=", "é"])
def test_text_that_is_base64_with_noise_in_it_is_refused(noise):
    text = npy(FULL)
    with pytest.raises(FormatError, match="not base64"):
        from_vllm(text[:8] + noise + text[8:], SCHEMA, tokens(7))


def test_a_cut_file_is_refused_at_every_length():
    data = base64.b64decode(npy(FULL))
    for length in range(len(data)):
        with pytest.raises(TruncatedError):
            from_vllm(base64.b64encode(data[:length]).decode(), SCHEMA, tokens(7))


def test_bytes_after_the_array_are_refused():
    data = base64.b64decode(npy(FULL)) + b"x"
    with pytest.raises(DamagedError, match="1 bytes follow"):
        from_vllm(base64.b64encode(data).decode(), SCHEMA, tokens(7))


def test_a_minor_version_that_numpy_does_not_know_is_refused():
    data = bytearray(base64.b64decode(npy(FULL)))
    data[7] = 1
    with pytest.raises(FormatError, match=r"version 1\.1 is not known"):
        from_vllm(base64.b64encode(data).decode(), SCHEMA, tokens(7))


@given(st.data())
@settings(max_examples=1000)
def test_damage_raises_nothing_but_errors_of_ours(data):
    damaged = bytearray(base64.b64decode(npy(FULL)))
    index = st.integers(0, len(damaged) - 1)
    for at, value in data.draw(st.lists(st.tuples(index, st.integers(0, 255)), max_size=5)):
        damaged[at] = value
    try:
        read = from_vllm(base64.b64encode(damaged).decode(), SCHEMA, tokens(7))
    except (FormatError, RecordError):
        return
    expected = load(base64.b64encode(damaged).decode())
    assert np.array_equal(read.ids_TLK, expected[:, list(SCHEMA.layer_ids)])


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_the_file_that_numpy_writes_is_read(version):
    file = io.BytesIO()
    np.lib.format.write_array(file, FULL, version=version, allow_pickle=False)
    text = base64.b64encode(file.getvalue()).decode()
    assert np.array_equal(from_vllm(text, SCHEMA, tokens(7)).ids_TLK, IDS)
