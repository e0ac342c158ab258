"""Architectures with recurrent layers: alone, beside rows, beside windows, or in one list."""

from collections.abc import Callable
from typing import Any

from tests.support.models import (
    Config,
    lfm2_config,
    llama_config,
    mamba2_config,
    nemotron_h_config,
    qwen3_next_config,
)
from tests.support.zoo.rows import EXPERTS, LATENT, longcat_flash_config
from tests.support.zoo.window import FULL, SLIDING, WINDOW

# Mamba's names in most hybrids.
MAMBA: Config = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
}
# Ling's experts and linear attention, three layers of four.
BAILING: Config = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "num_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "layer_group_size": 4,
    "group_norm_size": 1,
    "routed_scaling_factor": 1.0,
}
# Kimi's delta attention, three layers of four, counted from 1.
KIMI_LINEAR: Config = {
    "kda_layers": [1, 2, 3],
    "full_attn_layers": [4],
    "num_heads": 2,
    "head_dim": 32,
    "short_conv_kernel_size": 4,
}
KIMI_EXPERTS: Config = {
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 64,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
}


def qwen3_5_config() -> Config:
    text = qwen3_next_config(
        model_type="qwen3_5_text",
        rope_parameters={
            "type": "default",
            "mrope_section": [11, 11, 10],
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    )
    return {"model_type": "qwen3_5", "text_config": text, "eos_token_id": 258}


def mamba_config() -> Config:
    return {
        **mamba2_config(),
        "model_type": "mamba",
        "time_step_rank": 8,
        "tie_word_embeddings": False,
    }


def falcon_h1_config() -> Config:
    """Each layer has a list: a recurrent state and rows."""
    return {
        **llama_config(),
        **MAMBA,
        "model_type": "falcon_h1",
        "mamba_d_ssm": 128,
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0] * 5,
        "mamba_rms_norm": True,
        **dict.fromkeys(
            (
                *("attention_in_multiplier", "attention_out_multiplier", "embedding_multiplier"),
                *("key_multiplier", "lm_head_multiplier", "ssm_in_multiplier"),
                "ssm_out_multiplier",
            ),
            1.0,
        ),
    }


def lfm2_moe_config() -> Config:
    return {
        **lfm2_config(),
        **EXPERTS,
        "model_type": "lfm2_moe",
        "num_dense_layers": 1,
        "use_expert_bias": True,
    }


def jamba_config() -> Config:
    return {
        **llama_config(heads=2, kv_heads=1, layers=4),
        **MAMBA,
        **EXPERTS,
        "model_type": "jamba",
        "attn_layer_offset": 2,
        "attn_layer_period": 4,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_expand": 1,
    }


def granitemoehybrid_config() -> Config:
    return {
        **llama_config(heads=2, kv_heads=1, layers=4),
        **MAMBA,
        "model_type": "granitemoehybrid",
        "mamba_expand": 1,
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.125,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
    }


def rwkv7_config() -> Config:
    return {
        **llama_config(layers=2),
        "model_type": "rwkv7",
        "norm_eps": 1e-5,
        "hidden_size": 64,
        "intermediate_size": 128,
        "head_dim": 32,
        "a_low_rank_dim": 16,
        "v_low_rank_dim": 16,
        "gate_low_rank_dim": 16,
        "decay_low_rank_dim": 16,
    }


def recurrent_gemma_config() -> Config:
    """Recurrent layers and windows: nothing is rows."""
    return {
        **llama_config(heads=2, kv_heads=1, layers=3),
        "model_type": "recurrent_gemma",
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "recurrent", "attention"],
    }


def kimi_linear_config(**overrides: Any) -> Config:
    """Recurrent layers beside latent attention."""
    return {
        **llama_config(layers=4),
        **LATENT,
        **KIMI_EXPERTS,
        "model_type": "kimi_linear",
        "num_key_value_heads": 4,
        "linear_attn_config": KIMI_LINEAR,
        "model_max_length": 2048,
        **overrides,
    }


def kimi_k3_config() -> Config:
    text = kimi_linear_config(attn_res_block_size=2, moe_latent_size=64, hidden_act="situ")
    return {"model_type": "kimi_k3", "text_config": text, "eos_token_id": 258}


def baichuan_m1_config() -> Config:
    """Each layer has a list: the last key and value before a convolution, and rows or a window."""
    return {
        **llama_config(heads=2, kv_heads=1, layers=3),
        "model_type": "baichuan_m1",
        "sliding_window": WINDOW,
        "sliding_window_layers": [0, 1],
        "conv_window": 2,
    }


def bailing_config(model_type: str, **fields: Any) -> Config:
    return {**llama_config(layers=4), **BAILING, "model_type": model_type, **fields}


def gear_config() -> Config:
    """Convolutions, windows and rows in one model."""
    return {
        **llama_config(layers=3),
        "model_type": "gear",
        "layer_types": ["conv_mixer", SLIDING, FULL],
        "sliding_window": WINDOW,
    }


def longcat_flash_ngram_config() -> Config:
    """Latent attention, and the last tokens themselves for the embedding."""
    return longcat_flash_config(
        model_type="longcat_flash_ngram",
        ngram_vocab_size_ratio=2,
        emb_neighbor_num=3,
        emb_split_num=2,
    )


def olmo_hybrid_config() -> Config:
    return {
        **qwen3_next_config(),
        "model_type": "olmo_hybrid",
        "linear_num_key_heads": 4,
        "linear_allow_neg_eigval": True,
        "attention_bias": False,
        "rope_parameters": {"rope_theta": 10000.0},
    }


def plamo2_config() -> Config:
    return {
        **llama_config(layers=4),
        "model_type": "plamo2",
        "hidden_size_per_head": 64,
        "attention_window_size": 2048,
        "full_attention_idx": None,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_num_heads": 4,
        "mamba_step": 2,
        "mamba_chunk_size": 64,
    }


RECURRENT: dict[str, Callable[[], Config]] = {
    "qwen3_next": qwen3_next_config,
    "qwen3_5": qwen3_5_config,
    "mamba": mamba_config,
    "mamba2": mamba2_config,
    "falcon_h1": falcon_h1_config,
    "lfm2": lfm2_config,
    "lfm2_moe": lfm2_moe_config,
    "jamba": jamba_config,
    "granitemoehybrid": granitemoehybrid_config,
    "nemotron_h": nemotron_h_config,
    "rwkv7": rwkv7_config,
    "recurrent_gemma": recurrent_gemma_config,
    "kimi_linear": kimi_linear_config,
    "kimi_k3": kimi_k3_config,
    "baichuan_m1": baichuan_m1_config,
    "bailing_hybrid": lambda: bailing_config("bailing_hybrid", **LATENT),
    "bailing_moe_linear": lambda: bailing_config("bailing_moe_linear"),
    "bailing_moe_v3": lambda: bailing_config("bailing_moe_v3", **LATENT),
    "gear": gear_config,
    "longcat_flash_ngram": longcat_flash_ngram_config,
    "olmo_hybrid": olmo_hybrid_config,
    "plamo2": plamo2_config,
}
