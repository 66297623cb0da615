"""What the ranks of the distributed tests run; the first one prints a JSON line.

Usage: torchrun --nproc-per-node 2 -m tests.replay.distributed_run MODE FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from routebook.replay import RouteSession
from tests.replay.helpers import foreign_ids, gradients, loss_of, tokens
from tests.replay.rank import end_rank


def seeds_of(mode: str, rank: int) -> tuple[int, int]:
    """Seeds of a rank's two micro-batches; under a tensor-parallel plan all ranks see the same."""
    first = 0 if mode.startswith("tp") else 10 * rank
    return first, first + 1


def load(mode: str, path: Path) -> Any:
    options = {}
    if mode.startswith("tp"):
        expert_parallel = {"ep_size": 2} if mode.startswith("tp-ep") else {}
        options["distributed_config"] = DistributedConfig(
            tp_size=2, tp_plan="auto", **expert_parallel
        )
    model = AutoModelForCausalLM.from_pretrained(path, **options).train()
    if mode.endswith("checkpointed"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def shard(model: Any) -> None:
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)


def run(
    module: nn.Module, session: RouteSession | None, batches: Sequence[Any], routes: Sequence[Any]
) -> tuple[list[float], list[bool]]:
    """Two forwards, then two backwards; the losses, and whether the experts were those of the routes."""
    losses, taken = [], []
    for input_ids, ids_NLK in zip(batches, routes, strict=True):
        if session is None:
            losses.append(loss_of(module, input_ids))
            continue
        with session.forward(ids_NLK) as forwards:
            losses.append(loss_of(module, input_ids))
        taken.append(torch.equal(forwards[0].topk_ids, ids_NLK))
    for loss in losses:
        loss.backward()
    return [loss.item() for loss in losses], taken


def local(grads: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads.values()]


def main(mode: str, path: Path) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = load(mode, path)
    module = nn.parallel.DistributedDataParallel(model) if mode.startswith("ddp") else model
    if mode.startswith("fsdp2") and "late" not in mode:
        shard(model)
    seeds = seeds_of(mode, dist.get_rank())
    batches = [tokens(2, 13, seed) for seed in seeds]
    if "late" in mode:
        session = RouteSession(module)
        shard(model)
    run(module, None, batches, batches)
    native = local(gradients(model))
    if "late" not in mode:
        session = RouteSession(module)
    own = []
    for input_ids in batches:
        with torch.no_grad(), session.recording() as forwards:
            loss_of(module, input_ids)
        own.append(forwards[0].topk_ids)
    run(module, session, batches, own)
    replayed = local(gradients(model))
    equal = all(torch.equal(a, b) for a, b in zip(native, replayed, strict=True))
    routes = [foreign_ids(session.schema, 26, seed) for seed in seeds]
    losses, taken = run(module, session, batches, routes)
    session.close()
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, {"equal": equal, "losses": losses, "taken": all(taken)})
    if dist.get_rank() == 0:
        print(json.dumps(gathered))
    end_rank()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
