"""Random models and long random histories in caches of all kinds, for benchmarks.decode."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models import cache as theirs
from mlx_lm.models.llama import Model, ModelArgs

from engine.kv.attention import STRATEGIES, PackedDecode, Strategy
from engine.kv.history import FULL, BatchKVCache, JoiningKVCache, Precision, QuantizedKVCache

BITS: Final[tuple[int | tuple[int, int], ...]] = (8, 4, (8, 4))
# At decode packed-decode is packed-matmul.
STRATEGY_NAMES: Final = ("packed-matmul", "dequantize")
# So many tokens shorter than the sequence before it is each.
APART: Final = 3
# mlx-lm's buffers grow by so many columns, and CUDA's fast attention looks for a multiple of it.
THEIR_STEP: Final = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a llama; the defaults are those of 8B parameters, but for a small vocabulary."""

    dtype: mx.Dtype
    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 14336
    vocabulary: int = 32000


@dataclass(frozen=True, slots=True)
class Size:
    batch: int
    context: int

    @classmethod
    def parse(cls, text: str) -> "Size":
        """Of "8x4096"."""
        batch, context = text.split("x")
        return cls(int(batch), int(context))


def random_model(shape: Shape) -> Any:
    """Evaluated layer by layer: what its constructor would draw, in float32, is never computed."""
    model: Any = Model(
        ModelArgs(
            model_type="llama",
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            intermediate_size=shape.intermediate,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            rms_norm_eps=1e-5,
            vocab_size=shape.vocabulary,
            tie_word_embeddings=False,
        )
    )

    def drawn(weight: mx.array) -> mx.array:
        if weight.ndim < 2:
            return weight.astype(shape.dtype)
        # Uniform of variance 1 / inputs, which keeps the size of activations.
        bound = (3 / weight.shape[-1]) ** 0.5
        return mx.random.uniform(-bound, bound, weight.shape, shape.dtype)

    for part in (*model.layers, model.model.embed_tokens, model.model.norm, model.lm_head):
        part.update(tree_map(drawn, part.parameters()))
        mx.eval(part.parameters())
    mx.clear_cache()
    return model


@dataclass(frozen=True, slots=True)
class Source:
    """Random rows of one sequence, encoded once, of which each layer and sequence takes others."""

    arrays: list[mx.array]

    @classmethod
    def of(cls, shape: Shape, precision: Precision, size: Size) -> "Source":
        rows = size.context + shape.layers + size.batch
        keys, values = (
            mx.random.normal(
                (1, shape.kv_heads, rows, shape.head_dim), shape.dtype, key=mx.random.key(seed)
            )
            for seed in (1, 2)
        )
        arrays = precision.encode(keys, values)
        mx.eval(arrays)
        return cls(arrays)

    def rows(self, layer: int, sequence: int, count: int) -> list[mx.array]:
        """Views."""
        first = layer + sequence
        return [array[:, :, first : first + count] for array in self.arrays]


# Makes the cache of a layer, of the source, the layer, the lengths, and columns to have room for.
Make = Callable[[Precision, Source, int, Sequence[int], int], Any]


@dataclass(frozen=True, slots=True)
class Contender:
    """`strategy` is that of our attention; None: mlx-lm's own."""

    name: str
    make: Make
    precision: Precision = FULL
    strategy: Strategy | None = None
    apart: int = APART

    def lengths(self, size: Size) -> list[int]:
        return [size.context - self.apart * sequence for sequence in range(size.batch)]

    def caches(self, shape: Shape, size: Size, steps: int) -> list[Any]:
        """With room for so many steps where the contender has a say in it."""
        source, lengths = Source.of(shape, self.precision, size), self.lengths(size)
        made = []
        for layer in range(shape.layers):
            made.append(self.make(self.precision, source, layer, lengths, size.context + steps))
            # Layer by layer, so that never more than one is held in pieces as well.
            mx.eval(made[-1].state[:2])
            mx.clear_cache()
        return made


def row_bytes(shape: Shape, precision: Precision) -> int:
    """Of one token in a layer."""
    rows = mx.zeros((1, shape.kv_heads, 1, shape.head_dim), shape.dtype)
    return sum(array.nbytes for array in precision.encode(rows, rows))


def ours(
    precision: Precision, source: Source, layer: int, lengths: Sequence[int], _: int
) -> BatchKVCache:
    one = JoiningKVCache if precision == FULL else QuantizedKVCache
    return BatchKVCache.merge(
        [
            one.of(precision, source.rows(layer, sequence, count), count)
            for sequence, count in enumerate(lengths)
        ]
    )


def _their_arrays(
    source: Source, layer: int, lengths: Sequence[int], columns: int
) -> list[mx.array]:
    """Padded on the left to the longest, and on the right to a full buffer."""
    longest, capacity = max(lengths), -(-columns // THEIR_STEP) * THEIR_STEP
    found = []
    for index in range(2):
        padded = [
            mx.pad(
                source.rows(layer, sequence, count)[index],
                [(0, 0), (0, 0), (longest - count, capacity - longest), (0, 0)],
            )
            for sequence, count in enumerate(lengths)
        ]
        found.append(mx.concatenate(padded, axis=0))
    return found


def their_masked(
    _: Precision, source: Source, layer: int, lengths: Sequence[int], columns: int
) -> Any:
    padding = [max(lengths) - count for count in lengths]
    made: Any = theirs.BatchKVCache(padding)
    keys, values = _their_arrays(source, layer, lengths, columns)
    made.state = keys, values, mx.array(list(lengths)), mx.array(padding), max(lengths)
    return made


def their_unmasked(
    _: Precision, source: Source, layer: int, lengths: Sequence[int], columns: int
) -> Any:
    assert len(set(lengths)) == 1
    made: Any = theirs.KVCache()
    made.state = (*_their_arrays(source, layer, lengths, columns), lengths[0])
    return made


def contenders(only: Sequence[str], size: Size) -> list[Contender]:
    """Those whose name contains one of `only`, or all; mlx-lm's first."""
    found = [
        Contender("KVCache, no mask", their_unmasked, apart=0),
        Contender("BatchKVCache, mask", their_masked),
        Contender("full", ours, strategy=PackedDecode()),
    ]
    if size.batch > 1:
        found.append(Contender("full, equal", ours, strategy=PackedDecode(), apart=0))
    for bits in BITS:
        label = "{}/{}".format(*bits) if isinstance(bits, tuple) else f"{bits}"
        for name in STRATEGY_NAMES:
            found.append(
                Contender(f"{label} bits, {name}", ours, Precision.affine(bits), STRATEGIES[name])
            )
    return [one for one in found if not only or any(part in one.name for part in only)]
