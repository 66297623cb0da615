"""verl's real chain from a rollout's array to Megatron's routers, fed with our records, on every rank.

Usage: torchrun --nproc-per-node N -m tests.replay.megatron.verl_run FILE

Legend of shape suffixes: B = batch, T = rows of a rank, N = packed tokens, E = experts, K = top-k.
"""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from routebook.replay.megatron import RouterBridge, parallel_plan, parallel_rank
from routebook.routes import RoutedExperts
from routebook.routes.formats import get_format
from routebook.routes.layout import MicroBatch, PackedSequences, RankRows, RowLayout
from tests.replay.megatron import cpu, models, taken
from tests.replay.megatron.distributed_run import RECOMPUTE
from tests.replay.megatron.launch import tell

PROMPTS = (5, 4)
"""Tokens of each sequence that its prompt has."""


def engine_array(record: RoutedExperts) -> np.ndarray:
    """What verl gets from an engine: `[rows, all decoder layers, top_k]`."""
    return np.load(io.BytesIO(base64.b64decode(get_format("vllm").encode(record))))


def rollout_samples(seed: int) -> list[dict[str, torch.Tensor]]:
    """Each sequence as verl's agent loop hands it to the trainer."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    samples = []
    for tokens_S, record, length, prompt in zip(
        models.tokens_of(seed), models.records_of(seed), models.LENGTHS, PROMPTS, strict=True
    ):
        tokens = tokens_S[:length].tolist()
        output = AgentLoopOutput(
            prompt_ids=tokens[:prompt],
            response_ids=tokens[prompt:],
            response_mask=[1] * (length - prompt),
            routed_experts=engine_array(record),
            metrics=AgentLoopMetrics(),
        )
        samples.append(output.as_dict())
    return samples


def jagged(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def verl_targets(model: Any, samples: list[dict[str, torch.Tensor]], short: bool) -> None:
    """Put the samples' routes into the model's routers as verl's engine does before a forward."""
    from verl.utils.megatron import router_replay_utils as verl

    input_ids = jagged([torch.cat([s["prompts"], s["responses"]]) for s in samples])
    routes = [s["routed_experts"] for s in samples]
    if short:  # As an engine returns them, without as_dict's zero row for the last token.
        routes = [r[:-1] for r in routes]
    response_mask = torch.nn.utils.rnn.pad_sequence(
        [s["response_mask"] for s in samples], batch_first=True
    )
    aligned = verl.align_r3_router_replay_data(jagged(routes), input_ids)
    mask = verl.build_r3_replay_mask(input_ids, response_mask)
    verl.set_router_replay_data(aligned, None, model.config, replay_mask=mask, model=model)


def packed_batch(config: Any, seed: int) -> tuple[MicroBatch, torch.Tensor]:
    """Our rows for the same batch, and its packed tokens `[1, N]`, padded as verl pads them."""
    layout = RowLayout(
        plan=parallel_plan(config),
        sequences=PackedSequences.pack(models.LENGTHS, parallel_plan(config)),
    )
    tokens = [t[:n].numpy() for t, n in zip(models.tokens_of(seed), models.LENGTHS, strict=True)]
    batch = MicroBatch(layout=layout, records=models.records_of(seed), token_ids=tokens)
    padded = np.zeros(layout.sequences.num_rows, np.int64)
    edges = layout.sequences.cu_seqlens_padded
    for first, own in zip(edges, tokens, strict=False):
        padded[first : first + len(own)] = own
    batch.check_input_ids(padded)
    return batch, torch.from_numpy(padded)[None]


def loss_of(model: Any, tokens_BN: torch.Tensor) -> torch.Tensor:
    """Attention over the packed line as one sequence: packed attention has kernels on GPUs only."""
    length = tokens_BN.shape[1]
    mask = torch.ones(length, length).triu(1).bool()[None, None]
    positions = torch.arange(length)[None]
    return model(tokens_BN, positions, mask, labels=tokens_BN.roll(-1, 1)).mean()


def replayed(
    model: Any, rows: RankRows, forward: Callable[[], torch.Tensor]
) -> tuple[bool, list[torch.Tensor]]:
    """Whether the routers take exactly our rows in a forward, and the gradients of its loss."""
    with taken.routing_maps(model) as maps:
        loss = forward()
    valid_T = torch.from_numpy(rows.valid_T)
    holds = all(
        taken.has_routes(calls[0], torch.from_numpy(rows.ids_TLK)[:, layer], valid_T)
        for layer, calls in enumerate(maps)
    )
    loss.backward()
    grads = models.gradients([model])
    clear(model)
    return holds, grads


def verl_forward(model: Any, seed: int, tokens_BN: torch.Tensor, short: bool) -> torch.Tensor:
    from verl.utils.megatron import router_replay_utils as verl

    verl.set_model_router_replay_action(model, verl.RouterReplayAction.REPLAY_FORWARD)
    verl_targets(model, rollout_samples(seed), short)
    loss = loss_of(model, tokens_BN)
    verl.set_model_router_replay_action(model, verl.RouterReplayAction.REPLAY_BACKWARD)
    return loss


def clear(model: Any) -> None:
    for router in models.routers_of(model):
        router.router_replay.clear_indices()
        router.router_replay.clear_router_replay_action()
    model.zero_grad()


def report() -> dict[str, bool]:
    size = dist.get_world_size()
    models.start(tensor_model_parallel_size=size, expert_tensor_parallel_size=1)
    (model,) = models.build(
        tensor_model_parallel_size=size,
        sequence_parallel=size > 1,
        expert_tensor_parallel_size=1,
        **RECOMPUTE["full"],
    )
    batch, tokens_BN = packed_batch(model.config, 1)
    rows = batch.rows_for(parallel_rank(model))
    found = {"patched": type(models.routers_of(model)[0].router_replay).__module__[:4] == "verl"}
    bridge = RouterBridge(model, models.SCHEMA)

    def by_bridge() -> torch.Tensor:
        with schedule.forward(model, rows):
            return loss_of(model, tokens_BN)

    ways = {
        "as_dict": partial(verl_forward, model, 1, tokens_BN, short=False),
        "engine_rows": partial(verl_forward, model, 1, tokens_BN, short=True),
    }
    grads = {}
    for name, way in ways.items():
        found[name], grads[name] = replayed(model, rows, way)
    with bridge.schedule() as schedule:
        found["bridge"], grads["bridge"] = replayed(model, rows, by_bridge)
    for name, of_name in grads.items():
        same = (torch.equal(a, b) for a, b in zip(of_name, grads["bridge"], strict=True))
        found[f"gradients_{name}"] = all(same)
    loss_of(model, tokens_BN).backward()
    native = models.gradients([model])
    pairs = zip(native, grads["bridge"], strict=True)
    found["differs_from_native"] = not all(torch.equal(a, b) for a, b in pairs)
    return found


def main(path: Path) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as monkey:
        cpu.patch(monkey)
        from verl.utils.megatron import router_replay_patch, router_replay_utils

        monkey.setattr(router_replay_utils, "device_name", "cpu")
        router_replay_patch.apply_router_replay_patch()
        mine = report()
    tell(path, mine)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
