"""Attention over packed rows: quantized keys and values are read as their cache holds them.

mlx-lm's own formula broadcasts the packed arrays over grouped query heads, which one backend
computes wrongly without an error; it changes the caller's queries, has one number of bits for
keys and values, and knows no attention sinks. How a model's layers come here is in `routing`;
whether a strategy is right on this device is found out by `attention_check`.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Protocol, Self

import mlx.core as mx
import numpy as np

from engine import backend
from engine.kv.encoding import Affine

# On a GPU: heads and parts that add up values at the same time, and the columns of a part.
_PLACES: Final = 1024
_PART: Final = 256

# None: all columns. "causal": the queries are the last rows of the history. An array, boolean
# (True is seen) or added to the scores, broadcasts to (B, query heads, L, columns).
Mask = mx.array | Literal["causal"] | None


class PackedHistory(tuple[mx.array, mx.array, mx.array]):
    """What a quantized cache hands to attention in place of an array of keys, or of values.

    (codes, scales, biases), each (B, KV heads, capacity, words or groups): whole buffers, since
    packed arrays that are cut along columns cannot be multiplied on every backend; the first
    rows of a larger batch will do. The mask decides what is seen of columns [0, columns); nobody
    sees the capacity beyond. Codes may be anything there, but scales and biases of *values* must
    be finite, for they are multiplied by zero; keys may be anything at all. What a mask hides
    inside of [0, columns) must be finite for both.
    """

    encoding: Affine
    columns: int

    def __new__(
        cls, arrays: tuple[mx.array, mx.array, mx.array], encoding: Affine, columns: int
    ) -> Self:
        made = super().__new__(cls, arrays)
        made.encoding = encoding
        made.columns = columns
        assert 0 < columns <= made.capacity, (columns, made.capacity)
        return made

    @property
    def heads(self) -> int:
        return int(self[0].shape[1])

    @property
    def capacity(self) -> int:
        return int(self[0].shape[2])


@dataclass(frozen=True, slots=True)
class Call:
    """What mx.fast.scaled_dot_product_attention is asked, of rows that are packed.

    Queries (B, query heads, L, key width), sinks (query heads,). Arrays of masks may also have a
    head axis of KV heads, as in mlx-lm's quantized attention. No array may be changed.
    """

    queries: mx.array
    keys: PackedHistory
    values: PackedHistory
    scale: float
    mask: Mask = None
    sinks: mx.array | None = None

    def __post_init__(self) -> None:
        assert self.keys.columns == self.values.columns, (self.keys.columns, self.values.columns)
        assert self.queries.shape[1] % self.keys.heads == 0, (self.queries.shape, self.keys.heads)


class Strategy(Protocol):
    """One way to compute attention over packed rows.

    A kernel that reads packed rows itself is to be another one of these, in `STRATEGIES`.
    """

    @property
    def name(self) -> str: ...

    def attend(self, call: Call) -> mx.array:
        """(B, query heads, L, value width).

        Rotations are the caller's: queries come rotated as the keys are, and what is returned is
        rotated as the values are. A mask is "causal" only for several queries; an added one is
        finite and of the queries' dtype; the head axis of an array is 1 or query heads.
        """


def attend(strategy: Strategy, call: Call) -> mx.array:
    """As mx.fast.scaled_dot_product_attention of the rows that were packed. Lazy.

    Queries that see nothing give finite numbers that mean nothing.
    """
    queries = call.queries
    if call.keys.encoding.rotation is not None:
        queries = call.keys.encoding.rotation.apply(queries)
    attended = strategy.attend(replace(call, queries=queries, mask=_plain_mask(call)))
    if call.values.encoding.rotation is not None:
        attended = call.values.encoding.rotation.undo(attended)
    return attended


def _plain_mask(call: Call) -> Mask:
    """As strategies get it."""
    mask, kv_heads = call.mask, call.keys.heads
    _, heads, length, _ = call.queries.shape
    if mask is None or isinstance(mask, str):
        assert mask in (None, "causal"), mask
        return mask if length > 1 else None
    if mask.ndim > 2 and mask.shape[-3] == kv_heads != heads and kv_heads > 1:
        mask = mx.repeat(mask, heads // kv_heads, axis=-3)
    if mask.dtype == mx.bool_:
        return mask
    # A row of minus infinities has no softmax. Half of the range stays for the scores.
    dtype = call.queries.dtype
    return mx.maximum(mask.astype(dtype), mx.finfo(dtype).min / 2)


@dataclass(frozen=True, slots=True)
class PackedMatmul:
    """Multiplies with the packed rows; scores of one layer are all that is made."""

    name: str = "packed-matmul"

    def attend(self, call: Call) -> mx.array:
        keys, values = call.keys, call.values
        batch, heads, length, width = call.queries.shape
        # Query heads that share a KV head become rows of one matrix.
        folded = (batch, keys.heads, heads // keys.heads * length)
        queries = (call.queries * call.scale).reshape(*folded, width)
        scores = _times(queries, keys, transpose=True)
        scores = scores.reshape(batch, heads, length, keys.capacity)
        scores = _visible(scores, call.mask, keys.columns)
        weights = mx.softmax(scores, axis=-1, precise=True)
        attended = _times(weights.reshape(*folded, values.capacity), values, transpose=False)
        attended = attended.reshape(batch, heads, length, -1)
        if call.sinks is not None:
            # A sink is one more score whose value is zero: it takes its part of the weights.
            total = mx.logsumexp(scores.astype(mx.float32), axis=-1, keepdims=True)
            attended = attended * mx.sigmoid(total - call.sinks.astype(mx.float32)[:, None, None])
        return attended.astype(call.queries.dtype)


def _times(rows: mx.array, history: PackedHistory, transpose: bool) -> mx.array:
    codes, scales, biases = history
    if mx.default_device().type == mx.cpu:
        # This backend adds up in the dtype it is given: of bfloat16 values of 2, a thousand of
        # them weighted to a mean come out as 1.4.
        rows, scales, biases = (array.astype(mx.float32) for array in (rows, scales, biases))
    elif not transpose:
        return _added_up(rows, history)
    return _quantized_matmul(rows, (codes, scales, biases), history.encoding, transpose)


def _added_up(weights: mx.array, values: PackedHistory) -> mx.array:
    """Weights (B, KV heads, rows, capacity) times values, the columns in several parts at once.

    A GPU would add up all columns of a head in one place, one after the other: with few heads in
    all, most of it would idle.
    """
    batch, heads, rows, capacity = weights.shape
    parts = _parts(batch * heads, capacity)
    if parts == 1:
        return _quantized_matmul(weights, values, values.encoding, transpose=False)
    columns = capacity // parts
    weights = weights.reshape(batch, heads, rows, parts, columns).swapaxes(2, 3)
    cut = tuple(array.reshape(batch, heads, parts, columns, -1) for array in values)
    added = _quantized_matmul(weights, cut, values.encoding, transpose=False)
    return added.astype(mx.float32).sum(axis=2)


def _parts(heads: int, capacity: int) -> int:
    """A power of two that divides the capacity."""
    parts = 1
    while heads * parts < _PLACES and capacity % (2 * parts) == 0 and capacity >= 2 * parts * _PART:
        parts *= 2
    return parts


def _quantized_matmul(
    rows: mx.array, packed: Sequence[mx.array], encoding: Affine, transpose: bool
) -> mx.array:
    codes, scales, biases = packed
    return mx.quantized_matmul(
        rows,
        codes,
        scales,
        biases,
        transpose=transpose,
        group_size=encoding.group_size,
        bits=encoding.bits,
    )


def _visible(scores: mx.array, mask: Mask, columns: int) -> mx.array:
    """Scores (B, heads, L, capacity) with those replaced that must not count."""
    length, capacity = scores.shape[-2:]
    if mask is None and columns == capacity:
        return scores
    inside, floor = _bounds(columns, capacity, scores.dtype)
    if mask is None:
        return mx.where(inside, scores, floor)
    if isinstance(mask, str):
        rows = mx.arange(columns - length, columns)
        return mx.where(mx.arange(capacity) <= rows[:, None], scores, floor)
    mask = mx.broadcast_to(mask, (*mask.shape[:-1], columns))
    # Zero is False, and adds nothing.
    mask = mx.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, capacity - columns)])
    if mask.dtype == mx.bool_:
        return mx.where(mask, scores, floor)
    return mx.where(inside, scores + mask, floor)


@functools.lru_cache(maxsize=8)
def _bounds(columns: int, capacity: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """(capacity,) each: which columns there are, and the score of those that are not seen: for
    those beyond the capacity less than for any other, so that they have no weight even where
    nothing is seen.

    All layers of a step ask for the same, and for a GPU three tiny operations in each of them
    are a notable part of a decode step. Made of host memory, without an operation that would
    belong to the stream of one thread.
    """
    inside = np.arange(capacity) < columns
    floor = np.where(inside, mx.finfo(dtype).min, -np.inf).astype(np.float32)
    return mx.array(inside), mx.array(floor, dtype)


@dataclass(frozen=True, slots=True)
class DequantizeLayer:
    """Dequantizes the keys and values of this layer, for MLX's own fused attention.

    Needs them in full precision while the layer is computed, which a long history in a large
    batch may not have memory for.
    """

    name: str = "dequantize"

    def attend(self, call: Call) -> mx.array:
        # Cut after dequantizing: packed arrays are whole wherever they go.
        rows_of: Any = [
            history.encoding.dequantize(history)[..., : history.columns, :]
            for history in (call.keys, call.values)
        ]
        return mx.fast.scaled_dot_product_attention(
            call.queries, *rows_of, scale=call.scale, mask=call.mask, sinks=call.sinks
        )


@dataclass(frozen=True, slots=True)
class PackedDecode:
    """Packed matmul for one query; dequantizes for several, which then share the rows."""

    name: str = "packed-decode"

    def attend(self, call: Call) -> mx.array:
        strategy = PackedMatmul() if call.queries.shape[2] == 1 else DequantizeLayer()
        return strategy.attend(call)


STRATEGIES: Final[Mapping[str, Strategy]] = {
    strategy.name: strategy for strategy in (PackedMatmul(), DequantizeLayer(), PackedDecode())
}

# From `python -m benchmarks.packed_attention`. Times of one call, as multiples of attention over
# full precision:
#
#   CPU (2 cores of an AMD EPYC, float32)    8 bits         4 bits
#     one query        packed matmul       1.4 to 2.4     1.7 to 2.7
#                      dequantize          1.2 to 2.0     2.2 to 4.7
#     2 queries        packed matmul       2.5 to 2.9     2.5 to 3.1
#                      dequantize          1.3            2.2
#     64 queries       packed matmul         6 to 10        7 to 11
#                      dequantize              1.1            1.2
#
# With one query dequantizing is at best a third faster, for 8 bits, and takes five times the
# memory of the packed rows for each layer; so packed. On CUDA whole decode steps were measured
# (`python -m benchmarks.decode`; docs/benchmarks.md has both). Metal is not measured yet. A chunk
# of a prompt is multiplied with packed rows nowhere: scores of 2,048 queries of 32 heads behind
# 40,000 columns would take 5 GiB a layer, the layer's rows in full precision a thirtieth of that.
DEFAULTS: Final[Mapping[backend.Name, Strategy]] = {
    "cpu": PackedDecode(),
    "metal": PackedDecode(),
    "cuda": PackedDecode(),
}


def preferred(device: backend.Name) -> list[Strategy]:
    """Every strategy, the default for this backend first."""
    default = DEFAULTS[device]
    return [default, *(one for one in STRATEGIES.values() if one != default)]
