"""From a GGUF file of the llama architecture to a folder that mlx-lm loads.

Quantized weights are kept as they are: MLX reads Q4_1 and Q8_0 as its own affine quantization with
groups of 32.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

GROUP_SIZE = 32
BITS = 4
TOKEN_TYPE_SPECIAL = 3

OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

Metadata = dict[str, Any]
Weights = dict[str, mx.array]


def convert(path: Path, folder: Path) -> None:
    """Writes weights, configuration and tokenizer into an existing folder."""
    loaded: Any = mx.load(str(path), return_metadata=True)
    weights: Weights = {_name(name): array for name, array in loaded[0].items()}
    metadata: Metadata = loaded[1]
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    _write_json(folder / "config.json", _config(metadata, weights))
    _tokenizer(metadata).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(metadata))


def _name(name: str) -> str:
    """blk.7.attn_q.scales -> model.layers.7.self_attn.q_proj.scales"""
    module, _, parameter = name.rpartition(".")
    if not module.startswith("blk."):
        return f"{OUTER_NAMES[module]}.{parameter}"
    _, layer, module = module.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[module]}.{parameter}"


def _config(metadata: Metadata, weights: Weights) -> dict[str, Any]:
    def number(name: str) -> Any:
        return metadata[name].item()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": number("llama.embedding_length"),
        "intermediate_size": number("llama.feed_forward_length"),
        "num_hidden_layers": number("llama.block_count"),
        "num_attention_heads": number("llama.attention.head_count"),
        "num_key_value_heads": number("llama.attention.head_count_kv"),
        "head_dim": number("llama.rope.dimension_count"),
        "rms_norm_eps": number("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": number("llama.rope.freq_base"),
        # GGUF permutes Q and K for the interleaved form of the rotation.
        "rope_traditional": True,
        "max_position_embeddings": number("llama.context_length"),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "bos_token_id": number("tokenizer.ggml.bos_token_id"),
        "eos_token_id": number("tokenizer.ggml.eos_token_id"),
        "quantization": _quantization(weights),
    }


def _quantization(weights: Weights) -> dict[str, Any]:
    settings: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": BITS}
    for name, scales in weights.items():
        module, _, parameter = name.rpartition(".")
        if parameter == "scales":
            # A column of packed words holds 32 bits, a column of scales is one group of weights.
            bits = weights[f"{module}.weight"].shape[-1] * 32 // (scales.shape[-1] * GROUP_SIZE)
            if bits != BITS:
                settings[module] = {"group_size": GROUP_SIZE, "bits": bits}
    return settings


def _tokenizer(metadata: Metadata) -> Tokenizer:
    """Byte-level BPE whose digits are single tokens, as llama.cpp's pre-tokenizer "smollm"."""
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: rank for rank, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == TOKEN_TYPE_SPECIAL
        ]
    )
    return tokenizer


def _tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    def token(name: str) -> str:
        return str(metadata["tokenizer.ggml.tokens"][metadata[f"tokenizer.ggml.{name}"].item()])

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos_token_id"),
        "eos_token": token("eos_token_id"),
        "unk_token": token("unknown_token_id"),
        "pad_token": token("padding_token_id"),
        "model_max_length": metadata["llama.context_length"].item(),
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
