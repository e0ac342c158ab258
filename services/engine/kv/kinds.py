"""The kinds of layer cache that the store can hold, by our own names.

A kind knows three things about a layer's cache: its geometry, how its rows are taken out, and
how a cache is made of rows. Everything between (grouping, encoding, records, copies) deals in
named parts of shape (1, heads, rows, width) and works for any kind that is rows. Kinds that are
state (rotating windows, recurrent layers) will be attached to a position instead, and have their
entry in `KINDS` beside this one; a class that has no entry is never cached.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import mlx.core as mx

from engine.kv.encoding import Affine, Encoding, PartShape
from engine.kv.history import FULL, History, JoiningKVCache, Precision, QuantizedKVCache, Rows


class NotCacheable(Exception):
    """Why a model runs without the store: a sentence for the start line."""


class RowKind(Protocol):
    """A layer cache that is rows of tokens and can be cut at any of them."""

    @property
    def name(self) -> str: ...

    def shapes(self, cache: Any) -> tuple[PartShape, ...]:
        """Geometry of a cache that holds rows. NotCacheable when they cannot be stored."""

    def rows(self, cache: Any, index: int, first: int, end: int) -> Rows:
        """Rows [first, end) of one request in the live cache of a layer, as it holds them: for each
        part its arrays, (1, heads, end - first, ...). Lazy slices of live arrays."""

    def restore(
        self, shapes: Sequence[PartShape], parts: Mapping[str, tuple[mx.array, ...]], rows: int
    ) -> Any:
        """A cache of one request with exactly these rows, without a copy."""


@dataclass(frozen=True, slots=True)
class PlainKV:
    """mlx-lm's KVCache: keys and values, appended to."""

    name: str = "kv"

    def shapes(self, cache: Any) -> tuple[PartShape, ...]:
        if cache.empty():
            raise NotCacheable("a layer did not use its cache in a forward pass")
        keys, values = cache.precision.split(cache.part()[0])
        return (
            _shape("keys", keys, cache.precision.keys),
            _shape("values", values, cache.precision.values),
        )

    def rows(self, cache: Any, index: int, first: int, end: int) -> Rows:
        if isinstance(cache, History):
            return cache.rows(index, first, end)
        return (cache.keys[:, :, first:end],), (cache.values[:, :, first:end],)

    def restore(
        self, shapes: Sequence[PartShape], parts: Mapping[str, tuple[mx.array, ...]], rows: int
    ) -> Any:
        keys, values = shapes
        precision = Precision(keys.live, values.live)
        one = JoiningKVCache if precision == FULL else QuantizedKVCache
        return one.of(precision, [*parts["keys"], *parts["values"]], rows)


# By exact class: a subclass may rotate or share its rows.
KINDS: Final[Mapping[type, RowKind]] = {JoiningKVCache: PlainKV(), QuantizedKVCache: PlainKV()}
BY_NAME: Final[Mapping[str, RowKind]] = {kind.name: kind for kind in KINDS.values()}

_DTYPES: Final = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}


def _shape(name: str, arrays: tuple[mx.array, ...], live: Encoding) -> PartShape:
    # A row of an affine encoding has the width of its scales times the group, and their dtype.
    rows = arrays[0] if len(arrays) == 1 else arrays[1]
    batch, heads, _, width = rows.shape
    width *= live.group_size if isinstance(live, Affine) else 1
    assert batch == 1
    if rows.dtype not in _DTYPES:
        raise NotCacheable(f"{name} of a layer are {rows.dtype}")
    if heads == 0 or width == 0:
        raise NotCacheable(f"{name} of a layer are empty ({heads} heads of {width})")
    return PartShape(name, heads, width, _DTYPES[rows.dtype], live)
