"""The device buffer into which routers write their choices during a forward pass.

Legend of shape suffixes: N = rows of the forward, M = `max_tokens`, L = MoE layers, K = top-k.
"""

from __future__ import annotations

import torch

from routebook.capture.outputs import RoutedExpertsTensors
from routebook.errors import CaptureError
from routebook.routes.schema import RouteSchema

POISON = -1
"""An id that no expert has; a row that still holds it was never written."""


class CaptureBuffer:
    """Rows of the forward pass that is running, `[M, L, K]` int32.

    `begin`, one `capture` per layer, `snapshot`: in this order, for every forward. `capture` is one
    tensor write without a look at values, so that it can be compiled or recorded into a graph.

    Args:
        schema: layers, experts and top-k; says the dtype of a snapshot.
        max_tokens: the most rows one forward can have.
        device: where the routers run.
    """

    def __init__(self, schema: RouteSchema, max_tokens: int, device: torch.device) -> None:
        self.schema = schema
        self.max_tokens = max_tokens
        # A buffer made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            self._ids_MLK = torch.full(
                (max_tokens, schema.num_layers, schema.top_k),
                POISON,
                dtype=torch.int32,
                device=device,
            )
        self._columns_MK = self._ids_MLK.unbind(1)
        self._targets_NK = list(self._columns_MK)
        self._dtype = torch.uint8 if schema.dtype.itemsize == 1 else torch.int16
        self._num_tokens: int | None = None
        self._captured = [False] * schema.num_layers
        self._proven = False

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the buffer takes."""
        return self._ids_MLK.nbytes

    def begin(self, num_tokens: int) -> None:
        """Start a forward of `num_tokens` rows; rows of the one before are no longer available.

        Raises:
            CaptureError: more rows than the buffer was made for.
        """
        if not 0 <= num_tokens <= self.max_tokens:
            raise CaptureError(
                f"a forward of {num_tokens} tokens does not fit the capture buffer of "
                f"{self.max_tokens}; raise max_tokens to the largest step"
            )
        if num_tokens != len(self._targets_NK[0]):
            # Steps of decodes often have the same number of rows: the views are then made once.
            self._targets_NK = [column_MK[:num_tokens] for column_MK in self._columns_MK]
        self._num_tokens = num_tokens
        self._captured = [False] * self.schema.num_layers

    def capture(self, layer_index: int, topk_ids: torch.Tensor) -> None:
        """Write one layer's choice, `[N, K]` of any integer dtype, for the N rows of this forward.

        Args:
            layer_index: place on the schema's layer axis, not the decoder layer.
            topk_ids: logical expert ids in the router's order.

        Raises:
            CaptureError: other rows than `begin` announced, or a layer that has captured already;
                nothing is written.
        """
        num_tokens = self._num_tokens
        layer = self.schema.layer_ids[layer_index]
        if num_tokens is None:
            raise CaptureError(f"layer {layer} captured in a forward that no begin() announced")
        if topk_ids.shape != (num_tokens, self.schema.top_k):
            raise CaptureError(
                f"layer {layer} captured ids of shape {tuple(topk_ids.shape)} in a forward of "
                f"{num_tokens} tokens with top-k {self.schema.top_k}; nothing else is accepted"
            )
        if self._captured[layer_index]:
            raise CaptureError(f"layer {layer} captured twice in a forward of {num_tokens} tokens")
        self._targets_NK[layer_index].copy_(topk_ids)
        self._captured[layer_index] = True

    def snapshot(self) -> RoutedExpertsTensors:
        """Narrow the finished forward's rows on the device into a private tensor `[N, L, K]`.

        The first snapshot that has rows also looks at their values, once.

        Raises:
            CaptureError: no forward began, a layer did not capture, or a captured row holds no
                expert's id.
        """
        if self._num_tokens is None:
            raise CaptureError("there is nothing to take a snapshot of; begin() was not called")
        if not all(self._captured):
            layers = zip(self.schema.layer_ids, self._captured, strict=True)
            missing = [layer for layer, captured in layers if not captured]
            raise CaptureError(
                f"layers {missing} did not capture in a forward of {self._num_tokens} tokens; their "
                "routers did not run, or a compiled forward was built without the capture"
            )
        ids_NLK = self._ids_MLK[: self._num_tokens]
        self._num_tokens = None
        if not self._proven and ids_NLK.numel():
            self._prove(ids_NLK)
        return RoutedExpertsTensors(ids_NLK.to(self._dtype))

    def _prove(self, ids_NLK: torch.Tensor) -> None:
        wrong_L = ((ids_NLK < 0) | (ids_NLK >= self.schema.num_experts)).any(dim=2).any(dim=0)
        wrong = [
            layer for layer, w in zip(self.schema.layer_ids, wrong_L.tolist(), strict=True) if w
        ]
        if wrong:
            raise CaptureError(
                f"layers {wrong} left rows without an expert's id in the first forward; the capture "
                "does not run in it (clear the compile cache if the forward is compiled)"
            )
        self._proven = True
