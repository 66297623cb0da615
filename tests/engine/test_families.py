"""Every model family through the whole engine, against a plain transformers forward."""

from __future__ import annotations

import pytest

from tests.engine.family_run import FamilyResult, run_family
from tests.families import HYBRIDS, REFUSED, SERVED
from tests.model_table import TABLE, family_line, refusal, refusal_line

LOGPROB_TOLERANCE = 2e-4
"""Some families compute softmax, norms or states in float32 even in a float64 model."""


@pytest.fixture(scope="module")
def table_lines() -> set[str]:
    return set(TABLE.read_text().splitlines())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SERVED)
def test_a_family_that_works(name: str, table_lines: set[str]) -> None:
    result = run_family(SERVED[name])
    check(result)
    assert family_line(result) in table_lines, "the table is stale: run `make models`"


def check(result: FamilyResult) -> None:
    assert result.pairs > 200
    assert result.different == 0
    assert result.packed_different == 0
    assert result.bitwise
    assert result.largest_logprob_error < LOGPROB_TOLERANCE
    assert (result.cached_rows > 0) == (result.name not in HYBRIDS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_is_refused(name: str, table_lines: set[str]) -> None:
    message = refusal(name)
    assert REFUSED[name].reason in message
    assert refusal_line(name, message) in table_lines, "the table is stale: run `make models`"


def test_the_table_names_every_family(table_lines: set[str]) -> None:
    named = {line.split("|")[1].strip() for line in table_lines if line.startswith("| ")}
    assert named - {"family"} == SERVED.keys() | REFUSED.keys()
