"""Two processes (gloo, DistributedDataParallel), each with an engine and with records of its own."""

from __future__ import annotations

import json

import pytest

from tests.replay.rank import run_ranks

pytest.importorskip("trl")


def test_two_processes_replay_each_their_own_rollouts(tmp_path):
    run_ranks("tests.replay.trl.distributed_run", 2, tmp_path)
    a, b = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    for report in (a, b):
        assert report["is_split"] == "DistributedDataParallel"
        # Two generations of 4 sequences a process, in the pass of the old log-probabilities and in one loss.
        assert report["right"] == [True] * 16
        assert len(report["tokens"]) == 8
    # The eight completions of a prompt lie on both processes and were sampled apart.
    sampled = {tuple(ids) for report in (a, b) for ids in report["tokens"]}
    assert len(sampled) == 16
    assert (a["gaps"], a["shares"], a["versions"]) == (b["gaps"], b["shares"], b["versions"])
    assert a["shares"] == [1.0] * 4
    assert a["versions"] == [1.0, 2.0]
