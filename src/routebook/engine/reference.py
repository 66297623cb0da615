"""The reference mode: no bit of a token's result depends on what runs beside it, or on how its prompt was cut.

In ordinary code it does, in more places than one can list: a matrix product sums in another order for another number
of rows, a reduction over three numbers is vectorised differently, an activation takes its scalar path for the last
few elements. So here the model sees one token at a time: every operation has the same shapes for every token, in every
batch. Attention, whose context is as long as it is, runs over exactly the keys that the query sees.

It is slow, and it is the ground on which the other modes are judged. A request that shares a block which another one
computes in the same step comes after it in the batch: the scheduler plans it later, and the batch keeps that order.

Legend of shape suffixes: H = query heads, G = KV heads, D = key size, V = value size, C = keys that the query sees.
"""

from __future__ import annotations

import torch

from routebook.engine.attention import AttentionCall
from routebook.engine.paged_step import PagedStep, softcapped, softmax_with_sinks


class ReferenceStep(PagedStep):
    """Attention of a single token over exactly the keys that it sees."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return `[1, H, V]`."""
        (group,) = self.groups
        assert group.positions_Bn.numel() == 1, "the reference mode runs one token at a time"
        self.pool.write(call.layer, self.slot_mapping_T, call.key_TGD, call.value_TGV)
        position = int(group.positions_Bn)
        offsets = torch.arange(self.block_size)
        slots_C = (group.blocks_BN[0, :, None] * self.block_size + offsets).view(-1)
        seen_C = slots_C[_first_key(call, position) : position + 1]
        keys, values = self.pool.read_slots(call.layer, seen_C)
        return _attend_one(call, call.query_HTD[:, 0], keys, values)[None]


def _first_key(call: AttentionCall, position: int) -> int:
    """Position of the first key that a query at `position` sees."""
    first = 0
    if call.window is not None:
        first = max(first, position - call.window + 1)
    if call.chunk is not None:
        first = max(first, position // call.chunk * call.chunk)
    return first


def _attend_one(
    call: AttentionCall, query_HD: torch.Tensor, key_GCD: torch.Tensor, value_GCV: torch.Tensor
) -> torch.Tensor:
    """One query over its keys: `[H, V]`."""
    key_GDC = key_GCD.transpose(1, 2).contiguous()
    grouped = query_HD.reshape(key_GDC.shape[0], -1, query_HD.shape[-1])
    scores = softcapped(torch.bmm(grouped, key_GDC) * call.scaling, call.softcap)
    sinks = None if call.sinks_H is None else call.sinks_H.view(key_GDC.shape[0], -1)
    weights = softmax_with_sinks(scores, sinks)
    return torch.bmm(weights, value_GCV).reshape(query_HD.shape[0], -1)
