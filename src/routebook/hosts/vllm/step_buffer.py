"""The worker's buffer of one step: a tensor write for each router, one look at the whole when the step has run.

Unlike `capture.buffer`, nothing in it counts calls: vLLM may compile the forward pass, and then only tensor writes are
left of a hook. What proves that a router wrote is the poison that stood there before.

Legend of shape suffixes: M = rows of the buffer, N = rows of the forward, padding included, T = rows of the step,
L = MoE layers of this rank, K = top-k.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from routebook.errors import CaptureError
from routebook.routes.schema import RouteSchema

_POISON = -1


class StepBuffer:
    """Choices of all MoE layers of this rank in one step, `[M, L, K]` int32.

    Args:
        num_layers: MoE layers of this rank.
        top_k: experts picked per token.
        max_tokens: the most rows one forward can have, padding included.
        device: where the routers run.
    """

    def __init__(self, num_layers: int, top_k: int, max_tokens: int, device: torch.device) -> None:
        shape = (max_tokens, num_layers, top_k)
        # A buffer made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            self._ids_MLK = torch.full(shape, _POISON, dtype=torch.int32, device=device)

    def writer(self, layer_index: int) -> Callable[[torch.Tensor], None]:
        """Return what a router calls with its logical ids `[N, K]`."""
        column_MK = self._ids_MLK[:, layer_index]

        def write(ids_NK: torch.Tensor) -> None:
            column_MK[: ids_NK.shape[0]] = ids_NK

        return write

    def begin(self, num_tokens: int) -> None:
        """A step of `num_tokens` rows comes."""
        assert num_tokens <= len(self._ids_MLK), "vLLM scheduled more tokens than it said it would"
        self._ids_MLK[:num_tokens] = _POISON

    def take(self, num_tokens: int) -> torch.Tensor:
        """Rows `[T, L, K]` int32 of the step that has run, the caller's own, not looked at yet."""
        return self._ids_MLK[:num_tokens].clone()


def check_captured(ids_TLK: torch.Tensor, schema: RouteSchema) -> None:
    """Refuse rows in which a router did not write.

    Args:
        ids_TLK: int32, all layers of the schema.
        schema: the model's.

    Raises:
        CaptureError: a layer left a row without ids of experts; it names the layers.
    """
    wrong_TLK = (ids_TLK < 0) | (ids_TLK >= schema.num_experts)
    if not wrong_TLK.any():
        return
    wrong_L = wrong_TLK.any(dim=2).any(dim=0).tolist()
    layers = [layer for layer, wrong in zip(schema.layer_ids, wrong_L, strict=True) if wrong]
    raise CaptureError(
        f"layers {layers} left rows without an expert's id in a step of {len(ids_TLK)} tokens; the"
        " capture did not run in them (clear vLLM's compile cache if the forward is compiled)"
    )
