"""What the routers of a model chose, told by what they say themselves: an oracle that knows nothing of the bridge.

Legend of shape suffixes: T = rows, E = experts, L = MoE layers, K = top-k.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.replay.megatron.models import routers_of


@contextmanager
def recorded_ids(chunk: Any) -> Iterator[list[list[torch.Tensor]]]:
    """Ids `[T, K]` of every call of each router, by megatron-core's own recording."""
    calls: list[list[torch.Tensor]] = []
    for router in routers_of(chunk):
        replay, of_layer = router.router_replay, []
        replay.record_indices = of_layer.append
        replay.set_router_replay_action(record_action())
        calls.append(of_layer)
    yield calls
    for router in routers_of(chunk):
        del router.router_replay.record_indices
        router.router_replay.clear_router_replay_action()


def record_action() -> Any:
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    return RouterReplayAction.RECORD


@contextmanager
def routing_maps(chunk: Any) -> Iterator[list[list[torch.Tensor]]]:
    """Maps bool `[T, E]` of every call of each router, which the dispatcher gets."""
    calls: list[list[torch.Tensor]] = []
    handles = []
    for router in routers_of(chunk):
        of_layer: list[torch.Tensor] = []
        calls.append(of_layer)
        handles.append(
            router.register_forward_hook(
                lambda module, args, output, of_layer=of_layer: of_layer.append(output[1].bool())
            )
        )
    yield calls
    for handle in handles:
        handle.remove()


def has_routes(map_TE: torch.Tensor, ids_TK: torch.Tensor, valid_T: torch.Tensor) -> bool:
    """Whether the valid rows of a map are exactly these ids."""
    expected_TE = torch.zeros_like(map_TE).scatter(1, ids_TK.clamp(min=0), True)
    return torch.equal(map_TE[valid_T], expected_TE[valid_T])
