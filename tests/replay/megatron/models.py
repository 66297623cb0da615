"""Small MoE models of megatron-core, and runs of its own pipeline schedules on them.

Legend of shape suffixes: B = batch, S = sequence, T = rows of a rank, L = MoE layers, K = top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from routebook.replay.megatron import ReplaySchedule, parallel_plan, parallel_rank
from routebook.routes import RoutedExperts, RouteSchema
from routebook.routes.layout import MicroBatch, PaddedSequences, RowLayout
from tests.replay.megatron.cpu import plain_norm

VOCABULARY, LENGTH, BATCH = 64, 12, 2
LENGTHS = (12, 9)
EXPERTS, TOP_K, LAYERS = 8, 2, 4
SCHEMA = RouteSchema(
    layer_ids=(1, 2, 3), num_experts=EXPERTS, top_k=TOP_K, num_hidden_layers=LAYERS
)


def start(**sizes: Any) -> None:
    """Process groups of these sizes, and seeded random states."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes)
    torch.manual_seed(3)
    model_parallel_cuda_manual_seed(3, force_reset_rng=True)


def config_of(**options: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    base: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_hidden_size": 64,
        "moe_ffn_hidden_size": 32,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": TOP_K,
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "moe_token_dispatcher_type": "alltoall",
        "moe_enable_routing_replay": True,
        "moe_router_dtype": "fp32",
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": 0.3,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "pipeline_dtype": torch.float32,
        "batch_p2p_comm": False,
    }
    return TransformerConfig(**base | options)


def build(**options: Any) -> list[Any]:
    """The chunks of this rank, in training mode."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    torch.manual_seed(5)
    config = config_of(**options)
    chunks = []
    for vp_stage in range(config.virtual_pipeline_model_parallel_size or 1):
        stage = None if config.virtual_pipeline_model_parallel_size is None else vp_stage
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=stage)
        with plain_norm():
            model = GPTModel(
                config,
                spec,
                VOCABULARY,
                LENGTH,
                pre_process=parallel_state.is_pipeline_first_stage(
                    ignore_virtual=False, vp_stage=stage
                ),
                post_process=parallel_state.is_pipeline_last_stage(
                    ignore_virtual=False, vp_stage=stage
                ),
                position_embedding_type="rope",
                share_embeddings_and_output_weights=False,
                vp_stage=stage,
            )
        chunks.append(model.train())
    return chunks


def tokens_of(seed: int) -> torch.Tensor:
    """int64 `[B, S]`; whatever stands behind the end of a sequence is padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)


def records_of(seed: int) -> list[RoutedExperts]:
    """Records of routes that no router chose; each without a row for its last token."""
    generator = np.random.default_rng(seed)
    records = []
    for tokens_S, length in zip(tokens_of(seed), LENGTHS, strict=True):
        scores = generator.random((length - 1, len(SCHEMA.layer_ids), EXPERTS))
        ids = scores.argsort(-1)[..., :TOP_K].astype(SCHEMA.dtype)
        records.append(RoutedExperts.from_rows(SCHEMA, ids, tokens_S[:length].numpy()))
    return records


def batch_of(config: Any, records: Sequence[RoutedExperts], seed: int) -> MicroBatch:
    sequences = PaddedSequences.from_lengths(LENGTHS, LENGTH, order="s_major", padding_side="right")
    layout = RowLayout(plan=parallel_plan(config), sequences=sequences)
    tokens = [t[:n].numpy() for t, n in zip(tokens_of(seed), LENGTHS, strict=True)]
    return MicroBatch(layout=layout, records=records, token_ids=tokens)


def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach()}


def run(
    chunks: list[Any],
    seeds: Sequence[int],
    schedule: ReplaySchedule | None = None,
    records: Callable[[int], list[RoutedExperts]] = records_of,
    forward_only: bool = False,
) -> list[float]:
    """Forward and backward by megatron-core's own schedule; losses, on the last stage."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config = chunks[0].config

    def step(batches: Iterator[int], chunk: Any) -> Any:
        seed = next(batches)
        given: Any = nullcontext()
        if schedule is not None:
            rows = batch_of(config, records(seed), seed).rows_for(parallel_rank(chunk))
            given = schedule.forward(chunk, rows)
        tokens_BS = tokens_of(seed)
        positions_BS = torch.arange(LENGTH).expand(BATCH, LENGTH)
        mask = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
        with given:
            output = chunk(tokens_BS, positions_BS, mask, labels=tokens_BS.roll(-1, 1))
        return output, loss_of

    for chunk in chunks:
        chunk.zero_grad()
    done = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(seeds) for _ in chunks],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(seeds),
        seq_length=LENGTH,
        micro_batch_size=BATCH,
        forward_only=forward_only,
    )
    return [reduced["loss"].item() for reduced in done]


def gradients(chunks: list[Any]) -> list[torch.Tensor]:
    return [
        parameter.grad.clone()
        for chunk in chunks
        for parameter in chunk.parameters()
        if parameter.grad is not None
    ]


def routers_of(chunk: Any) -> list[Any]:
    """Modules that megatron-core calls routers, in the order of layers."""
    return [module for module in chunk.modules() if type(module).__name__ == "TopKRouter"]


def stale_entries(chunks: list[Any]) -> int:
    """What is left in the queues of megatron-core's own class."""
    routers = [router for chunk in chunks for router in routers_of(chunk)]
    return sum(len(router.router_replay.replay_backward_list) for router in routers)
