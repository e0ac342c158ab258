"""Architectures with layers that see the last WINDOW tokens, beside layers that see all."""

from collections.abc import Callable
from typing import Any

from tests.support.models import (
    Config,
    gemma3_config,
    gemma3n_config,
    gemma4_config,
    gpt_oss_config,
    llama4_config,
    llama_config,
)
from tests.support.zoo.rows import EXPERTS
from tests.support.zoo.window import FULL, SLIDING, WINDOW

ROPE: Config = {"rope_theta": 10000.0, "rope_type": "default"}


def windowed(model_type: str, layers: int = 3, **fields: Any) -> Config:
    """Windows, and one full layer last: the names that most architectures have for it."""
    return {
        **llama_config(layers=layers),
        "model_type": model_type,
        "sliding_window": WINDOW,
        "sliding_window_pattern": layers,
        "layer_types": [SLIDING] * (layers - 1) + [FULL],
        "rope_parameters": {SLIDING: ROPE, FULL: ROPE},
        **fields,
    }


def ministral3_config() -> Config:
    return windowed(
        "ministral3",
        rope_parameters={
            "rope_theta": 10000.0,
            "rope_type": "default",
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 64,
        },
    )


def afmoe_config() -> Config:
    return windowed("afmoe", **EXPERTS, num_dense_layers=1)


def exaone4_config() -> Config:
    return windowed("exaone4", sliding_window_pattern="LLG", rope_scaling=None)


def exaone_moe_config() -> Config:
    return windowed(
        "exaone_moe",
        **EXPERTS,
        num_shared_experts=1,
        rope_parameters=ROPE,
        is_moe_layer=[False, True, True],
    )


def iquestloopcoder_config() -> Config:
    """Goes through its layers twice: the first time with rows, the second with windows."""
    return {**llama_config(), "model_type": "iquestloopcoder", "loop_window_size": WINDOW}


def laguna_config() -> Config:
    return windowed("laguna", **EXPERTS, shared_expert_intermediate_size=64)


def mimo_v2_flash_config() -> Config:
    """Keys and values of other sizes in windows than elsewhere, and sinks."""
    return windowed(
        "mimo_v2_flash",
        **EXPERTS,
        n_routed_experts=4,
        n_shared_experts=None,
        routed_scaling_factor=1.0,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        n_group=1,
        topk_group=1,
        hybrid_layer_pattern=[1, 1, 0],
        moe_layer_freq=[0, 1, 1],
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
        sliding_window_size=WINDOW,
        layernorm_epsilon=1e-5,
        swa_rope_theta=10000.0,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=1,
        head_dim=128,
        v_head_dim=64,
        swa_head_dim=128,
        swa_v_head_dim=64,
        partial_rotary_factor=0.5,
    )


def step3p5_config() -> Config:
    return windowed(
        "step3p5",
        num_attention_groups=2,
        moe_num_experts=4,
        moe_top_k=2,
        moe_intermediate_size=64,
        share_expert_dim=64,
        attention_other_setting={"num_attention_heads": 4, "num_attention_groups": 2},
    )


def deepseek_v41_config() -> Config:
    """A cache class of its own: a window, compressed groups, and rows of the open group."""
    return {
        **llama_config(layers=3),
        "model_type": "deepseek_v41",
        "q_lora_rank": 64,
        "qk_rope_head_dim": 32,
        "o_groups": 2,
        "o_lora_rank": 64,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "compress_ratios": [0, 4, 4],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2],
        "index_n_heads": 2,
        "index_head_dim": 64,
        "index_topk": 4,
    }


WINDOWS: dict[str, Callable[[], Config]] = {
    "gemma3_text": lambda: gemma3_config(window=WINDOW),
    "gemma3n": lambda: gemma3n_config(window=WINDOW),
    "gemma4_text": lambda: gemma4_config(window=WINDOW),
    "gpt_oss": lambda: gpt_oss_config(window=WINDOW),
    "cohere2": lambda: windowed("cohere2", num_attention_heads=2, num_key_value_heads=1),
    "ministral3": ministral3_config,
    "mistral": lambda: windowed("llama", rope_parameters=None),
    "llama4": lambda: llama4_config(chunk=WINDOW),
    "afmoe": afmoe_config,
    "exaone4": exaone4_config,
    "exaone_moe": exaone_moe_config,
    "iquestloopcoder": iquestloopcoder_config,
    "laguna": laguna_config,
    "mellum": lambda: windowed("mellum", **EXPERTS),
    "mimo_v2_flash": mimo_v2_flash_config,
    "muse_glimmer": lambda: windowed("muse_glimmer", rope_parameters=None),
    "olmo3": lambda: windowed("olmo3"),
    "plamo3": lambda: windowed("plamo3"),
    "spark2_5": lambda: windowed("spark2_5"),
    "step3p5": step3p5_config,
    "deepseek_v41": deepseek_v41_config,
}
