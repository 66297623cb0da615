"""From records to what each rank of a trainer replays: packing, context, sequence and pipeline parallelism.

    plan = ParallelPlan(tensor_parallel_size=2, sequence_parallel=True, context_parallel_size=4)
    sequences = PackedSequences.pack([len(tokens) for tokens in token_ids], plan)
    layout = RowLayout(plan=plan, sequences=sequences)
    batch = MicroBatch(layout=layout, records=records, token_ids=token_ids)
    batch.check_input_ids(input_ids, cp_rank=1)
    rows = batch.rows_for(ParallelRank(tp_rank=0, cp_rank=1))

What a rank gets is `rows.ids_TLK`, with `rows.valid_T` (which rows to replay), `rows.padding_T` (which belong to no
token) and `rows.layer_ids` (which decoder layers these are: bind by them, never by the order of routers).
"""

from routebook.routes.layout.collected_records import collect_records
from routebook.routes.layout.micro_batch import MicroBatch
from routebook.routes.layout.moe_layers import check_moe_layers, moe_layer_ids
from routebook.routes.layout.packed_sequences import PackedSequences
from routebook.routes.layout.packing_config import PackingConfig
from routebook.routes.layout.padded_sequences import PaddedSequences
from routebook.routes.layout.parallel_plan import ParallelPlan, ParallelRank
from routebook.routes.layout.pipeline_stages import stage_layer_counts, stage_layers
from routebook.routes.layout.rank_rows import RankRows
from routebook.routes.layout.row_layout import RowLayout

__all__ = [
    "MicroBatch",
    "PackedSequences",
    "PackingConfig",
    "PaddedSequences",
    "ParallelPlan",
    "ParallelRank",
    "RankRows",
    "RowLayout",
    "check_moe_layers",
    "collect_records",
    "moe_layer_ids",
    "stage_layer_counts",
    "stage_layers",
]
