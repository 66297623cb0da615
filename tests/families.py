"""Tiny random models of every mixture-of-experts family that the engine knows, and of some that it refuses.

Windows and chunks are a few tokens long, and the first layer is dense where the family has dense layers. What is
left at its default value would not be tested.
"""

from __future__ import annotations

from typing import Any

from tests.family import VOCAB_SIZE, Family

__all__ = ["FAMILIES", "HYBRIDS", "REFUSED", "SERVED", "VOCAB_SIZE", "Family"]

_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
_GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2}
_EXPERTS: dict[str, Any] = {
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
_LOCAL: dict[str, Any] = {"num_local_experts": 12, "num_experts_per_tok": 3}
_DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 32,
}
_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
}
_MIXED_WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
_DENSE_FIRST = ["dense", "sparse", "sparse"]

_WORKS = (
    Family(
        name="qwen3_moe",
        config_class="Qwen3MoeConfig",
        options=_EXPERTS | {"mlp_only_layers": [0], "norm_topk_prob": True},
    ),
    Family(
        name="qwen2_moe",
        config_class="Qwen2MoeConfig",
        options=_EXPERTS | {"mlp_only_layers": [0], "shared_expert_intermediate_size": 32},
    ),
    Family(name="mixtral", config_class="MixtralConfig", options=_LOCAL),
    Family(
        name="olmoe",
        config_class="OlmoeConfig",
        options={"num_experts": 12, "num_experts_per_tok": 3},
    ),
    Family(
        name="flex_olmo",
        config_class="FlexOlmoConfig",
        options={"num_experts": 7, "num_experts_per_tok": 5},
    ),
    Family(
        name="glm4_moe",
        config_class="Glm4MoeConfig",
        options=_ROUTED | _GROUPS | {"first_k_dense_replace": 1, "use_qk_norm": True},
    ),
    Family(
        name="dots1",
        config_class="Dots1Config",
        options=_ROUTED
        | _GROUPS
        | {"first_k_dense_replace": 1, "sliding_window": 8, "layer_types": _MIXED_WINDOWS},
    ),
    Family(
        name="ernie4_5_moe",
        config_class="Ernie4_5_MoeConfig",
        options={
            "moe_k": 3,
            "moe_num_experts": 12,
            "moe_intermediate_size": 32,
            "moe_layer_start_index": 1,
        },
    ),
    Family(
        name="hunyuan_v1_moe",
        config_class="HunYuanMoEV1Config",
        options={"num_experts": 12, "moe_topk": 3},
    ),
    Family(name="minimax_m2", config_class="MiniMaxM2Config", options=_LOCAL),
    Family(
        name="mellum",
        config_class="MellumConfig",
        options=_EXPERTS
        | {
            "sliding_window": 8,
            "layer_types": _MIXED_WINDOWS,
            "mlp_layer_types": _DENSE_FIRST,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    Family(name="granitemoe", config_class="GraniteMoeConfig", options=_LOCAL | _GRANITE),
    Family(
        name="granitemoeshared",
        config_class="GraniteMoeSharedConfig",
        options=_LOCAL | _GRANITE | {"shared_intermediate_size": 32},
    ),
    Family(
        name="phimoe",
        config_class="PhimoeConfig",
        options={"num_local_experts": 12, "num_experts_per_tok": 2},
    ),
    Family(
        name="deepseek_v2",
        config_class="DeepseekV2Config",
        options=_MLA
        | _ROUTED
        | _GROUPS
        | {"first_k_dense_replace": 1, "topk_method": "group_limited_greedy", "head_dim": None},
    ),
    Family(
        name="deepseek_v3",
        config_class="DeepseekV3Config",
        options=_MLA | _ROUTED | _GROUPS | {"first_k_dense_replace": 1},
    ),
    Family(
        name="gpt_oss",
        config_class="GptOssConfig",
        options=_LOCAL
        | {"sliding_window": 8, "layer_types": _MIXED_WINDOWS, "intermediate_size": 32},
    ),
    Family(
        name="gemma4",
        config_class="Gemma4TextConfig",
        options={
            "enable_moe_block": True,
            "num_experts": 12,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
            "sliding_window": 8,
            "layer_types": _MIXED_WINDOWS,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 30.0,
        },
    ),
    Family(
        name="llama4",
        config_class="Llama4TextConfig",
        options={
            "num_hidden_layers": 4,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8,
            "no_rope_layer_interval": 2,
            "intermediate_size_mlp": 48,
            "floor_scale": 16,
        },
    ),
    Family(
        name="exaone_moe",
        config_class="ExaoneMoeConfig",
        options=_EXPERTS
        | _GROUPS
        | {"sliding_window": 8, "sliding_window_pattern": 2, "first_k_dense_replace": 1},
    ),
    Family(
        name="afmoe",
        config_class="AfmoeConfig",
        options=_EXPERTS
        | {
            "num_dense_layers": 1,
            "num_shared_experts": 1,
            "global_attn_every_n_layers": 2,
            "sliding_window": 8,
            "mup_enabled": True,
            "route_scale": 1.5,
        },
    ),
    Family(
        name="aria_text",
        config_class="AriaTextConfig",
        options={"moe_num_experts": 12, "moe_topk": 3, "moe_num_shared_experts": 1},
    ),
    Family(
        name="longcat_flash",
        config_class="LongcatFlashConfig",
        options=_MLA
        | {
            "num_layers": 2,
            "moe_topk": 3,
            "n_routed_experts": 12,
            "zero_expert_num": 4,
            "expert_ffn_hidden_size": 32,
            "ffn_hidden_size": 48,
            "head_dim": 8,
        },
    ),
    Family(
        name="cohere2_moe",
        config_class="Cohere2MoeConfig",
        options={
            "num_experts": 12,
            "num_experts_per_tok": 3,
            "num_shared_experts": 1,
            "sliding_window": 8,
            "layer_types": _MIXED_WINDOWS,
            "mlp_layer_types": _DENSE_FIRST,
            "expert_selection_fn": "sigmoid",
        },
    ),
    Family(
        name="hy_v3",
        config_class="HYV3Config",
        options=_EXPERTS | {"mlp_layer_types": _DENSE_FIRST},
    ),
    Family(
        name="laguna",
        config_class="LagunaConfig",
        options=_EXPERTS
        | {
            "shared_expert_intermediate_size": 32,
            "sliding_window": 8,
            "layer_types": _MIXED_WINDOWS,
            "mlp_layer_types": _DENSE_FIRST,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    Family(
        name="mimo_v2_flash",
        config_class="MiMoV2FlashConfig",
        options=_GROUPS
        | {
            "n_routed_experts": 16,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "v_head_dim": 12,
            "sliding_window": 8,
            "layer_types": _MIXED_WINDOWS,
            "mlp_layer_types": _DENSE_FIRST,
        },
    ),
    Family(
        name="glm4_moe_lite",
        config_class="Glm4MoeLiteConfig",
        options=_MLA | _ROUTED | _GROUPS | {"mlp_layer_types": _DENSE_FIRST},
    ),
    Family(name="solar_open", config_class="SolarOpenConfig", options=_ROUTED | _GROUPS),
    Family(
        name="jetmoe",
        config_class="JetMoeConfig",
        options={"num_local_experts": 8, "num_experts_per_tok": 2, "kv_channels": 16},
    ),
    Family(
        name="dbrx",
        config_class="DbrxConfig",
        options={
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 3,
            "max_seq_len": 256,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {
                "hidden_size": 64,
                "ffn_hidden_size": 32,
                "moe_num_experts": 12,
                "moe_top_k": 3,
            },
        },
    ),
)

_HYBRIDS = (
    Family(
        name="qwen3_next",
        config_class="Qwen3NextConfig",
        kind="hybrid",
        options=_EXPERTS | _DELTA_NET | {"mlp_only_layers": [0]},
    ),
    Family(
        name="qwen3_5_moe",
        config_class="Qwen3_5MoeTextConfig",
        kind="hybrid",
        options=_EXPERTS | _DELTA_NET,
    ),
    Family(
        name="lfm2_moe",
        config_class="Lfm2MoeConfig",
        kind="hybrid",
        options=_EXPERTS
        | {
            "num_dense_layers": 1,
            "conv_bias": True,
            "layer_types": ["conv", "full_attention", "conv"],
        },
    ),
    Family(
        name="granitemoehybrid",
        config_class="GraniteMoeHybridConfig",
        kind="hybrid",
        options=_LOCAL
        | _GRANITE
        | {
            "shared_intermediate_size": 32,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
            "position_embedding_type": "rope",
        },
    ),
    Family(
        name="nemotron_h",
        config_class="NemotronHConfig",
        kind="hybrid",
        options=_ROUTED
        | _GROUPS
        | {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "moe_shared_expert_intermediate_size": 32,
            "ssm_state_size": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
    Family(
        name="minimax",
        config_class="MiniMaxConfig",
        kind="hybrid",
        options=_LOCAL
        | {
            "block_size": 8,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "full_attn_alpha_factor": 1.2,
            "linear_attn_beta_factor": 0.8,
        },
    ),
    Family(
        name="jamba",
        config_class="JambaConfig",
        kind="hybrid",
        options={
            "num_hidden_layers": 4,
            "num_experts": 12,
            "num_experts_per_tok": 3,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
        },
    ),
)

_INDEXER = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2, "head_dim": 8}

_REFUSED = (
    Family(
        name="deepseek_v32",
        config_class="DeepseekV32Config",
        kind="refused",
        reason="Indexer",
        options=_MLA | _ROUTED | _INDEXER | {"first_k_dense_replace": 1},
    ),
    Family(
        name="glm_moe_dsa",
        config_class="GlmMoeDsaConfig",
        kind="refused",
        reason="Indexer",
        options=_MLA | _ROUTED | _INDEXER | {"first_k_dense_replace": 1},
    ),
    Family(
        name="deepseek_v4",
        config_class="DeepseekV4Config",
        kind="refused",
        reason="Indexer",
        options=_ROUTED
        | {
            "num_key_value_heads": 1,
            "q_lora_rank": 32,
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "sliding_attention",
            ],
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "sliding_window": 8,
            "o_groups": 2,
            "o_lora_rank": 16,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk": 8,
        },
    ),
    Family(
        name="doge",
        config_class="DogeConfig",
        kind="refused",
        reason="product keys",
        options={
            "is_moe": True,
            "num_experts": 16,
            "num_experts_per_tok": 3,
            "keep_window_size": 8,
        },
    ),
    Family(
        name="switch_transformers",
        config_class="SwitchTransformersConfig",
        kind="refused",
        reason="encoder-decoder",
        auto_class="AutoModelForSeq2SeqLM",
        options={
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 48,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_heads": 4,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
        },
    ),
    Family(
        name="nllb_moe",
        config_class="NllbMoeConfig",
        kind="refused",
        reason="encoder-decoder",
        auto_class="AutoModelForSeq2SeqLM",
        options={
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "num_experts": 4,
            "encoder_sparse_step": 2,
            "decoder_sparse_step": 2,
            "pad_token_id": 1,
            "decoder_start_token_id": 2,
        },
    ),
    Family(
        name="qwen3",
        config_class="Qwen3Config",
        kind="refused",
        reason="no mixture-of-experts layer",
    ),
    Family(
        name="llama",
        config_class="LlamaConfig",
        kind="refused",
        reason="no mixture-of-experts layer",
    ),
)

FAMILIES = {family.name: family for family in (*_WORKS, *_HYBRIDS, *_REFUSED)}
SERVED = {name: family for name, family in FAMILIES.items() if family.kind != "refused"}
HYBRIDS = {name: family for name, family in FAMILIES.items() if family.kind == "hybrid"}
REFUSED = {name: family for name, family in FAMILIES.items() if family.kind == "refused"}
