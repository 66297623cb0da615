"""The soak command adds up what its processes did, and says where one of them failed."""

from __future__ import annotations

import pytest

from tests.engine.soak import BATCH, soak
from tests.engine.totals import Totals


def fine(seed: int, num_examples: int) -> Totals:
    return Totals(examples=num_examples, rows=seed)


def broken(seed: int, num_examples: int) -> Totals:
    assert seed != 8, "request 3.1, position 7: wrong"
    return fine(seed, num_examples)


def test_all_examples_run_each_batch_with_its_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak(2 * BATCH + 7, 10, 1, fine) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert f"{2 * BATCH + 7} examples" in last
    assert "33 rows," in last


def test_a_wrong_row_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak(3 * BATCH, 7, 1, broken) == 1
    error = capsys.readouterr().err
    assert "request 3.1, position 7: wrong" in error
    assert f"python -m tests.engine.soak --examples {BATCH} --seed 8" in error
