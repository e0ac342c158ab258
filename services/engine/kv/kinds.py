"""The kinds of layer cache that the store can hold, by our own names.

A kind knows three things about a layer's cache: its geometry, how its rows are taken out, and
how a cache is made of rows. Everything between (grouping, encoding, records, copies) deals in
named parts of shape (1, heads, rows, width) and works for any kind that is rows. Kinds that are
state (rotating windows, recurrent layers) will be attached to a position instead, and have their
entry in `KINDS` beside this one; a class that has no entry is never cached.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache


class NotCacheable(Exception):
    """Why a model runs without the store: a sentence for the start line."""


@dataclass(frozen=True, slots=True)
class PartShape:
    """What one layer keeps of each token under one name; dtype as records spell it."""

    name: str
    heads: int
    width: int
    dtype: str

    @property
    def mlx_dtype(self) -> mx.Dtype:
        dtype: mx.Dtype = getattr(mx, self.dtype)
        return dtype


class RowKind(Protocol):
    """A layer cache that is rows of tokens and can be cut at any of them."""

    @property
    def name(self) -> str: ...

    def shapes(self, cache: Any) -> tuple[PartShape, ...]:
        """Geometry of a cache that holds rows. NotCacheable when they cannot be stored."""

    def restore(self, parts: Mapping[str, mx.array], rows: int) -> Any:
        """A cache of exactly these rows, without a copy."""


class AttachedKVCache(KVCache):
    """Rows that were just attached: alone in a batch they become its rows without a copy."""

    @classmethod
    def merge(cls, caches: list[Any]) -> Any:
        batch: Any = BatchKVCache
        if len(caches) > 1:
            return batch.merge(caches)
        (alone,) = caches
        merged = batch([0])
        offset = mx.array([alone.offset])
        merged.state = (alone.keys, alone.values, offset, merged.left_padding, alone.offset)
        return merged


@dataclass(frozen=True, slots=True)
class PlainKV:
    """mlx-lm's KVCache: keys and values, appended to."""

    name: str = "kv"

    def shapes(self, cache: Any) -> tuple[PartShape, ...]:
        if cache.keys is None:
            raise NotCacheable("a layer did not use its cache in a forward pass")
        return (_shape("keys", cache.keys), _shape("values", cache.values))

    def restore(self, parts: Mapping[str, mx.array], rows: int) -> Any:
        cache: Any = AttachedKVCache()  # type: ignore[no-untyped-call]
        cache.state = (parts["keys"], parts["values"], rows)
        return cache


# By exact class: a subclass may rotate, quantize or share its rows.
KINDS: Final[Mapping[type, RowKind]] = {KVCache: PlainKV()}
BY_NAME: Final[Mapping[str, RowKind]] = {kind.name: kind for kind in KINDS.values()}

_DTYPES: Final = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}


def _shape(name: str, rows: mx.array) -> PartShape:
    batch, heads, _, width = rows.shape
    assert batch == 1
    if rows.dtype not in _DTYPES:
        raise NotCacheable(f"{name} of a layer are {rows.dtype}")
    if heads == 0 or width == 0:
        raise NotCacheable(f"{name} of a layer are empty ({heads} heads of {width})")
    return PartShape(name, heads, width, _DTYPES[rows.dtype])
