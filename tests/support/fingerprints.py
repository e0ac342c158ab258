"""A model whose every answer is a proof of the rows that it saw.

The rows that it caches are fingerprints: small integers, functions of layer, token and position.
Attention is mlx-lm's, with scores that are all equal, so that it returns the mean of the rows
under the mask; times their number that is an exact sum, and a hash of all sums is the next token.
A row that is wrong, missing, double or at another position therefore changes the reply, whoever
brought it there, and the right reply of any prompt can be computed in numpy, without an engine.
(The order of the right rows does not matter, as it does not to any attention.)

Exact in float32: fingerprints lie in [-8, 7] about 0, so that sums of a thousand are small and
the error of a mean, times the number of rows, stays below 0.02; 0.5 would be too much.

Importing this module makes the architecture known to mlx-lm of the same process.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx import nn
from mlx_lm.models.base import (
    BaseModelArgs,
    create_attention_mask,
    scaled_dot_product_attention,
)

from tests.support.models import CONTEXT_TOKENS, VOCABULARY_TOKENS, save_tiny_tokenizer

ARCHITECTURE = "fingerprint"
sys.modules[f"mlx_lm.models.{ARCHITECTURE}"] = sys.modules[__name__]

# Replies are of these: the bytes of the tokenizer, none of them special.
REPLY_TOKENS = 256
# A prime: token codes and position codes are 1 to 16, and their products tell either apart.
PRIME, SHIFT = 17, 9
LAYERS, HEADS, WIDTH = 2, 2, 64
# Keys and values of a layer.
CHANNELS = 2 * HEADS * WIDTH

Integers = npt.NDArray[np.integer[Any]]


@dataclass
class ModelArgs(BaseModelArgs):
    model_type: str = ARCHITECTURE


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token_codes = mx.zeros((VOCABULARY_TOKENS, CHANNELS))
        self.position_codes = mx.zeros((CONTEXT_TOKENS, CHANNELS))

    def __call__(self, ids: mx.array, mask: Any, cache: Any) -> mx.array:
        """Sums of the fingerprints that each token sees, (batch, tokens, CHANNELS)."""
        batch, length = ids.shape
        # One number, or one for each row of a batch; padding lies before 0 and behind the end.
        positions = mx.expand_dims(mx.array(cache.offset), -1) + mx.arange(length)
        positions = mx.clip(positions, 0, CONTEXT_TOKENS - 1)
        rows = (self.token_codes[ids] * self.position_codes[positions]) % PRIME - SHIFT
        rows = rows.reshape(batch, length, 2, HEADS, WIDTH).transpose(2, 0, 3, 1, 4)
        queries = mx.zeros_like(rows[0])
        parts = cache.update_and_fetch(rows[0], rows[1])
        means = [
            scaled_dot_product_attention(queries, parts[0], part, cache, scale=1.0, mask=mask)
            for part in parts
        ]
        flat = mx.stack(means).transpose(1, 3, 0, 2, 4).reshape(batch, length, CHANNELS)
        return flat * mx.expand_dims(positions + 1, -1)


class Model(nn.Module):
    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.layers = [Layer() for _ in range(LAYERS)]
        self.factors = mx.zeros((LAYERS * CHANNELS,), mx.uint32)

    def __call__(self, ids: mx.array, cache: Any) -> mx.array:
        mask = create_attention_mask(ids, cache[0])
        sums = mx.concatenate(
            [layer(ids, mask, kept) for layer, kept in zip(self.layers, cache, strict=True)], -1
        )
        exact = mx.round(sums).astype(mx.int32).astype(mx.uint32)
        hashed = mx.sum(exact * self.factors, axis=-1)  # modulo 2**32
        token = mx.expand_dims(hashed >> 24, -1)
        return mx.where(mx.arange(VOCABULARY_TOKENS) == token, 30.0, 0.0)


class Fingerprints:
    """The weights of the model of one seed, and what it must reply."""

    def __init__(self, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)

        def codes(count: int) -> Integers:
            return draw.integers(1, PRIME, (LAYERS, count, CHANNELS), dtype=np.int16)

        self._tokens = codes(VOCABULARY_TOKENS)
        self._positions = codes(CONTEXT_TOKENS)
        self._factors = draw.integers(0, 1 << 32, LAYERS * CHANNELS, dtype=np.uint32)

    def save(self, folder: Path) -> Path:
        """Writes a folder that mlx-lm loads."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {"factors": mx.array(self._factors)}
        for layer in range(LAYERS):
            name = f"layers.{layer}"
            weights[f"{name}.token_codes"] = mx.array(self._tokens[layer].astype(np.float32))
            weights[f"{name}.position_codes"] = mx.array(self._positions[layer].astype(np.float32))
        mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
        config = {
            "model_type": ARCHITECTURE,
            "max_position_embeddings": CONTEXT_TOKENS,
            "vocab_size": VOCABULARY_TOKENS,
            "eos_token_id": 258,
        }
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        save_tiny_tokenizer(folder)
        return folder

    def reply(self, prompt: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that follow `prompt` in greedy generation."""
        sums = self._rows(prompt, 0).sum(axis=0, dtype=np.int32)
        reply: list[int] = []
        for position in range(len(prompt), len(prompt) + count):
            reply.append(self._next_token(sums))
            sums = sums + self._rows(reply[-1:], position)[0]
        return reply

    def _rows(self, tokens: Sequence[int], first: int) -> Integers:
        """Fingerprints of tokens from position `first` on, (tokens, LAYERS * CHANNELS)."""
        positions = slice(first, first + len(tokens))
        codes = self._tokens[:, list(tokens)] * self._positions[:, positions]
        rows = codes % PRIME - SHIFT
        return rows.transpose(1, 0, 2).reshape(len(tokens), LAYERS * CHANNELS)

    def _next_token(self, sums: Integers) -> int:
        hashed = (sums.astype(np.uint32) * self._factors).sum(dtype=np.uint32)
        return int(hashed) >> 24
