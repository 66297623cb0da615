"""The table of model families, made by running every one of them: `python -m tests.model_table docs/models.md`."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import torch

from routebook.engine.llm import LLM
from routebook.errors import ModelError
from tests.engine.family_run import FamilyResult, run_family
from tests.families import FAMILIES, HYBRIDS, REFUSED, SERVED

TABLE = Path(__file__).parents[1] / "docs" / "models.md"

_HEAD = """# Model families

Made by `make models` with transformers {transformers}; `make test` runs every family again and compares.

Every family is a small random model in float64. It generates {mode} with prompts that share a prefix, chunked
prefill and sampling, once in the reference mode and once packed, and every (token, layer) pair is compared with what
the experts of a plain transformers forward of the finished sequence were given. *Bitwise* says whether, in the
reference mode, other batches and chunks gave the same bits.

| family | pairs compared | different, reference | different, packed | bitwise | prefix caching |
|---|---|---|---|---|---|
"""
_REFUSED_HEAD = """
## Refused

| family | what the engine says |
|---|---|
"""


def family_line(result: FamilyResult) -> str:
    """One line of the table of families that work."""
    caching = "off: recurrent state" if result.name in HYBRIDS else "on"
    bitwise = "yes" if result.bitwise else "no"
    return (
        f"| {result.name} | {result.pairs} | {result.different} | {result.packed_different}"
        f" | {bitwise} | {caching} |"
    )


def refusal(name: str) -> str:
    """What the engine says about a family that it refuses."""
    try:
        LLM(REFUSED[name].build())
    except ModelError as error:
        return str(error)
    raise AssertionError(f"{name} was not refused")


def refusal_line(name: str, message: str) -> str:
    """One line of the table of refused families."""
    return f"| {name} | {message.replace('|', '/')} |"


def table(results: dict[str, FamilyResult], refusals: dict[str, str]) -> str:
    """The whole page."""
    assert results.keys() == SERVED.keys()
    assert refusals.keys() == REFUSED.keys()
    head = _HEAD.format(transformers=version("transformers"), mode="five completions")
    lines = [family_line(results[name]) for name in SERVED]
    refused = [refusal_line(name, refusals[name]) for name in REFUSED]
    return head + "\n".join(lines) + "\n" + _REFUSED_HEAD + "\n".join(refused) + "\n"


def main(path: str) -> None:
    """Run all families and write the page."""
    torch.set_num_threads(1)
    results = {name: run_family(family) for name, family in SERVED.items()}
    Path(path).write_text(table(results, {name: refusal(name) for name in REFUSED}))
    print(f"wrote {path}: {len(results)} of {len(FAMILIES)} families work")


if __name__ == "__main__":
    main(sys.argv[1])
