"""Rows on their way from the device to the scheduler.

The pair mirrors vLLM's `LogprobsTensors` / `LogprobsLists`: device tensors that are private to one step, then their
copy on the host. Legend: T = tokens of the step in batch order, L = MoE layers, K = top-k.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch


def download(tensor: torch.Tensor) -> torch.Tensor:
    """Queue a copy to the host on the current stream; wait for its event before the result is looked at."""
    if tensor.device.type == "cpu":
        return tensor
    # The stream on which it was made may not give its memory to another tensor before it is copied.
    tensor.record_stream(torch.cuda.current_stream(tensor.device))
    # Pinned: a copy to pageable memory would block here. The allocator reuses freed pinned pages.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class RoutedExpertsLists(NamedTuple):
    """Rows of one step on the host, in the schema's dtype and in the order of the batch that ran."""

    ids_TLK: npt.NDArray[np.unsignedinteger]


class RoutedExpertsTensors(NamedTuple):
    """Rows of one step on the device, already narrowed; no later step can overwrite them.

    `ids_TLK` is uint8, or int16 holding the bits of uint16, because few torch kernels know uint16.
    """

    ids_TLK: torch.Tensor

    def to_cpu_nonblocking(self) -> RoutedExpertsTensors:
        """Queue the copy to the host on the current stream; wait for its event before `tolists`."""
        return RoutedExpertsTensors(download(self.ids_TLK))

    def tolists(self) -> RoutedExpertsLists:
        """View the host tensor as numpy. The copy queued before must have completed."""
        ids_TLK = self.ids_TLK.numpy()
        return RoutedExpertsLists(ids_TLK.view(np.uint16) if ids_TLK.dtype == np.int16 else ids_TLK)
