"""Asks for attention over plain rows in the shapes that MLX's CPU backend computes fastest.

It multiplies head by head, and computes what a mask hides. So the query heads of a KV head are
asked as queries of one head, and many queries in blocks, without the columns of later tokens.
Results are as close as two orders of the same sums are, not equal in each bit.
"""

from collections.abc import Callable
from typing import Any, Final

import mlx.core as mx

from engine.kv.history import History
from engine.kv.rotating import WindowHistory

BLOCK: Final = 32
"""Queries of each head that are asked at once."""

_WORTH: Final = 4
"""Blocks are asked up to so many columns for each query: of more, little is of later tokens."""

_Ask = Callable[[mx.array, mx.array, mx.array, mx.array | None], mx.array]


def attend(
    attention: Callable[..., mx.array],
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
) -> mx.array:
    """What `attention`, mlx-lm's, says of these arguments, asked another way if that is faster.
    What it would refuse is asked as it came.

    Shapes: queries (sequences, heads, queries, width), keys and values (sequences, KV heads,
    columns, width), the result as the queries with the values' width.
    """

    def ask(q: mx.array, k: mx.array, v: mx.array, its_mask: mx.array | None) -> mx.array:
        return attention(q, k, v, cache, scale, its_mask)

    if _is_for_us(queries, keys, values):
        heads, count = queries.shape[1:3]
        kv_heads, columns = keys.shape[1:3]
        if count == 1 and heads > kv_heads and _is_of_one_query(mask, heads):
            return _stacked(ask, queries, keys, values, mask)
        if BLOCK < count <= columns <= _WORTH * count:
            causal = _causal(mask, cache, heads, (count, columns))
            if causal is not None:
                return _in_blocks(ask, queries, keys, values, causal)
    return attention(queries, keys, values, cache, scale, mask)


def _is_for_us(queries: mx.array, keys: Any, values: Any) -> bool:
    """Whether these are plain rows on a CPU, with as many query heads for each KV head."""
    if mx.default_device().type is not mx.DeviceType.cpu:
        return False
    if not isinstance(keys, mx.array) or not isinstance(values, mx.array):
        return False
    if not queries.ndim == keys.ndim == values.ndim == 4 or not queries.size:
        return False
    heads, kv_heads = queries.shape[1], keys.shape[1]
    return values.shape[:3] == keys.shape[:3] and 0 < kv_heads <= heads and heads % kv_heads == 0


def _is_of_one_query(mask: Any, heads: int) -> bool:
    return mask is None or (_is_array_for(mask, heads) and set(mask.shape[-2:-1]) <= {1})


def _is_array_for(mask: Any, heads: int) -> bool:
    """Whether it is an array for all heads alike or for each."""
    return isinstance(mask, mx.array) and mask.ndim <= 4 and set(mask.shape[-3:-2]) <= {1, heads}


def _causal(mask: Any, cache: Any, heads: int, shape: tuple[int, int]) -> mx.array | None:
    """The mask as an array (..., queries, columns), of this shape, if it hides later tokens and
    those are in the last columns.

    Over all rows of a History they are, and no model of mlx-lm's lets a token see later ones. The
    columns of a window are in another order.
    """
    count, columns = shape
    if isinstance(mask, str) and mask == "causal":
        return mx.arange(columns) <= mx.arange(columns - count, columns)[:, None]
    if not _is_array_for(mask, heads) or mask.shape[-2:] != shape:
        return None
    in_order = isinstance(cache, History) and not isinstance(cache, WindowHistory)
    return mask if in_order and cache.size() == columns else None


def _stacked(
    ask: _Ask, queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None
) -> mx.array:
    batch, heads, count, width = queries.shape
    kv_heads = keys.shape[1]
    grouping = heads // kv_heads
    asked = queries.reshape(batch, kv_heads, grouping * count, width)
    if mask is not None and mask.shape[-3:-2] == (heads,):
        mask = mask.reshape(*mask.shape[:-3], kv_heads, grouping * count, mask.shape[-1])
    elif mask is not None and count > 1:
        mask = mx.tile(mask, (grouping, 1))
    return ask(asked, keys, values, mask).reshape(batch, heads, count, values.shape[-1])


def _in_blocks(
    ask: _Ask, queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array
) -> mx.array:
    """The last query may see all columns, the one before it one less, and so on."""
    count = queries.shape[2]
    before = keys.shape[2] - count
    found = []
    for start in range(0, count, BLOCK):
        stop = min(start + BLOCK, count)
        block, columns = slice(start, stop), slice(before + stop)
        rows = keys[:, :, columns], values[:, :, columns]
        found.append(_stacked(ask, queries[:, :, block], *rows, mask[..., block, columns]))
    return mx.concatenate(found, axis=2)
