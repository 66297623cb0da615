"""Attention of one packed step over the paged pool.

Sequences that have the same number of tokens in the step, above all the decodes with one each, run as one padded
batch. What depends on the step only (blocks, masks) is made once and shared by all layers.

Legend of shape suffixes: T = tokens of the step, B = sequences of a group, n = tokens of each, N = blocks of a context,
C = context length (padded), H = query heads, G = KV heads, D = key size, V = value size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from routebook.engine.attention import AttentionCall
from routebook.engine.input_batch import IntArray, StepInputs
from routebook.engine.kept_contexts import Contexts, KeptContexts
from routebook.engine.kv_pool import KVPool
from routebook.engine.transfers import upload

_MOST_PADDING = 2


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences with equally many tokens in the step."""

    rows_Bn: torch.Tensor | None
    """Their rows in the step; None when the group is the whole step, in order."""
    positions_Bn: torch.Tensor
    blocks_BN: torch.Tensor
    """Blocks of the whole context; entries past a sequence's end repeat its first block and are masked."""


class PagedStep:
    """Writes a step's keys and values into the pool and attends over the pool, layer by layer.

    Args:
        pool: keys and values of all requests.
        inputs: the step.
        block_table: int32 `[rows, blocks]`, blocks of each row of the batch.
        block_size: tokens per block.
        kept: contexts that the step before left, for steps of decodes; None keeps none.
    """

    def __init__(
        self,
        pool: KVPool,
        inputs: StepInputs,
        block_table: np.ndarray,
        block_size: int,
        kept: KeptContexts | None,
    ) -> None:
        self.pool = pool
        self.device = pool.device
        self.block_size = block_size
        self._inputs = inputs
        self._block_table = block_table
        self.slot_mapping_T, self.groups = self._upload()
        self._masks: dict[tuple[int, int | None, int | None], torch.Tensor] = {}
        self._kept = self._begin_kept(kept)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return `[T, H, V]`."""
        self.pool.write(call.layer, self.slot_mapping_T, call.key_TGD, call.value_TGV)
        query_THD = call.query_HTD.transpose(0, 1)
        if self.groups[0].rows_Bn is None:
            return self._attend_group(call, 0, query_THD).flatten(0, 1)
        num_tokens, num_heads, _ = query_THD.shape
        out_THV = query_THD.new_empty(num_tokens, num_heads, self.pool.value_dim(call.layer))
        for index, group in enumerate(self.groups):
            out_THV[group.rows_Bn] = self._attend_group(call, index, query_THD[group.rows_Bn])
        return out_THV

    def _attend_group(self, call: AttentionCall, index: int, query: torch.Tensor) -> torch.Tensor:
        """Attend with the queries of one group, `[B, n, H, D]` or flat; return `[B, n, H, V]`."""
        group = self.groups[index]
        num_seqs, num_tokens = group.positions_Bn.shape
        key_BGCD, value_BGCV = self._contexts(call, group)
        num_kv_heads, context = key_BGCD.shape[1:3]
        num_heads, key_dim = query.shape[-2:]
        mask = self._mask(index, call, context)
        # The query heads of one KV head act as its queries, so nothing needs to be repeated.
        if num_tokens == 1:
            grouped = query.reshape(num_seqs, num_kv_heads, -1, key_dim)
            out = _attend(call, grouped, key_BGCD, value_BGCV, mask)
            return out.reshape(num_seqs, 1, num_heads, -1)
        query_BHnD = query.reshape(num_seqs, num_tokens, num_heads, key_dim).transpose(1, 2)
        grouped = query_BHnD.reshape(num_seqs, num_kv_heads, -1, key_dim)
        mask = mask.repeat(1, 1, num_heads // num_kv_heads, 1)
        out = _attend(call, grouped, key_BGCD, value_BGCV, mask)
        return out.reshape(num_seqs, num_heads, num_tokens, -1).transpose(1, 2)

    def _begin_kept(self, kept: KeptContexts | None) -> KeptContexts | None:
        """Where the contexts of this step are kept, or None if it is not one of decodes alone."""
        if kept is None:
            return None
        first = self.groups[0]
        if first.rows_Bn is None and first.positions_Bn.shape[1] == 1:
            context = first.blocks_BN.shape[1] * self.block_size
            if kept.begin_step(self._inputs, context):
                return kept
        else:
            kept.clear()
        return None

    def _contexts(self, call: AttentionCall, group: Group) -> Contexts:
        """Keys and values of a group's sequences, the step's own included."""
        if self._kept is None:
            return self.pool.read_blocks(call.layer, group.blocks_BN)
        return self._kept.extended(
            call.layer,
            group.positions_Bn.view(-1),
            call.key_TGD,
            call.value_TGV,
            lambda: self.pool.read_blocks(call.layer, group.blocks_BN),
        )

    def _mask(self, index: int, call: AttentionCall, context: int) -> torch.Tensor:
        """What to add to a group's scores, `[B, 1, n, C]`: 0 for keys that the query sees, else -inf."""
        name = (index, call.window, call.chunk)
        if name not in self._masks:
            key_positions_C = torch.arange(context, device=self.device)
            queries = self.groups[index].positions_Bn[:, None, :, None]
            seen = key_positions_C <= queries
            if call.window is not None:
                seen &= key_positions_C > queries - call.window
            if call.chunk is not None:
                seen &= key_positions_C // call.chunk == queries // call.chunk
            # Additive and made once: given booleans, attention would convert them in every layer.
            hidden = torch.full((), float("-inf"), dtype=call.query_HTD.dtype, device=self.device)
            self._masks[name] = torch.where(seen, 0.0, hidden)
        return self._masks[name]

    def _upload(self) -> tuple[torch.Tensor, list[Group]]:
        """Slot mapping and groups on the device, all in one copy."""
        laid_out = [self._lay_out(requests_B) for requests_B in _group_requests(self._inputs)]
        arrays = [array for group in laid_out for array in group]
        slot_mapping_T, *tensors = upload(self.device, self._inputs.slot_mapping_T, *arrays)
        groups = [
            Group(
                rows_Bn=rows_Bn if rows_Bn.numel() else None,
                positions_Bn=positions_Bn,
                blocks_BN=blocks_BN,
            )
            for rows_Bn, positions_Bn, blocks_BN in zip(*[iter(tensors)] * 3, strict=True)
        ]
        return slot_mapping_T, groups

    def _lay_out(self, requests_B: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Rows, positions and blocks of a group; no rows when it is the whole step, in order."""
        inputs = self._inputs
        offsets_n = np.arange(inputs.counts_R[requests_B[0]])
        starts_B = inputs.starts_R[requests_B]
        num_blocks_B = -(-(starts_B + len(offsets_n)) // self.block_size)
        places_N = np.arange(num_blocks_B.max())
        blocks_BN = self._block_table[inputs.rows_R[requests_B], : len(places_N)].astype(np.int64)
        # A sequence that ends earlier is padded with its own first block: its mask hides numbers, but not a NaN,
        # and another request's blocks may hold one.
        blocks_BN = np.where(places_N < num_blocks_B[:, None], blocks_BN, blocks_BN[:, :1])
        rows_Bn = np.zeros((0, 0), np.int64)
        if len(requests_B) < len(inputs.request_ids):
            first_rows_B = (inputs.counts_R.cumsum() - inputs.counts_R)[requests_B]
            rows_Bn = first_rows_B[:, None] + offsets_n
        return rows_Bn, starts_B[:, None] + offsets_n, blocks_BN


def _group_requests(inputs: StepInputs) -> list[IntArray]:
    """Indices of the requests with equally many tokens and contexts that are not too far apart."""
    contexts_R = inputs.starts_R + inputs.counts_R
    # A group is padded to its longest context. Powers of two bound the waste to less than half, also when one
    # long sequence runs beside many short ones; as long as it is small anyway, one group is faster than several.
    is_even = contexts_R.max() * len(contexts_R) <= _MOST_PADDING * contexts_R.sum()
    if is_even and len(inputs.positions_T) == len(contexts_R):
        return [np.arange(len(contexts_R))]
    scale_R = np.ceil(np.log2(contexts_R))
    kinds, kind_R = np.unique(np.stack([inputs.counts_R, scale_R]), axis=1, return_inverse=True)
    return [np.flatnonzero(kind_R == kind) for kind in range(kinds.shape[1])]


def _attend(
    call: AttentionCall,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """Masked attention `[B, G, n, D] x [B, G, C, D] -> [B, G, n, V]`, with what the family adds."""
    if call.sinks_H is None and call.softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=call.scaling)
    sinks = None
    if call.sinks_H is not None:
        per_query = query.shape[2] // (len(call.sinks_H) // key.shape[1])
        sinks = call.sinks_H.view(key.shape[1], -1).repeat_interleave(per_query, dim=1)
    scores = softcapped(query @ key.transpose(-1, -2) * call.scaling, call.softcap)
    return softmax_with_sinks(scores + mask, sinks) @ value


def softcapped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Limit scores smoothly to `(-softcap, softcap)`."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last axis; a sink adds a logit per row whose share is then dropped."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    column = sinks.to(scores.dtype).expand(scores.shape[:-1])[..., None]
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
