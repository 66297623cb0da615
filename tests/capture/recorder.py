"""An independent look at which experts ran: no top-k is intercepted here.

Legend of shape suffixes: N = rows, L = MoE layers, E = experts, K = top-k, H = hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class ExpertsRecorder:
    """Notes, per call in the order of the layers, the ids that experts were run with."""

    def __init__(self) -> None:
        self.ids_LNK: list[torch.Tensor] = []

    @contextmanager
    def recording(self, model: nn.Module) -> Iterator[None]:
        """Watch every MoE layer of the model while inside."""
        handles = [handle for module in model.modules() for handle in self._watch(module)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def rows(self) -> torch.Tensor:
        """All layers' ids of the one forward that ran, `[N, L, K]`."""
        return torch.stack(self.ids_LNK, dim=1)

    def _watch(self, module: nn.Module) -> list[Any]:
        name = type(module).__name__
        if name in ("Llama4TextExperts", "JetMoeParallelExperts"):
            return []
        if name.endswith("Experts"):
            return [module.register_forward_pre_hook(self._experts_input)]
        if name == "Llama4Router":
            return [module.register_forward_hook(self._llama4_scores)]
        if name == "JetMoeMoE":
            return [module.router.register_forward_hook(self._jetmoe_permutation)]
        return []

    def _experts_input(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.ids_LNK.append(args[1].clone())

    def _llama4_scores(self, module: Any, args: Any, output: Any) -> None:
        """An expert that was not chosen has score zero; the order of the chosen is that of their logits."""
        scores_NE, logits_NE = output
        chosen_NE = scores_NE > 0
        assert (chosen_NE.sum(-1) == module.top_k).all()
        masked_NE = logits_NE.masked_fill(~chosen_NE, float("-inf"))
        self.ids_LNK.append(masked_NE.argsort(dim=-1, descending=True)[:, : module.top_k])

    def _jetmoe_permutation(self, module: Any, args: Any, output: Any) -> None:
        """`sorted_pairs` lists (row, pick) pairs in the order of their expert; `expert_size` says how many each has."""
        sorted_pairs, _, _, expert_size, logits_NE = output
        expert_of_pair = torch.empty_like(sorted_pairs)
        expert_of_pair[sorted_pairs] = torch.repeat_interleave(
            torch.arange(module.num_experts), torch.tensor(expert_size)
        )
        self.ids_LNK.append(expert_of_pair.view(logits_NE.shape[0], module.top_k))
