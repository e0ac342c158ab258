"""Tiny models of mlx-lm's own classes with random weights, in memory or as folders on disk.

Weights are scaled so that attention is peaked and recurrent state decays slowly: a wrong cache
row or state shows in the logits instead of drowning in an average.
"""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

# 256 bytes and the special tokens; the embedding is padded beyond, as real ones are.
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOKENIZER_TOKENS = 256 + len(SPECIAL_TOKENS)
VOCABULARY_TOKENS = 288
CONTEXT_TOKENS = 2048

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Config = dict[str, Any]

# Weights whose exponential or sigmoid is how fast recurrent state decays: Mamba and gated delta
# rules, RG-LRU, RWKV.
SLOW_DECAY = ("A_log", "recurrent_param", "w_lora.lora.2.bias")
# Their norms add one to their weights.
NORMS_ADD_ONE = ("gemma2", "gemma3_text", "recurrent_gemma")


def llama_config(
    heads: int = 4, kv_heads: int = 2, head_dim: int = 64, layers: int = 2, **overrides: Any
) -> Config:
    return {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT_TOKENS,
        "vocab_size": VOCABULARY_TOKENS,
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 258,
        **overrides,
    }


def mistral_config(**overrides: Any) -> Config:
    return {**llama_config(), "model_type": "mistral", **overrides}


def qwen3_config(**overrides: Any) -> Config:
    return {**llama_config(), "model_type": "qwen3", **overrides}


def gemma3_config(window: int = 16, layers: int = 4, **overrides: Any) -> Config:
    """Three layers with a rotating window, then one that sees everything."""
    return {
        **llama_config(kv_heads=1, layers=layers),
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 64,
        "sliding_window": window,
        "sliding_window_pattern": 4,
        **overrides,
    }


def gemma3n_config(window: int = 16, **overrides: Any) -> Config:
    """Windows and layers that see everything by turns; the last two read the rows of others."""
    text = {
        **llama_config(kv_heads=1, layers=4),
        "model_type": "gemma3n_text",
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": window,
        "rope_local_base_freq": 10000.0,
        "final_logit_softcapping": 30.0,
        "activation_sparsity_pattern": [0.0] * 4,
        "vocab_size_per_layer_input": VOCABULARY_TOKENS,
        "hidden_size_per_layer_input": 32,
        "altup_num_inputs": 2,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 8,
        **overrides,
    }
    return {"model_type": "gemma3n", "text_config": text, "eos_token_id": 258}


def gemma4_config(window: int = 16, **overrides: Any) -> Config:
    """As gemma3n_config, with heads of two sizes."""
    return {
        **llama_config(kv_heads=1, layers=4),
        "model_type": "gemma4_text",
        "global_head_dim": 128,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": window,
        "vocab_size_per_layer_input": VOCABULARY_TOKENS,
        "hidden_size_per_layer_input": 32,
        "tie_word_embeddings": True,
        **overrides,
    }


def gpt_oss_config(window: int = 16, **overrides: Any) -> Config:
    """Windows and layers that see everything by turns, with attention sinks; experts in each."""
    return {
        **llama_config(),
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": window,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": CONTEXT_TOKENS // 2,
        },
        **overrides,
    }


def deepseek_config(version: int, **overrides: Any) -> Config:
    """Latent attention: version 2 caches keys wider than values, version 3 the latent itself."""
    return {
        **llama_config(kv_heads=4),
        "model_type": f"deepseek_v{version}",
        "kv_lora_rank": 64,
        "q_lora_rank": None,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "rope_scaling": {
            "type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": CONTEXT_TOKENS // 2,
            "mscale": 1.0,
            "mscale_all_dim": 0,
        },
        **overrides,
    }


def mamba2_config(layers: int = 2, **overrides: Any) -> Config:
    return {
        "model_type": "mamba2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_heads": 4,
        "head_dim": 32,
        "state_size": 16,
        "conv_kernel": 4,
        "n_groups": 1,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
        "time_step_limit": [0.0, 1e9],
        "time_step_rank": "auto",
        "vocab_size": VOCABULARY_TOKENS,
        "eos_token_id": 258,
        **overrides,
    }


def qwen3_next_config(**overrides: Any) -> Config:
    """Three recurrent layers (gated delta rule), then one of attention; experts in each."""
    return {
        **llama_config(layers=4),
        "model_type": "qwen3_next",
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 64,
        "moe_intermediate_size": 64,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.5,
        "full_attention_interval": 4,
        **overrides,
    }


def lfm2_config(**overrides: Any) -> Config:
    """Short convolutions and attention by turns."""
    return {
        **llama_config(heads=2, kv_heads=1, layers=4),
        "model_type": "lfm2",
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 128,
        "block_ff_dim": 256,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"] * 2,
        **overrides,
    }


def llama4_config(chunk: int = 16, **overrides: Any) -> Config:
    """Three layers with chunked attention, then one that sees everything."""
    text = {
        **llama_config(layers=4),
        "model_type": "llama4_text",
        "attention_bias": False,
        "attention_chunk_size": chunk,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 256,
        "num_experts_per_tok": 1,
        "num_local_experts": 2,
        "rope_scaling": None,
        "use_qk_norm": True,
        **overrides,
    }
    return {"model_type": "llama4", "text_config": text, "eos_token_id": 258}


def nemotron_h_config(**overrides: Any) -> Config:
    """Recurrent layers that mlx-lm computes wrongly for the shorter of two padded prompts."""
    return {
        **llama_config(heads=2, kv_heads=1),
        "model_type": "nemotron_h",
        "attention_bias": False,
        "hybrid_override_pattern": ["M", "*", "M", "-"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 1,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        **overrides,
    }


def gpt_bigcode_config(**overrides: Any) -> Config:
    """Plain caches, whose offset the model takes for one number: it cannot be batched."""
    return {
        "model_type": "gpt_bigcode",
        "n_embd": 128,
        "n_layer": 2,
        "n_inner": 256,
        "n_head": 2,
        "n_positions": CONTEXT_TOKENS,
        "layer_norm_epsilon": 1e-5,
        "vocab_size": VOCABULARY_TOKENS,
        "eos_token_id": 258,
        **overrides,
    }


# One of each kind of cache, for tests over all architectures.
CONFIGS: dict[str, Callable[[], Config]] = {
    "llama": llama_config,
    "mistral": mistral_config,
    "qwen3": qwen3_config,
    "gemma3_text": gemma3_config,
    "mamba2": mamba2_config,
    "qwen3_next": qwen3_next_config,
    "lfm2": lfm2_config,
    "llama4": llama4_config,
}


def tiny_model(config: Config, *, dtype: mx.Dtype = mx.float32, seed: int = 0) -> Any:
    """Evaluated on the calling thread; the same seed gives the same weights. Leaves MLX's global
    random state alone."""
    module_name = "llama" if config["model_type"] == "mistral" else config["model_type"]
    module = importlib.import_module(f"mlx_lm.models.{module_name}")
    model = module.Model(module.ModelArgs.from_dict(config))
    names_and_shapes: Any = tree_flatten(model.parameters())
    keys = mx.random.split(mx.random.key(seed), len(names_and_shapes))
    weights = [
        (name, _weight(name, array, key))
        for (name, array), key in zip(names_and_shapes, keys, strict=True)
    ]
    if config["model_type"] in NORMS_ADD_ONE:
        weights = [(name, w - 1.0 if "norm" in name else w) for name, w in weights]
    model.update(tree_unflatten(weights))
    model.set_dtype(dtype)
    model.eval()
    mx.eval(model.parameters())
    return model


def tiny_llama(
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    layers: int = 2,
    *,
    dtype: mx.Dtype = mx.float32,
    seed: int = 0,
    **overrides: Any,
) -> Any:
    config = llama_config(heads, kv_heads, head_dim, layers, **overrides)
    return tiny_model(config, dtype=dtype, seed=seed)


def save_tiny_model(
    folder: Path,
    config: Config | None = None,
    *,
    dtype: mx.Dtype = mx.float32,
    seed: int = 0,
    chat_template: str | None = CHAT_TEMPLATE,
) -> Path:
    """Writes a folder that mlx-lm loads: weights, configuration, byte-level tokenizer."""
    config = llama_config() if config is None else config
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(tiny_model(config, dtype=dtype, seed=seed).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_tiny_tokenizer(folder, chat_template)
    return folder


def save_tiny_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """One token per UTF-8 byte, id = rank of the byte in the byte-level alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[2],
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_TOKENS,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _weight(name: str, array: mx.array, key: mx.array) -> mx.array:
    if name.endswith(SLOW_DECAY):
        return mx.full(array.shape, -5.0)
    if name.rsplit(".", 1)[-1] == "sinks":
        return mx.random.normal(array.shape, key=key)
    if array.ndim < 2:
        return 2.0 * array if "q_norm" in name else array
    scale: float = array.shape[-1] ** -0.5
    if any(part in name for part in ("q_proj", "k_proj", "qkv")):
        scale *= 2.0
    return scale * mx.random.normal(array.shape, key=key)


def save_tiny_adapter(folder: Path, config: Config | None = None, *, seed: int = 0) -> Path:
    """Writes a LoRA adapter of rank 2 for the model of `config`, as mlx-lm reads them."""
    layers, parameters = 2, {"rank": 2, "scale": 10.0, "dropout": 0.0}
    settings = {"fine_tune_type": "lora", "num_layers": layers, "lora_parameters": parameters}
    model = tiny_model(llama_config() if config is None else config)
    linear_to_lora_layers(model, layers, parameters)
    names_and_arrays: Any = tree_flatten(model.trainable_parameters())
    shapes = [(name, array.shape) for name, array in names_and_arrays if "lora" in name]
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    weights = {
        name: 0.1 * mx.random.normal(shape, key=key)
        for (name, shape), key in zip(shapes, keys, strict=True)
    }
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=1))
    return folder
