"""The pool's memory: where chunks lie, who holds them, and that its own recount finds what is wrong."""

from __future__ import annotations

import random

import numpy as np
import pytest

from routebook.errors import IntegrityError
from routebook.ledger import RowPool
from routebook.ledger.free_extents import FreeExtents
from routebook.routes.provenance import Origin
from routebook.routes.schema import RouteSchema

SCHEMA = RouteSchema(layer_ids=(0, 1), num_experts=300, top_k=3, num_hidden_layers=2)


def make_pool(chunks: int = 8, block_size: int = 4) -> RowPool:
    return RowPool(SCHEMA, block_size, initial_chunks=chunks, growth_factor=2.0)


def numbered_rows(count: int, first: int = 0) -> np.ndarray:
    rows = np.arange(first, first + count, dtype=np.uint16)
    return np.broadcast_to(rows[:, None, None], SCHEMA.shape(count)).copy()


def rows_of(chunks: np.ndarray, block_size: int = 4) -> np.ndarray:
    return (chunks[:, None] * block_size + np.arange(block_size)).ravel()


def test_chunks_of_one_owner_lie_side_by_side() -> None:
    pool = make_pool(chunks=64)
    first, second = pool.allocate(5), pool.allocate(1)
    assert np.diff(first).tolist() == [1] * 4
    for _ in range(10):
        second = np.append(second, pool.allocate(1, after=int(second[-1])))
        first = np.append(first, pool.allocate(1, after=int(first[-1])))
    assert (np.diff(first) == 1).all()
    assert (np.diff(second) == 1).all()


def test_scattered_free_chunks_are_used_before_the_pool_grows() -> None:
    pool = make_pool(chunks=8)
    chunks = pool.allocate(8)
    pool.release(chunks[::2])
    assert sorted(pool.allocate(4)) == sorted(chunks[::2])
    assert pool.num_chunks == 8
    pool.allocate(1)
    assert pool.num_chunks == 16


@pytest.mark.parametrize("adjacent", [True, False])
def test_rows_survive_growth_and_read_back_in_any_order(adjacent: bool) -> None:
    pool = make_pool(chunks=40)
    chunks = pool.allocate(40)
    chunks = chunks if adjacent else np.random.default_rng(0).permutation(chunks)
    pool.write(rows_of(chunks), numbered_rows(160), int(Origin.DECODE), 9)
    pool.allocate(500)
    ids, origin, version = pool.read(chunks)
    assert (ids == numbered_rows(160)).all()
    assert (origin == Origin.DECODE).all()
    assert (version == 9).all()


@pytest.mark.parametrize("count", [2, 64])
def test_a_missing_chunk_reads_as_absent_beside_chunk_0(count: int) -> None:
    pool = make_pool(chunks=count)
    chunks = np.sort(pool.allocate(count))
    pool.write(rows_of(chunks), numbered_rows(4 * count), int(Origin.PREFILL), 1)
    ids, origin, _ = pool.read(np.concatenate([[-1], chunks]))
    assert not origin[:4].any()
    assert origin[4:].all()
    assert (ids[4:] == numbered_rows(4 * count)).all()


def test_a_chunk_is_handed_out_again_with_every_row_absent() -> None:
    pool = make_pool(chunks=1)
    chunk = pool.allocate(1)
    pool.write(rows_of(chunk), numbered_rows(4), int(Origin.DECODE), 1)
    assert pool.complete(chunk).all()
    assert pool.release(chunk).tolist() == chunk.tolist()
    assert pool.allocate(1).tolist() == chunk.tolist()
    assert not pool.present(rows_of(chunk)).any()


def test_a_chunk_is_free_when_its_last_owner_lets_go() -> None:
    pool = make_pool(chunks=2)
    chunk = pool.allocate(1)
    pool.retain(np.repeat(chunk, 2))
    assert not len(pool.release(chunk))
    assert pool.release(np.repeat(chunk, 2)).tolist() == chunk.tolist()
    with pytest.raises(AssertionError, match="more often"):
        pool.release(chunk)


def test_the_recount_finds_a_wrong_count_a_leak_and_a_double_owner() -> None:
    expected = np.zeros(4, np.int64)

    leak = make_pool(chunks=4)
    (chunk,) = leak.allocate(1)
    with pytest.raises(IntegrityError, match=f"chunk {chunk} has 0 owners and a count of 1"):
        leak.check(expected)

    lost = make_pool(chunks=4)
    lost.refs_C[lost.allocate(1)] = 0
    with pytest.raises(IntegrityError, match="neither free nor held"):
        lost.check(expected)

    double = make_pool(chunks=4)
    double.refs_C[2] = expected[2] = 1
    with pytest.raises(IntegrityError, match="chunk 2 is free and held"):
        double.check(expected)


def test_the_recount_finds_double_entries_of_the_free_list() -> None:
    pool = make_pool(chunks=4)
    pool.free._length_at[2] = 1
    with pytest.raises(IntegrityError, match="free extent"):
        pool.check(np.zeros(4, np.int64))
    del pool.free._length_at[2]
    pool.free.total += 1
    with pytest.raises(IntegrityError, match="4 free chunks listed, 5 counted"):
        pool.check(np.zeros(4, np.int64))
    pool.free.total -= 1
    pool.free._start_before[4] = 1
    with pytest.raises(IntegrityError, match="has no end"):
        pool.check(np.zeros(4, np.int64))


def test_free_extents_agree_with_a_set() -> None:
    rng = random.Random(3)
    extents, free, held = FreeExtents(), set(range(100)), []
    extents.add(0, 100)
    for _ in range(3000):
        if held and rng.random() < 0.5:
            start, length = held.pop(rng.randrange(len(held)))
            extents.add(start, length)
            free |= set(range(start, start + length))
        else:
            count = rng.randint(0, min(len(free), 9))
            at = rng.choice((None, rng.randrange(100)))
            taken = extents.take(count, at)
            chunks = [c for start, length in taken for c in range(start, start + length)]
            assert len(chunks) == count
            assert len(set(chunks) & free) == count
            if count and at in free and at - 1 not in free:
                assert chunks[0] == at
            free -= set(chunks)
            held += taken
        assert extents.check(100) == sorted(free)
        assert extents.total == len(free)
        assert len(extents._by_length) < 600
