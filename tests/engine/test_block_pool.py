"""The block pool against a model of plain sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routebook.engine.block_hash import extend_block_hashes
from routebook.engine.block_pool import BlockPool
from routebook.errors import IntegrityError


def test_least_recently_freed_block_is_evicted_first() -> None:
    pool = BlockPool(3)
    blocks, _ = pool.allocate(3)
    for block_id, name in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.name(block_id, name)
    pool.free([blocks[1]])
    pool.free([blocks[0], blocks[2]])
    assert pool.allocate(1) == ([blocks[1]], [b"b"])
    # Of one request's blocks the tail goes first: a prefix is worth more than what follows it.
    assert pool.allocate(1) == ([blocks[2]], [b"c"])
    assert pool.find([b"a", b"b"]) == [blocks[0]]


def test_a_hit_leaves_the_free_queue() -> None:
    pool = BlockPool(2)
    (block_id,), _ = pool.allocate(1)
    pool.name(block_id, b"a")
    pool.free([block_id])
    assert pool.num_free_among([block_id]) == 1
    pool.take(pool.find([b"a"]))
    assert pool.num_free == 1
    assert pool.allocate(1)[1] == []
    assert pool.find([b"a"]) == [block_id]


def test_renaming_moves_the_hash() -> None:
    pool = BlockPool(2)
    (first, second), _ = pool.allocate(2)
    pool.name(first, b"a")
    pool.name(second, b"a")
    assert pool.find([b"a"]) == [first]
    pool.rename(second, b"a")
    assert pool.find([b"a"]) == [second]
    pool.free([first])
    assert pool.allocate(1) == ([first], [])


def test_recount_names_a_leak_and_a_double_owner() -> None:
    pool = BlockPool(2)
    (block_id,), _ = pool.allocate(1)
    with pytest.raises(IntegrityError, match=f"block {block_id}: 1 references held, 0 in use"):
        pool.check_integrity([])
    with pytest.raises(IntegrityError, match="1 references held, 2 in use"):
        pool.check_integrity([[block_id], [block_id]])
    pool.check_integrity([[block_id]])


@given(
    st.lists(st.integers(0, 9), max_size=20),
    st.lists(st.integers(0, 9), max_size=20),
    st.integers(1, 5),
)
def test_block_hashes_are_equal_exactly_for_equal_prefixes(
    left: list[int], right: list[int], block_size: int
) -> None:
    hashes: list[list[bytes]] = [[], []]
    extend_block_hashes(hashes[0], left, block_size)
    extend_block_hashes(hashes[1], right, block_size)
    for index, (a, b) in enumerate(zip(*hashes, strict=False)):
        end = (index + 1) * block_size
        assert (a == b) == (left[:end] == right[:end])


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 5), st.integers(0, 30))
def test_block_hashes_grow_without_changing(tokens: list[int], block_size: int, cut: int) -> None:
    whole: list[bytes] = []
    extend_block_hashes(whole, tokens, block_size)
    grown: list[bytes] = []
    extend_block_hashes(grown, tokens[:cut], block_size)
    extend_block_hashes(grown, tokens, block_size)
    assert grown == whole
