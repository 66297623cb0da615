"""A rank reads its own rows of its own layers, and makes no copy but its result."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from routebook.routes import (
    MicroBatch,
    PackedSequences,
    ParallelPlan,
    ParallelRank,
    RoutedExperts,
    RouteSchema,
    RowLayout,
)

PLAN = ParallelPlan(
    tensor_parallel_size=2,
    sequence_parallel=True,
    context_parallel_size=2,
    pipeline_parallel_size=2,
)
RANK = ParallelRank(tp_rank=1, cp_rank=0, pp_rank=1)


def micro_batch(record: RoutedExperts, num_tokens: int) -> MicroBatch:
    layout = RowLayout(plan=PLAN, sequences=PackedSequences.pack([num_tokens], PLAN))
    return MicroBatch(layout=layout, records=[record], token_ids=[list(range(num_tokens))])


def read_with_other_pages_closed(closed_too: str) -> None:
    """Run in a process of its own: a read of any page that is not the rank's ends it.

    Each layer of each row fills one page of memory, of 2048 picks of two bytes.
    """
    import ctypes
    import mmap

    num_tokens, page = 16, 4096
    schema = RouteSchema(layer_ids=(0, 1), num_experts=2**16, top_k=page // 2, num_hidden_layers=2)
    memory = mmap.mmap(-1, num_tokens * 2 * page)
    ids = np.frombuffer(memory, np.uint16).reshape(num_tokens, 2, page // 2)
    ids[...] = np.arange(num_tokens)[:, None, None]
    batch = micro_batch(RoutedExperts.from_rows(schema, ids, list(range(num_tokens))), num_tokens)
    # Zigzag gives context rank 0 the positions 0-3 and 12-15; tensor rank 1 has the second half of those.
    own = {(position, 1) for position in (12, 13, 14, 15)}
    if closed_too == "one of its own":
        own.remove((13, 1))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for position in range(num_tokens):
        for layer in range(2):
            address = ids.ctypes.data + (position * 2 + layer) * page
            if (position, layer) not in own:
                assert protect(address, page, 0) == 0
    rows = batch.rows_for(RANK)
    assert rows.ids_TLK[:, 0, 0].tolist() == [12, 13, 14, 15]
    print("read")


@pytest.mark.skipif(sys.platform != "linux", reason="closes pages of memory with mprotect")
@pytest.mark.parametrize("closed_too", ["nothing", "one of its own"])
def test_no_other_row_and_no_other_layer_is_read(closed_too):
    code = (
        "from tests.routes.test_layout_reach import read_with_other_pages_closed as run;"
        f" run({closed_too!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if closed_too == "nothing":
        assert (done.returncode, done.stdout) == (0, "read\n"), done.stderr
    else:
        assert (done.returncode, done.stdout) == (-11, ""), "closing pages has no effect"


@pytest.mark.parametrize("widen", [True, False])
def test_no_memory_is_taken_but_for_the_result(widen):
    num_tokens = 4096
    schema = RouteSchema(layer_ids=tuple(range(16)), num_experts=64, top_k=4, num_hidden_layers=16)
    ids = np.zeros(schema.shape(num_tokens), schema.dtype)
    batch = micro_batch(RoutedExperts.from_rows(schema, ids, list(range(num_tokens))), num_tokens)
    tracemalloc.start()
    rows = batch.rows_for(RANK, widen=widen)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    batch.rows_for(RANK, widen=widen, out=rows.ids_TLK)
    _, peak_again = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    masks = rows.valid_T.nbytes + rows.padding_T.nbytes
    assert rows.ids_TLK.shape == (num_tokens // 4, 8, 4)
    assert peak < rows.ids_TLK.nbytes + masks + 16_000
    assert peak_again - before < masks + 16_000
