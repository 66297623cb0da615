"""One forward pass of a model in a session: what its routers are told, and what they took.

Legend of shape suffixes: N = rows, L = MoE layers, K = top-k, E = experts.
"""

from __future__ import annotations

import torch

from routebook.capture.guided import GivenRows
from routebook.errors import ReplayError
from routebook.replay.batch import RouteBatch
from routebook.replay.sequences import ModelCall
from routebook.routes import RoutedExperts, RouteSchema


class RoutedForward:
    """What every layer's router took in one forward; its recomputation in backward takes the same again.

    Args:
        schema: the model's layers, experts and top-k.
        call: what the decoder was called with.
        batch: routes to take; None records the live router.
        keeps_own: note the live router's own choice beside a replayed one, at the cost of its top-k.
    """

    def __init__(
        self,
        schema: RouteSchema,
        call: ModelCall,
        batch: RouteBatch | None,
        keeps_own: bool = False,
    ) -> None:
        self.schema = schema
        self.call = call
        self.batch = batch
        self.keeps_own = keeps_own
        self.is_open = True
        self._is_whole = batch is not None and bool(batch.forced_N.all())
        self._given_LNK = () if batch is None else batch.ids_NLK.unbind(1)
        self._ids_LNK: list[torch.Tensor | None] = [None] * schema.num_layers
        self._own_LNK: list[torch.Tensor | None] = [None] * schema.num_layers

    @property
    def num_rows(self) -> int:
        """Rows of the forward, padding included."""
        return self.call.num_rows

    @property
    def topk_ids(self) -> torch.Tensor:
        """int64 `[N, L, K]`: what was taken in every row, those of padding and of the live router included."""
        return _stacked(self._ids_LNK)

    @property
    def own_topk_ids(self) -> torch.Tensor:
        """int64 `[N, L, K]`: what the live router would have taken, on the same hidden states."""
        return _stacked(self._own_LNK)

    @property
    def token_mask(self) -> torch.Tensor:
        """bool `[N]`: rows that hold a token, on the CPU."""
        if self.batch is not None:
            return self.batch.real_N.cpu()
        return torch.from_numpy(self.call.sequences().token_mask)

    @property
    def num_native(self) -> int:
        """Tokens that took the live router's choice, padding not counted."""
        forced = 0 if self.batch is None else int(self.batch.forced_N.sum())
        return int(self.token_mask.sum()) - forced

    def expert_counts(self) -> torch.Tensor:
        """How many tokens each expert got, int64 `[L, E]`; rows of padding are not counted.

        This is what a trainer that balances load by a bias should count.
        """
        real_N = self.token_mask.to(self.topk_ids.device)
        counts = [ids_NK[real_N].flatten() for ids_NK in self.topk_ids.unbind(1)]
        return torch.stack([ids.bincount(minlength=self.schema.num_experts) for ids in counts])

    def records(self, weight_version: int = 0) -> list[RoutedExperts]:
        """One record per sequence, a row for every token that was an input.

        Raises:
            ReplayError: the decoder was given embeddings, so that the tokens are not known.
        """
        if self.call.input_ids_BS is None:
            raise ReplayError(
                "the decoder was given embeddings, not input_ids; take topk_ids instead"
            )
        tokens_N = self.call.input_ids_BS.detach().cpu().reshape(-1).numpy()
        ids_NLK = self.topk_ids.cpu().numpy().astype(self.schema.dtype)
        return [
            RoutedExperts.from_rows(
                self.schema,
                ids_NLK[first : first + length],
                tokens_N[first : first + length],
                version_T=weight_version,
            )
            for first, length in self.call.sequences().spans
        ]

    def given(self, index: int, num_rows: int) -> GivenRows | None:
        """What the router of layer `index` of the layer axis is told; see `RouteGuide`.

        Raises:
            ReplayError: it runs twice in this forward, or on other rows.
        """
        layer, taken_NK = self.schema.layer_ids[index], self._ids_LNK[index]
        if num_rows != self.num_rows:
            raise ReplayError(
                f"layer {layer} routes {num_rows} rows in a forward of {self.num_rows}; it sees a shard of "
                "the tokens, or another batch"
            )
        if taken_NK is not None and self.is_open:
            raise ReplayError(f"layer {layer} chose experts twice in one forward")
        if self.batch is None:
            return None
        forced_N = None if self._is_whole else self.batch.forced_N
        if taken_NK is not None:
            return GivenRows(taken_NK, forced_N, is_repeated=True)
        return GivenRows(self._given_LNK[index], forced_N)

    def took(self, index: int, ids_NK: torch.Tensor, own_ids_NK: torch.Tensor | None) -> None:
        """Note what the router of a layer took; of a recorded forward, only the first time."""
        if self.batch is not None or self.is_open:
            self._ids_LNK[index] = ids_NK
        if self.keeps_own and self.is_open:
            self._own_LNK[index] = own_ids_NK

    def finish(self) -> None:
        """Close the forward.

        Raises:
            ReplayError: a layer's router did not run, so that its rows were not consumed.
        """
        self.is_open = False
        layers = zip(self.schema.layer_ids, self._ids_LNK, strict=True)
        missing = [layer for layer, ids_NK in layers if ids_NK is None]
        if missing:
            raise ReplayError(
                f"layers {missing} consumed none of the {self.num_rows} rows of a forward; their routers did "
                "not run, or a fused kernel chose in their place"
            )


def _stacked(ids_LNK: list[torch.Tensor | None]) -> torch.Tensor:
    known = [ids_NK for ids_NK in ids_LNK if ids_NK is not None]
    if len(known) != len(ids_LNK):
        raise ReplayError("these ids were not kept, or the forward has not finished")
    return torch.stack(known, dim=1)
