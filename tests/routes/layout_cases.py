"""Random plans and batches as plain data, and what Routebook's layout makes of them.

A case is what goes to Routebook and to the other programs alike (`layout_peers.py`); an answer is a list of numbers
that both can give, or None for a case that is refused. `TAG * sequence + position` names a row, -1 is padding.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from math import lcm
from typing import Any

import numpy as np

from routebook.errors import ConfigError
from routebook.routes import (
    PackedSequences,
    PackingConfig,
    PaddedSequences,
    ParallelPlan,
    ParallelRank,
    RowLayout,
    stage_layers,
)

TAG = 10_000
Case = dict[str, Any]


def stage_case(rng: random.Random) -> Case:
    pp = rng.randint(1, 6)
    vpp = rng.choice((1, 1, 2, 3)) if pp > 1 else 1
    case: Case = {"num_layers": rng.randint(1, 40), "pp": pp, "vpp": vpp}
    kind = rng.choice(("plain", "counted", "uneven", "custom"))
    if kind == "counted":
        case |= {"embedding": rng.random() < 0.7, "loss": rng.random() < 0.7}
        # Every other time a number of layers that can be split.
        if rng.random() < 0.5:
            case["num_layers"] = max(1, pp * vpp * rng.randint(1, 5) - sum(case_counts(case)))
    elif kind == "uneven" and pp > 1:
        case["first"] = rng.choice((None, vpp * rng.randint(1, 3), rng.randint(1, 6)))
        case["last"] = rng.choice((None, vpp * rng.randint(1, 3), rng.randint(1, 6)))
        given = [n for n in (case["first"], case["last"]) if n is not None]
        if rng.random() < 0.8:
            case["num_layers"] = sum(given) + (pp - len(given)) * vpp * rng.randint(1, 3)
    elif kind == "custom":
        case["per_stage"] = [rng.randint(0, 3) for _ in range(pp * vpp)]
        case["num_layers"] = max(1, sum(case["per_stage"]))
    elif rng.random() < 0.5:
        case["num_layers"] = pp * vpp * rng.randint(1, 5)
    return case


def case_counts(case: Case) -> tuple[int, int]:
    return int(case.get("embedding", False)), int(case.get("loss", False))


def packed_case(rng: random.Random) -> Case:
    longest = rng.choice((3, 12, 40))
    fp8 = rng.random() < 0.2
    return {
        "lengths": [rng.randint(1, longest) for _ in range(rng.randint(1, 5))],
        "tp": rng.choice((1, 2, 4)),
        "cp": rng.choice((1, 2, 4)),
        "contiguous": rng.random() < 0.35,
        "fp8": fp8,
        "bucket": rng.choice((None, None, 3, 6, 10, 20, 24, 36, 48, 100)),
        "min_local_rows": rng.choice((None, None, 12, 20, 24, 40)) if not fp8 else None,
    }


def padded_case(rng: random.Random) -> Case:
    tp, cp = rng.choice((1, 2, 4)), rng.choice((1, 2, 4))
    return {
        "batch": rng.randint(1, 4),
        "columns": tp * cp * 2 * rng.randint(1, 6),
        "tp": tp,
        "cp": cp,
    }


def our_stages(case: Case) -> list[list[int]] | None:
    """First layer and number of layers of every stage, chunk by chunk in the order of a token."""
    try:
        plan = stage_plan(case)
        stages = [
            stage_layers(plan, case["num_layers"], pp_rank, vp_stage)
            for vp_stage in range(case["vpp"])
            for pp_rank in range(case["pp"])
        ]
    except ConfigError:
        return None
    return [[layers.start, len(layers)] for layers in stages]


def stage_plan(case: Case) -> ParallelPlan:
    embedding, loss = case_counts(case)
    return ParallelPlan(
        pipeline_parallel_size=case["pp"],
        virtual_pipeline_size=case["vpp"],
        num_layers_in_first_pipeline_stage=case.get("first"),
        num_layers_in_last_pipeline_stage=case.get("last"),
        account_for_embedding_in_pipeline_split=bool(embedding),
        account_for_loss_in_pipeline_split=bool(loss),
        layers_per_stage=case.get("per_stage"),
    )


def row_plan(case: Case) -> ParallelPlan:
    return ParallelPlan(
        tensor_parallel_size=case["tp"],
        sequence_parallel=case["tp"] > 1,
        context_parallel_size=case["cp"],
        context_parallel_layout="contiguous" if case.get("contiguous") else "zigzag",
    )


def our_packed(case: Case) -> list[list[int]] | None:
    """Tags of the rows of every context-parallel rank, its tensor-parallel ranks one after the other."""
    plan = row_plan(case)
    config = PackingConfig.fp8(plan) if case["fp8"] else PackingConfig()
    if case["min_local_rows"]:
        config = replace(config, min_tokens=case["min_local_rows"] * case["cp"])
    if case["bucket"]:
        bucket = lcm(case["bucket"], case["cp"], config.total_multiple)
        config = replace(config, total_multiple=bucket)
    try:
        sequences = PackedSequences.pack(case["lengths"], plan, config)
    except ConfigError:
        return None
    layout = RowLayout(plan=plan, sequences=sequences)
    return [
        [
            tag
            for tp_rank in range(case["tp"])
            for tag in tags(layout, ParallelRank(tp_rank=tp_rank, cp_rank=cp_rank))
        ]
        for cp_rank in range(case["cp"])
    ]


def tags(layout: RowLayout, rank: ParallelRank) -> list[int]:
    sequence, position = layout.places(rank)
    tagged: list[int] = np.where(sequence < 0, -1, TAG * sequence + position).tolist()
    return tagged


def our_padded(case: Case) -> list[list[int]]:
    """Columns of every rank's rows, s-major: as tags of sequence and column."""
    layout = RowLayout(
        plan=row_plan(case),
        sequences=PaddedSequences.from_lengths(
            [case["columns"]] * case["batch"],
            case["columns"],
            order="s_major",
            padding_side="right",
        ),
    )
    return [
        tags(layout, ParallelRank(tp_rank=tp_rank, cp_rank=cp_rank))
        for cp_rank in range(case["cp"])
        for tp_rank in range(case["tp"])
    ]


def all_ranks(plan: ParallelPlan) -> list[ParallelRank]:
    sizes = (
        plan.tensor_parallel_size,
        plan.context_parallel_size,
        plan.pipeline_parallel_size,
        plan.virtual_pipeline_size,
    )
    return [
        ParallelRank(tp_rank=t, cp_rank=c, pp_rank=p, vp_stage=v)
        for t, c, p, v in product(*map(range, sizes))
    ]
