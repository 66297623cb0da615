"""What the ranks of the distributed tests run; the first one writes a JSON file.

Usage: torchrun --nproc-per-node N -m tests.replay.megatron.distributed_run FILE

Legend of shape suffixes: T = rows of a rank, L = MoE layers, K = top-k.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from routebook.replay.megatron import RouterBridge, parallel_rank
from routebook.routes import RoutedExperts
from routebook.routes.layout import ParallelRank, RankRows, collect_records
from tests.replay.megatron import cpu, models, taken
from tests.replay.megatron.launch import tell

MODES: dict[str, dict[str, int]] = {
    "single": {},
    "tp2-sp": {"tensor": 2},
    "ep2": {"expert": 2},
    "pp2": {"pipeline": 2},
    "pp2-vpp2": {"pipeline": 2, "virtual": 2},
    "tp2-sp-ep2": {"tensor": 2, "expert": 2},
    "tp2-sp-pp2": {"tensor": 2, "pipeline": 2},
    "ep2-pp2-vpp2": {"expert": 2, "pipeline": 2, "virtual": 2},
}
WORLDS = {
    1: ("single",),
    2: ("tp2-sp", "ep2", "pp2", "pp2-vpp2", "tp2-sp-ep2"),
    4: ("tp2-sp-pp2", "ep2-pp2-vpp2"),
}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "block": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 1,
    },
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}
NUM_MICRO_BATCHES = 4


def start(mode: str) -> dict[str, Any]:
    """Make the process groups; the model's options that belong to them."""
    sizes = MODES[mode]
    names = {
        "tensor_model_parallel_size": sizes.get("tensor", 1),
        "pipeline_model_parallel_size": sizes.get("pipeline", 1),
        "expert_model_parallel_size": sizes.get("expert", 1),
        "virtual_pipeline_model_parallel_size": sizes.get("virtual"),
    }
    models.start(**names, expert_tensor_parallel_size=1)
    return names | {"sequence_parallel": "tensor" in sizes, "expert_tensor_parallel_size": 1}


def seeds() -> list[int]:
    """Micro-batches of this rank; data-parallel ranks have others."""
    from megatron.core import parallel_state

    first = 100 * parallel_state.get_data_parallel_rank()
    return list(range(first, first + NUM_MICRO_BATCHES))


def own_records(chunks: list[Any]) -> dict[int, list[RoutedExperts]]:
    """What the model itself chose in each micro-batch, from the pieces of all ranks."""
    from megatron.core import parallel_state

    with ExitStack() as recording:
        calls = [recording.enter_context(taken.recorded_ids(chunk)) for chunk in chunks]
        models.run(chunks, seeds(), forward_only=True)
    mine = {parallel_rank(c): _stack(ids) for c, ids in zip(chunks, calls, strict=True) if ids}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (parallel_state.get_data_parallel_rank(), mine))
    pieces = [m for dp_rank, m in everyone if dp_rank == parallel_state.get_data_parallel_rank()]
    return {
        seed: _collect(chunks[0].config, seed, index, {k: v for m in pieces for k, v in m.items()})
        for index, seed in enumerate(seeds())
    }


def _stack(ids_of_layers: list[list[torch.Tensor]]) -> np.ndarray:
    """`[micro-batches, T, L, K]`."""
    return torch.stack([torch.stack(ids) for ids in ids_of_layers], 2).numpy()


def _collect(
    config: Any, seed: int, index: int, pieces: dict[ParallelRank, np.ndarray]
) -> list[RoutedExperts]:
    batch = models.batch_of(config, models.records_of(seed), seed)
    rows = {}
    for rank, ids in pieces.items():
        given = batch.rows_for(rank)
        rows[rank] = RankRows(
            ids_TLK=np.where(given.padding_T[:, None, None], -1, ids[index]),
            valid_T=~given.padding_T,
            padding_T=given.padding_T,
            layer_ids=given.layer_ids,
        )
    return collect_records(batch.layout, models.SCHEMA, rows, batch.token_ids)


RUNS = {"none": {1}, "full": {2}, "selective": {2}, "block": {1, 2}}
"""How often a router runs for a micro-batch; `block` recomputes the first layer of a chunk only."""


def foreign_maps_hold(chunks: list[Any], maps: list[Any], runs: set[int]) -> bool:
    """Whether every call of every router took the rows of a micro-batch, each of them as often."""
    for chunk, of_chunk in zip(chunks, maps, strict=True):
        for entry, calls in enumerate(of_chunk):
            names = [_micro_batch_of(chunk, entry, map_TE) for map_TE in calls]
            counts = {seed: names.count(seed) for seed in seeds()}
            times = set(counts.values())
            if len(times) != 1 or not times <= runs or sum(counts.values()) != len(names):
                return False
    return True


def _micro_batch_of(chunk: Any, entry: int, map_TE: torch.Tensor) -> int | None:
    for seed in seeds():
        batch = models.batch_of(chunk.config, models.records_of(seed), seed)
        rows = batch.rows_for(parallel_rank(chunk))
        ids_TK = torch.from_numpy(rows.ids_TLK)[:, entry]
        if taken.has_routes(map_TE, ids_TK, torch.from_numpy(rows.valid_T)):
            return seed
    return None


def foreign_run(chunks: list[Any], recompute: str) -> tuple[bool, list[torch.Tensor]]:
    """Whether routes that no router chose were taken, and the gradients."""
    with ExitStack() as hooks:
        maps = [hooks.enter_context(taken.routing_maps(chunk)) for chunk in chunks]
        with RouterBridge(chunks, models.SCHEMA).schedule() as schedule:
            models.run(chunks, seeds(), schedule)
    return foreign_maps_hold(chunks, maps, RUNS[recompute]), models.gradients(chunks)


def report(mode: str, recompute: str) -> dict[str, Any]:
    chunks = models.build(**start(mode), **RECOMPUTE[recompute])
    native = models.run(chunks, seeds()), models.gradients(chunks)
    records = own_records(chunks)
    bridge = RouterBridge(chunks, models.SCHEMA)
    with bridge.schedule() as schedule:
        losses = models.run(chunks, seeds(), schedule, records.__getitem__)
        kept = sum(tap.num_kept for tap in bridge.taps)
    own = losses, models.gradients(chunks)
    foreign_taken, foreign = foreign_run(chunks, recompute)
    plain = models.build(**start(mode))
    _, foreign_plain = foreign_run(plain, "none")
    return {
        "losses_equal": native[0] == own[0],
        "gradients_equal": _equal(native[1], own[1]),
        "stale": kept + models.stale_entries(chunks),
        "foreign_taken": foreign_taken,
        "foreign_differs": not _equal(native[1], foreign),
        "recompute_equal": _equal(foreign, foreign_plain),
    }


def _equal(some: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(some) > 0 and all(torch.equal(a, b) for a, b in zip(some, other, strict=True))


def main(path: Path) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as monkey:
        cpu.patch(monkey)
        mine = {
            f"{mode}/{recompute}": report(mode, recompute)
            for mode in WORLDS[dist.get_world_size()]
            for recompute in RECOMPUTE
        }
    tell(path, mine)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
