"""A run of a pipeline schedule under replay: forwards and backwards of some micro-batches through a model's chunks.

Legend of shape suffixes: T = rows of the rank, L = MoE layers of its chunk, K = top-k.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from routebook.errors import ReplayError, SchemaMismatchError
from routebook.replay.batch import RouteBatch
from routebook.replay.megatron.router_tap import LayerRoutes, RouterTap
from routebook.routes import RouteSchema
from routebook.routes.layout import RankRows


class ReplaySchedule:
    """Gives each forward its routes; made by `RouterBridge.schedule`.

    Args:
        schema: of the whole model.
        chunks: the taps of every module that a forward step may be given, layer by layer.
    """

    def __init__(
        self, schema: RouteSchema, chunks: Mapping[nn.Module, tuple[RouterTap, ...]]
    ) -> None:
        self._schema = schema
        self._chunks = chunks
        self._is_open = True

    @contextmanager
    def forward(self, chunk: nn.Module, rows: RankRows) -> Iterator[None]:
        """The forward of one micro-batch through one chunk takes these routes, and so does its recomputation.

        Whether a backward follows is told by `torch.is_grad_enabled()`. Rows that are not valid, padding or absent,
        take the live router's choice.

        Args:
            chunk: the model, or the chunk that a forward step was given.
            rows: what `MicroBatch.rows_for` cut for this rank and chunk, of int64 or of the schema's own dtype.

        Raises:
            ReplayError: the chunk is none of the bridge's, the schedule is over, or a router did not ask for its
                routes exactly once.
            SchemaMismatchError: rows of other layers, of another shape or dtype, with an id that no expert has, or
                with an expert twice.
        """
        taps = self._taps_of(chunk)
        routes = _layer_routes(self._schema, rows, tuple(tap.layer_id for tap in taps))
        keeps = torch.is_grad_enabled()
        for tap, layer in zip(taps, routes, strict=True):
            tap.begin(layer, keeps=keeps)
        try:
            yield
        except BaseException:
            for tap in taps:
                tap.end()
            raise
        idle = [tap.name for tap in taps if not tap.end()]
        if idle:
            raise ReplayError(
                f"the forward is over and {', '.join(idle)} did not ask for routes, so that they were not"
                " replayed; the chunk did not run, or something routes past RouterReplay"
            )

    def close(self) -> None:
        """The schedule is over, and takes no more forwards."""
        self._is_open = False

    def check_empty(self) -> None:
        """Check that all routes were taken.

        Raises:
            ReplayError: a checkpointed forward was never recomputed, or somebody else used `RouterReplay` meanwhile.
        """
        taps = {tap.name: tap for taps in self._chunks.values() for tap in taps}
        waiting = {name: tap.num_kept for name, tap in taps.items() if tap.num_kept}
        if waiting:
            name, number = next(iter(waiting.items()))
            raise ReplayError(
                f"the schedule is over, but {number} checkpointed forwards of {name} were never recomputed"
                f" ({len(waiting)} of {len(taps)} routers have such); run backward inside of the schedule, and"
                " passes without one under torch.no_grad()"
            )
        for tap in taps.values():
            tap.check_untouched()

    def _taps_of(self, chunk: nn.Module) -> tuple[RouterTap, ...]:
        if not self._is_open:
            raise ReplayError("the schedule is over; open another one with bridge.schedule()")
        if chunk not in self._chunks:
            raise ReplayError(
                f"a forward of {type(chunk).__name__} that the bridge was not built with; give RouterBridge"
                " the model, or the list of its chunks, that forward steps are given"
            )
        return self._chunks[chunk]


def _layer_routes(
    schema: RouteSchema, rows: RankRows, layer_ids: tuple[int, ...]
) -> list[LayerRoutes]:
    """The rows, checked, layer by layer."""
    if rows.layer_ids != layer_ids:
        raise SchemaMismatchError(
            f"rows of layers {rows.layer_ids} for a chunk that has layers {layer_ids}; the plan splits the"
            " model in another way than the trainer does, or the rows are of another chunk"
        )
    if rows.valid_T.shape != rows.padding_T.shape:
        raise SchemaMismatchError(
            f"{rows.valid_T.shape} flags of validity, but {rows.padding_T.shape} of padding"
        )
    if not layer_ids:
        return []
    forced_T = torch.from_numpy(rows.valid_T)
    ids_TLK = torch.from_numpy(rows.ids_TLK)
    if ids_TLK.is_floating_point() or ids_TLK.shape[:1] != forced_T.shape:
        raise SchemaMismatchError(
            f"ids are {ids_TLK.dtype} of shape {list(ids_TLK.shape)} for {len(forced_T)} rows"
        )
    batch = RouteBatch(
        schema=RouteSchema(
            layer_ids=layer_ids,
            num_experts=schema.num_experts,
            top_k=schema.top_k,
            num_hidden_layers=schema.num_hidden_layers,
        ),
        ids_NLK=ids_TLK.long().masked_fill(~forced_T[:, None, None], 0),
        forced_N=forced_T,
        real_N=~torch.from_numpy(rows.padding_T),
    )
    some_native = None if bool(forced_T.all()) else forced_T
    return [LayerRoutes(ids_TK, some_native) for ids_TK in batch.ids_NLK.unbind(1)]
