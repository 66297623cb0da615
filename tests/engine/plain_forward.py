"""Rows of the bundled model as plain transformers computes them, under several versions of its weights.

Legend of shape suffixes: T = positions, L = MoE layers, N = rows of one forward, K = top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from itertools import groupby
from typing import Any

import numpy as np
import torch

from routebook.routes import RoutedExperts
from tests.capture.recorder import ExpertsRecorder

_DIFFERENT = 3
"""Versions with weights of their own; then they come again."""
_NOISE = 0.05
"""Share of random change; enough to route many tokens elsewhere."""


class PlainModels:
    """The same model under several weights.

    Args:
        model: a transformers model, which becomes version 0.
    """

    def __init__(self, model: Any) -> None:
        model.eval()
        model.set_attn_implementation("eager")
        model.set_experts_implementation("eager")
        self._models = [model, *(_changed(model, seed) for seed in range(1, _DIFFERENT))]

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        """Parameters of a version."""
        weights: dict[str, torch.Tensor] = self._models[version % _DIFFERENT].state_dict()
        return weights

    @torch.inference_mode()
    def rows(
        self, token_ids: Sequence[int], versions: Sequence[int], forced: RoutedExperts | None
    ) -> np.ndarray:
        """Ids `[T, L, K]` of the first tokens.

        Args:
            token_ids: at least as many as `versions`.
            versions: by position, of the weights that compute it over the keys and values of those before.
            forced: a record from position 0 on whose valid rows are taken instead of the routers' choice.
        """
        cache, start, parts = None, 0, []
        for version, positions in groupby(versions, key=lambda version: version % _DIFFERENT):
            stop = start + len(list(positions))
            model, recorder = self._models[version], ExpertsRecorder()
            with recorder.recording(model), _forcing(model, forced, start, stop):
                cache = model(
                    input_ids=torch.tensor([token_ids[start:stop]]),
                    past_key_values=cache,
                    use_cache=True,
                ).past_key_values
            parts.append(recorder.rows.numpy())
            start = stop
        return np.concatenate(parts)


def _changed(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    other = deepcopy(model)
    for parameter in other.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.data += _NOISE * parameter.data.std() * noise
    return other


@contextmanager
def _forcing(model: Any, forced: RoutedExperts | None, start: int, stop: int) -> Iterator[None]:
    """Let the routers of a Qwen3 model answer with the record's rows, written out by hand for this family."""
    with ExitStack() as stack:
        stop = min(stop, forced.stop) if forced is not None else start
        if forced is not None and start < stop:
            routers = [m for m in model.modules() if type(m).__name__ == "Qwen3MoeTopKRouter"]
            valid_N = torch.from_numpy(forced.valid_T[start:stop].copy())
            for layer, router in enumerate(routers):
                ids_NK = torch.from_numpy(forced.ids_TLK[start:stop, layer].astype(np.int64))
                handle = router.register_forward_hook(_answer(ids_NK, valid_N))
                stack.callback(handle.remove)
        yield


def _answer(forced_NK: torch.Tensor, valid_N: torch.Tensor) -> Callable[..., Any]:
    def hook(module: Any, args: Any, output: Any) -> Any:
        logits, weights, ids_NK = output
        ids_NK = ids_NK.clone()
        ids_NK[: len(valid_N)][valid_N] = forced_NK[valid_N]
        probabilities = logits.softmax(-1, dtype=torch.float32).gather(-1, ids_NK)
        weights = (probabilities / probabilities.sum(-1, keepdim=True)).to(weights.dtype)
        return logits, weights, ids_NK

    return hook
