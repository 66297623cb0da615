"""What a record of routed experts is: its schema, arithmetic, wire form, files and comparison.

Needs numpy, msgspec and zstandard, and nothing else; pybase64 is used where it is installed.
"""

from routebook.routes.align import Turn, align, join_turns, shared_prefix
from routebook.routes.codec import CODEC_NAMES
from routebook.routes.compare import Comparison, Difference, compare
from routebook.routes.file import RoutesWriter, read_routes
from routebook.routes.formats.vllm import from_vllm, to_vllm
from routebook.routes.frame import decode_frame, encode_frame
from routebook.routes.layout import (
    MicroBatch,
    PackedSequences,
    PackingConfig,
    PaddedSequences,
    ParallelPlan,
    ParallelRank,
    RankRows,
    RowLayout,
    check_moe_layers,
    collect_records,
    moe_layer_ids,
    stage_layer_counts,
    stage_layers,
)
from routebook.routes.load import ExpertLoad, expert_load
from routebook.routes.provenance import Origin, Provenance
from routebook.routes.record import RoutedExperts
from routebook.routes.sample import RouteSample
from routebook.routes.schema import RouteSchema
from routebook.routes.token_hash import token_hashes

__all__ = [
    "CODEC_NAMES",
    "Comparison",
    "Difference",
    "ExpertLoad",
    "MicroBatch",
    "Origin",
    "PackedSequences",
    "PackingConfig",
    "PaddedSequences",
    "ParallelPlan",
    "ParallelRank",
    "Provenance",
    "RankRows",
    "RouteSample",
    "RouteSchema",
    "RoutedExperts",
    "RoutesWriter",
    "RowLayout",
    "Turn",
    "align",
    "check_moe_layers",
    "collect_records",
    "compare",
    "decode_frame",
    "encode_frame",
    "expert_load",
    "from_vllm",
    "join_turns",
    "moe_layer_ids",
    "read_routes",
    "shared_prefix",
    "stage_layer_counts",
    "stage_layers",
    "to_vllm",
    "token_hashes",
]
