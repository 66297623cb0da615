"""Attention of one packed step over the paged pool.

Tokens that continue a sequence by one (decodes) run as one padded batch; longer pieces run one by one. What depends
on the step only (slots, masks) is made once and shared by all layers.

Legend of shape suffixes: T = tokens of the step, B = decodes, C = context length (padded), n = tokens
of one piece, N = blocks of a context, H = query heads, G = KV heads, D = key size, V = value size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from routebook.engine.attention import AttentionCall
from routebook.engine.input_batch import IntArray, StepInputs
from routebook.engine.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class Piece:
    """Several consecutive tokens of one sequence."""

    rows: slice
    """Its rows in the step."""
    positions_n: torch.Tensor
    blocks_N: torch.Tensor
    """Blocks of its whole context."""


@dataclass(frozen=True, slots=True)
class Decodes:
    """One token each of several sequences."""

    rows_B: torch.Tensor | None
    """Their rows in the step; None when the step holds nothing else."""
    positions_B: torch.Tensor
    blocks_BN: torch.Tensor
    """Blocks of the whole context; entries past a sequence's end point anywhere and are masked."""


class PagedStep:
    """Writes a step's keys and values into the pool and attends over the pool, layer by layer."""

    def __init__(
        self, pool: KVPool, inputs: StepInputs, block_table: np.ndarray, block_size: int
    ) -> None:
        self.pool = pool
        self.device = pool.device
        self.block_size = block_size
        self._inputs = inputs
        self._block_table = block_table
        self.slot_mapping_T = self._tensor(inputs.slot_mapping_T)
        self._first_rows_R = inputs.counts_R.cumsum() - inputs.counts_R
        singles = np.flatnonzero(inputs.counts_R == 1)
        several = np.flatnonzero(inputs.counts_R > 1)
        self.pieces = [self._make_piece(request) for request in several.tolist()]
        self.decodes = self._make_decodes(singles) if len(singles) else None
        self._masks: dict[tuple[int, int | None, int | None], torch.Tensor] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return `[T, H, V]`."""
        self.pool.write(call.layer, self.slot_mapping_T, call.key_TGD, call.value_TGV)
        if self.decodes is not None and self.decodes.rows_B is None:
            return self._attend_decodes(call, self.decodes, call.query_HTD.transpose(0, 1))
        num_heads, num_tokens, _ = call.query_HTD.shape
        value_dim = self.pool.value_dim(call.layer)
        out_THV = call.query_HTD.new_empty(num_tokens, num_heads, value_dim)
        if self.decodes is not None:
            rows_B = self.decodes.rows_B
            query_BHD = call.query_HTD[:, rows_B].transpose(0, 1)
            out_THV[rows_B] = self._attend_decodes(call, self.decodes, query_BHD)
        for index, piece in enumerate(self.pieces):
            out_THV[piece.rows] = self._attend_piece(call, index, piece)
        return out_THV

    def _attend_decodes(
        self, call: AttentionCall, decodes: Decodes, query_BHD: torch.Tensor
    ) -> torch.Tensor:
        """Return `[B, H, V]`."""
        num_seqs, num_heads, key_dim = query_BHD.shape
        context = decodes.blocks_BN.shape[1] * self.block_size
        keys, values = self.pool.read_blocks(call.layer, decodes.blocks_BN.view(-1))
        key_BGCD = keys.view(num_seqs, context, *keys.shape[1:]).transpose(1, 2)
        value_BGCV = values.view(num_seqs, context, *values.shape[1:]).transpose(1, 2)
        # The query heads of one KV head act as its queries, so nothing needs to be repeated.
        grouped = query_BHD.reshape(num_seqs, key_BGCD.shape[1], -1, key_dim)
        mask = self._mask(-1, call, decodes.positions_B[:, None, None], context)
        out = _attend(call, grouped, key_BGCD, value_BGCV, mask)
        return out.reshape(num_seqs, num_heads, -1)

    def _attend_piece(self, call: AttentionCall, index: int, piece: Piece) -> torch.Tensor:
        """Return `[n, H, V]`."""
        keys, values = self.pool.read_blocks(call.layer, piece.blocks_N)
        key_GCD, value_GCV = keys.transpose(0, 1), values.transpose(0, 1)
        query_HnD = call.query_HTD[:, piece.rows]
        num_heads, num_tokens, key_dim = query_HnD.shape
        grouped = query_HnD.reshape(key_GCD.shape[0], -1, key_dim)
        mask = self._mask(index, call, piece.positions_n, key_GCD.shape[1])
        mask = mask.repeat(num_heads // key_GCD.shape[0], 1)
        out = _attend(call, grouped[None], key_GCD[None], value_GCV[None], mask)[0]
        return out.reshape(num_heads, num_tokens, -1).transpose(0, 1)

    def _mask(
        self, index: int, call: AttentionCall, positions: torch.Tensor, context: int
    ) -> torch.Tensor:
        """What to add to the scores `[..., C]` of the queries at `positions`: 0 for keys that they see, else -inf."""
        name = (index, call.window, call.chunk)
        if name not in self._masks:
            key_positions_C = torch.arange(context, device=self.device)
            queries = positions[..., None]
            seen = key_positions_C <= queries
            if call.window is not None:
                seen &= key_positions_C > queries - call.window
            if call.chunk is not None:
                seen &= key_positions_C // call.chunk == queries // call.chunk
            # Additive and made once: given booleans, attention would convert them in every layer.
            hidden = torch.full((), float("-inf"), dtype=call.query_HTD.dtype, device=self.device)
            self._masks[name] = torch.where(seen, 0.0, hidden)
        return self._masks[name]

    def _make_decodes(self, singles: IntArray) -> Decodes:
        starts_B = self._inputs.starts_R[singles]
        rows_B = self._tensor(self._first_rows_R[singles]) if self.pieces else None
        return Decodes(
            rows_B=rows_B,
            positions_B=self._tensor(starts_B),
            blocks_BN=self._context_blocks(singles, int(starts_B.max()) + 1),
        )

    def _make_piece(self, request: int) -> Piece:
        first, count = int(self._first_rows_R[request]), int(self._inputs.counts_R[request])
        rows = slice(first, first + count)
        context = int(self._inputs.starts_R[request]) + count
        return Piece(
            rows=rows,
            positions_n=self._tensor(self._inputs.positions_T[rows]),
            blocks_N=self._context_blocks(np.array([request]), context)[0],
        )

    def _context_blocks(self, requests: IntArray, num_tokens: int) -> torch.Tensor:
        """Blocks `[B, N]` that hold the first `num_tokens` tokens of these requests of the step."""
        num_blocks = -(-num_tokens // self.block_size)
        blocks = self._block_table[self._inputs.rows_R[requests], :num_blocks]
        return self._tensor(blocks.astype(np.int64))

    def _tensor(self, array: IntArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


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
