"""Every cell of the matrix in docs/vllm.md: vLLM's rows against plain transformers. Needs vLLM; see run.sh.

Each runs in a process of its own and prints what it compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from routebook.hosts.vllm.releases import installed_version
from tests.hosts.vllm.cells import CELLS

REPOSITORY = Path(__file__).parents[3]

# By version, not by what a release's module says: to import that is to import vLLM, whose warnings are errors here,
# and a method that is lost from its list would be a cell that is skipped.
SKIPPED = {
    ("ngram", "0.32.0"): "speculation is refused in this release",
    ("reload", "0.32.0"): "vLLM's own reload fails on this model, whose weights its kernel pads",
}


@pytest.fixture(scope="module", autouse=True)
def _vllm():
    pytest.importorskip("vllm")


def run(module: str, *arguments: str) -> dict[str, Any]:
    """What a module prints as its last line of JSON."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.hosts.vllm.{module}", *arguments],
        check=False,
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    told: dict[str, Any] = json.loads(line)
    return told


def check(told: dict[str, Any], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{name}: {told}")
    assert told["different"] == 0
    assert told["pairs"] > 1000
    # The same rows moved by one are other rows: the comparison can fail.
    assert told["shifted"] < told["pairs"] / 5


@pytest.mark.parametrize("name", CELLS)
def test_rows_are_those_of_plain_transformers(name, tmp_path, capsys):
    reason = SKIPPED.get((name, installed_version()))
    if reason is not None:
        pytest.skip(reason)
    told = run("cells", name, str(tmp_path))
    check(told, name, capsys)
    for fact, least in CELLS[name].at_least.items():
        assert told.get(fact, 0) >= least, (fact, told)


def test_an_aborted_request_has_the_rows_of_the_tokens_it_returned(capsys):
    told = run("abort_run")
    check(told, "abort", capsys)
    assert told["reasons"] == ["length", "abort", "abort"]


def test_rows_over_vllms_own_endpoints(capsys):
    check(run("server_run"), "server", capsys)


def test_the_plugin_puts_rows_into_an_engine_that_others_make(capsys):
    told = run("plugin_run")
    assert told["without"] is None
    check(told, "plugin", capsys)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("native", "enable_return_routed_experts"),
        ("dense", "no MoE layer"),
        ("expert-parallel", "enable_expert_parallel"),
        ("worker", "cannot be combined"),
        ("unknown-option", "has no option 'colour'"),
        ("release", "was not run in vLLM 0.1.2"),
        ("lost-hook", "left rows without an expert's id"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(name, reason):
    told = run("refusal_run", name)
    assert reason in told["error"], told
