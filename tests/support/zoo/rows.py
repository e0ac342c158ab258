"""Architectures all of whose layers are rows: plain ones, and those of latent attention."""

from collections.abc import Callable
from typing import Any

from tests.support.models import Config, gpt_bigcode_config, llama_config, qwen3_config

EXPERTS: Config = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
# The latent takes the place of keys, what carries the position that of values: other widths.
LATENT: Config = {
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}


def qwen3_moe_config() -> Config:
    return {
        **qwen3_config(),
        **EXPERTS,
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def gemma2_config() -> Config:
    """Its attention caps the scores and is its own."""
    return {**llama_config(), "model_type": "gemma2", "query_pre_attn_scalar": 64}


def afm7_config() -> Config:
    """The last two layers read the rows of the one before, and keep none."""
    return {
        **llama_config(),
        "model_type": "afm7",
        "hidden_dim": 128,
        "num_layers": 4,
        "num_kv_reuse_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
    }


def nanbeige_config() -> Config:
    """Goes through its layers twice, each time with rows of its own."""
    return {**llama_config(), "model_type": "nanbeige", "num_loops": 2}


def deepseek_v3_config(**overrides: Any) -> Config:
    return {
        **llama_config(),
        **LATENT,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        **overrides,
    }


def deepseek_v32_config() -> Config:
    """Each layer has a list: the latent rows, and the keys of an index that picks eight of them."""
    return deepseek_v3_config(
        model_type="deepseek_v32", index_head_dim=64, index_n_heads=2, index_topk=8
    )


def longcat_flash_config(**overrides: Any) -> Config:
    """Two latent attentions in each layer, whose caches are one list."""
    return {
        **llama_config(),
        **LATENT,
        "model_type": "longcat_flash",
        "attention_method": "MLA",
        "attention_bias": False,
        "zero_expert_type": "identity",
        "ffn_hidden_size": 128,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 64,
        "n_routed_experts": 4,
        "zero_expert_num": 1,
        "num_layers": 2,
        "routed_scaling_factor": 1.0,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        **overrides,
    }


def minimax_m3_config() -> Config:
    """Lists of one or two caches: the second holds the keys of an index, without values."""
    text = {
        **llama_config(layers=3),
        "model_type": "minimax_m3_vl_text",
        "dense_intermediate_size": 128,
        "shared_intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "index_n_heads": 2,
        "index_head_dim": 64,
        "index_block_size": 4,
        "index_topk_blocks": 4,
    }
    return {"model_type": "minimax_m3_vl", "text_config": text, "eos_token_id": 258}


ROWS: dict[str, Callable[[], Config]] = {
    "llama": llama_config,
    "qwen3": qwen3_config,
    "qwen3_moe": qwen3_moe_config,
    "gemma2": gemma2_config,
    "gpt_bigcode": gpt_bigcode_config,
    "nanbeige": nanbeige_config,
    "afm7": afm7_config,
    "deepseek_v3": deepseek_v3_config,
    "deepseek_v32": deepseek_v32_config,
    "longcat_flash": longcat_flash_config,
    "minimax_m3_vl": minimax_m3_config,
}
