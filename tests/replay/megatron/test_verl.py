"""verl's own chain takes our records, and the bridge holds in models whose `RouterReplay` verl has replaced."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.replay.megatron.launch import reports_of

pytest.importorskip("megatron.core.models.gpt.gpt_model")
if find_spec("verl") is None or find_spec("ray") is None:
    pytest.skip("verl is not installed with all that it imports", allow_module_level=True)

ROWS = ("as_dict", "engine_rows", "bridge")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_verl_puts_our_rows_where_we_do(num_ranks, tmp_path):
    """Under tensor and sequence parallelism too; full recomputation, verl's flip against the bridge's own way."""
    for rank in reports_of("tests.replay.megatron.verl_run", num_ranks, tmp_path):
        assert rank["patched"]
        assert [rank[name] for name in ROWS] == [True] * 3
        assert [rank[f"gradients_{name}"] for name in ROWS] == [True] * 3
        assert rank["differs_from_native"]
