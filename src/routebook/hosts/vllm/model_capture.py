"""Capture on the model of one worker: its MoE layers bound, their rows of each step, and those of other stages.

A pipeline stage knows only its own layers. The rows of a step go to the worker that answers the scheduler, by messages
of their own beside vLLM's, so no tensor that vLLM passes between stages is touched.

Legend of shape suffixes: T = rows of the step, L = MoE layers, K = top-k.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from routebook.errors import CaptureError, DenseModelError
from routebook.hosts.vllm.message import StepMessage
from routebook.hosts.vllm.releases import Release
from routebook.hosts.vllm.step_buffer import StepBuffer, check_captured
from routebook.routes.schema import RouteSchema

_log = logging.getLogger(__name__)

_TAG = 0x726F
"""Tells our messages between stages from vLLM's."""


@dataclass(frozen=True, slots=True)
class _Layers:
    """MoE layers of one stage."""

    layer_ids: tuple[int, ...]
    num_experts: int
    top_k: int


class Stages:
    """The pipeline stages, as one of their workers sees them.

    Args:
        ranks: global ranks of the stages' workers, in order of the layers.
        place: of this worker among them.
        group: a group of these ranks on the CPU, None if there is one stage.
    """

    def __init__(self, ranks: Sequence[int], place: int, group: dist.ProcessGroup | None) -> None:
        self._ranks, self._place, self._group = list(ranks), place, group
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []

    @property
    def is_last(self) -> bool:
        """Whether this stage answers the scheduler."""
        return self._place == len(self._ranks) - 1

    def gather_layers(self, own: _Layers) -> list[_Layers]:
        """What all stages have; every stage calls this."""
        if self._group is None:
            return [own]
        all_layers: list[_Layers | None] = [None] * len(self._ranks)
        dist.all_gather_object(all_layers, own, self._group)
        return [layers for layers in all_layers if layers is not None]

    def send(self, ids_TLK: torch.Tensor) -> None:
        """Send rows to the last stage, without waiting; the ones before have long arrived."""
        for work, _ in self._sent:
            work.wait()
        last = self._ranks[-1]
        sending = dist.isend(ids_TLK, last, group=self._group, tag=_TAG)
        assert sending is not None, "this rank is in the group"
        self._sent = [(sending, ids_TLK)]

    def receive(self, place: int, shape: tuple[int, int, int]) -> torch.Tensor:
        """Rows int32 of the stage at `place`."""
        ids_TLK = torch.empty(shape, dtype=torch.int32)
        dist.recv(ids_TLK, self._ranks[place], group=self._group, tag=_TAG)
        return ids_TLK


class ModelCapture:
    """Rows of one worker's steps.

    Args:
        model: its model, or its part of it.
        release: how this vLLM's layers are found and bound.
        num_hidden_layers: of the whole model.
        max_tokens: the most rows one forward can have, padding included.
        stages: the pipeline.
        answers: whether this worker is the one of its stage whose rows count.

    Raises:
        DenseModelError: no stage has an MoE layer.
        UncapturableError: a router that cannot be captured, by name.
        CaptureError: layers that do not fit together in one record.
    """

    def __init__(
        self,
        model: nn.Module,
        release: Release,
        *,
        num_hidden_layers: int,
        max_tokens: int,
        stages: Stages,
        answers: bool,
    ) -> None:
        self._stages, self._answers = stages, answers
        self._model, self._release = model, release
        found = list(release.moe_layers(model))
        sizes = {
            (m.moe_config.num_logical_experts, m.moe_config.experts_per_token) for *_, m in found
        }
        if len(sizes) > 1:
            raise CaptureError(
                f"layers of {sorted(sizes)} (experts, top-k) do not fit in one record"
            )
        experts, top_k = sizes.pop() if sizes else (0, 0)
        own = _Layers(tuple(layer for _, layer, _ in found), experts, top_k)
        self._parts = stages.gather_layers(own)
        self.schema = _schema(self._parts, num_hidden_layers)
        device = next(model.parameters()).device
        self._buffer = StepBuffer(len(found), top_k, max_tokens, device)
        self._proven = False
        self.bind()

    def bind(self) -> None:
        """Let the routers write. Again after vLLM has made their kernels anew."""
        for index, (path, _, module) in enumerate(self._release.moe_layers(self._model)):
            self._release.bind(path, module, self._buffer.writer(index))

    def begin(self, num_tokens: int) -> None:
        """A step of `num_tokens` rows comes."""
        self._buffer.begin(num_tokens)

    def end(self, num_tokens: int) -> StepMessage | None:
        """The step has run: its rows, in the one worker that answers the scheduler.

        Raises:
            CaptureError: in the first step that has rows, if a router did not write.
        """
        if not self._answers or not num_tokens:
            return None
        ids_TLK = self._buffer.take(num_tokens)
        if not self._stages.is_last:
            self._stages.send(ids_TLK)
            return None
        shapes = [(num_tokens, len(p.layer_ids), self.schema.top_k) for p in self._parts[:-1]]
        others = [self._stages.receive(place, shape) for place, shape in enumerate(shapes)]
        return self._message(torch.cat([*others, ids_TLK], dim=1))

    def _message(self, ids_TLK: torch.Tensor) -> StepMessage | None:
        """Nothing is sent of a step in which a router did not write; the requests in it are told."""
        try:
            check_captured(ids_TLK, self.schema)
        except CaptureError as error:
            if not self._proven:
                raise
            _log.error("%s", error)
            return None
        self._proven = True
        ids = np.ascontiguousarray(ids_TLK.numpy(), self.schema.dtype)
        return StepMessage(schema=self.schema, ids_TLK=ids)


def _schema(parts: Sequence[_Layers], num_hidden_layers: int) -> RouteSchema:
    with_experts = [part for part in parts if part.layer_ids]
    if not with_experts:
        raise DenseModelError(
            "the model has no MoE layer that vLLM runs, so there is nothing to capture"
        )
    sizes = {(part.num_experts, part.top_k) for part in with_experts}
    if len(sizes) > 1:
        raise CaptureError(f"stages of {sorted(sizes)} (experts, top-k) do not fit in one record")
    experts, top_k = sizes.pop()
    return RouteSchema(
        layer_ids=tuple(layer for part in with_experts for layer in part.layer_ids),
        num_experts=experts,
        top_k=top_k,
        num_hidden_layers=num_hidden_layers,
    )
