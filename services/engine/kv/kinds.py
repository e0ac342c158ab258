"""The kinds of layer cache that the store can hold, by our own names.

A layer is *rows* when its cache can be cut at any token: rows of tokens are taken out of it, and
a cache is made of the first so many of them. It is *state* when it cannot (bounded windows,
recurrent layers, attention in chunks): what it holds at one exact position is taken out, a
snapshot, and comes back at that position only.

A kind knows its geometry, which is part of a model's identity; how to take what is stored out of
a live cache, of one request or of a batch; and how to make a cache of it. Everything between
(grouping, encoding, records, copies) deals in named parts of shape (1, heads, rows, width) and
works for any kind. Kinds of state are in states.py; layout.py knows which class is of which kind,
and a class that is of none is never cached.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

import mlx.core as mx
from mlx_lm.models.cache import CacheList, ConcatenateKVCache

from engine.kv.encoding import Affine, Encoding, Lossless, PartShape
from engine.kv.history import FULL, History, JoiningKVCache, Precision, QuantizedKVCache, Rows

if TYPE_CHECKING:
    from engine.kv.layout import CacheLayout

# A part's arrays as a live cache holds them, (1, heads, rows, ...), by the part's name.
Named = Mapping[str, tuple[mx.array, ...]]


class NotCacheable(Exception):
    """Why a model, or a snapshot, is not stored: a sentence for the start line or the log."""


class Kind(Protocol):
    """Layers of one geometry."""

    # As records call it; people read its str().
    name: ClassVar[str]

    @property
    def parts(self) -> tuple[PartShape, ...]:
        """What is stored of each layer: nothing of parts that are empty."""

    def describe(self) -> Mapping[str, Any]:
        """All that `parts` do not say and that identity has to cover, as plain values."""


class RowKind(Kind, Protocol):
    """A layer cache that is rows of tokens and can be cut at any of them."""

    def rows(self, cache: Any, index: int, first: int, end: int) -> Rows:
        """Rows [first, end) of one request in the live cache of a layer, as it holds them: for each
        part its arrays, (1, heads, end - first, ...). Lazy slices of live arrays."""

    def restore(self, parts: Named, position: int) -> Any:
        """A cache of one request with exactly the first `position` rows, without a copy."""


class StateKind(Kind, Protocol):
    """A layer cache that is what it is at one position only."""

    def rows_at(self, position: int) -> int:
        """How many rows its parts have there."""

    def first_rows(self, position: int, tokens: int) -> int:
        """The first so many of those rows have all that it holds of the first `tokens` tokens."""

    def snapshot(self, cache: Any, index: int) -> Rows:
        """What the live cache of a layer holds of one request; as RowKind.rows.

        NotCacheable when it is not of this geometry.
        """

    def restore(self, parts: Named, position: int) -> Any:
        """A cache of one request as it was at that position, without a copy."""


@dataclass(frozen=True, slots=True)
class KeysAndValues:
    keys: PartShape
    values: PartShape

    @property
    def parts(self) -> tuple[PartShape, ...]:
        return tuple(shape for shape in (self.keys, self.values) if shape.width)

    @property
    def precision(self) -> Precision:
        return Precision(self.keys.live, self.values.live)

    def __str__(self) -> str:
        return "keys and values"

    def describe(self) -> Mapping[str, Any]:
        return {}

    def filled(self, pair: Rows) -> Rows:
        """Without what has no width."""
        return tuple(part for part in pair if part[0].shape[-1])

    def pair(self, parts: Named) -> list[mx.array]:
        """The arrays of keys and then those of values, those without width made anew."""
        rows = next(iter(parts.values()))[0].shape[2]
        arrays: list[mx.array] = []
        for shape in (self.keys, self.values):
            empty = (mx.zeros((1, shape.heads, rows, 0), shape.mlx_dtype),)
            arrays += parts.get(shape.name, empty)
        return arrays


@dataclass(frozen=True, slots=True)
class PlainKV(KeysAndValues):
    """Keys and values, appended to: mlx-lm's KVCache, in a batch ours."""

    name: ClassVar[str] = "kv"

    @classmethod
    def of(cls, cache: Any) -> "PlainKV":
        arrays, _ = cache.part()
        return cls(*shapes(arrays, cache.precision))

    def rows(self, cache: Any, index: int, first: int, end: int) -> Rows:
        if isinstance(cache, History):
            return self.filled(cache.rows(index, first, end))
        return self.filled(((cache.keys[:, :, first:end],), (cache.values[:, :, first:end],)))

    def restore(self, parts: Named, position: int) -> Any:
        one = JoiningKVCache if self.precision == FULL else QuantizedKVCache
        return one.of(self.precision, self.pair(parts), position)


@dataclass(frozen=True, slots=True)
class ConcatenatedKV(KeysAndValues):
    """mlx-lm's ConcatenateKVCache, which has no capacity to spare and runs in no batch."""

    name: ClassVar[str] = "concatenated"

    @classmethod
    def of(cls, cache: Any) -> "ConcatenatedKV":
        return cls(*shapes(buffers(cache), FULL))

    def rows(self, cache: Any, index: int, first: int, end: int) -> Rows:
        assert index == 0
        return self.filled(((cache.keys[:, :, first:end],), (cache.values[:, :, first:end],)))

    def restore(self, parts: Named, position: int) -> Any:
        cache: Any = ConcatenateKVCache.from_state(self.pair(parts))  # type: ignore[no-untyped-call]
        assert cache.offset == position
        return cache


def leaves(caches: Sequence[Any]) -> list[Any]:
    """The caches of a model's layers, those in a CacheList one by one: what records count."""
    return [leaf for cache in caches for leaf in members(cache)]


def members(cache: Any) -> Sequence[Any]:
    """A CacheList's own caches, in a batch or not; else the cache alone."""
    held: Sequence[Any] = cache.caches if isinstance(cache, CacheList) else [cache]
    return held


def rows(
    layout: "CacheLayout", caches: Sequence[Any], index: int, first: int, end: int
) -> list[Rows]:
    """Rows [first, end) of one request in live caches, of a batch or not, as RowKind.rows; nothing
    of leaves that are state."""
    live = leaves(caches)
    taken: list[Rows] = [()] * len(live)
    for group in layout.groups:
        for leaf in group.layers:
            taken[leaf] = group.kind.rows(live[leaf], index, first, end)
    return taken


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the state leaves of a request hold at one position: for each leaf of the model its
    parts, of those that are rows none. The position is None when no cache knows it."""

    position: int | None
    leaves: tuple[Rows, ...]


def snapshot(layout: "CacheLayout", caches: Sequence[Any], index: int) -> Snapshot:
    """The state of one request in live caches, of a batch or not.

    Lazy slices of live arrays: pack and drop it before the next step (see pack.py), for a
    reference that is held across it makes MLX copy the whole cache. NotCacheable when a layer is
    not as it was at load.
    """
    live = leaves(caches)
    taken: list[Rows] = [()] * len(live)
    for group in layout.states:
        for leaf in group.layers:
            taken[leaf] = group.kind.snapshot(live[leaf], index)
    positions = {_position(leaf, index) for leaf in live} - {None}
    assert len(positions) <= 1
    return Snapshot(next(iter(positions), None), tuple(taken))


def _position(leaf: Any, index: int) -> int | None:
    """How many tokens a cache has been fed of one request, if it knows."""
    return leaf.end(index) if isinstance(leaf, History) else getattr(leaf, "offset", None)


ROW_DTYPES: Final = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}


def buffers(cache: Any) -> list[mx.array]:
    """Of one of mlx-lm's caches of one request, none while it is empty."""
    return [] if cache.empty() else [cache.keys, cache.values]


def shapes(arrays: Sequence[mx.array], precision: Precision) -> tuple[PartShape, PartShape]:
    """Of keys and values. NotCacheable when they cannot be stored."""
    if not arrays:
        raise NotCacheable("a layer did not use its cache in a forward pass")
    keys, values = precision.split(arrays)
    shapes = _shape("keys", keys, precision.keys), _shape("values", values, precision.values)
    if not any(shape.width for shape in shapes):
        raise NotCacheable("keys and values of a layer are empty")
    return shapes


def _shape(name: str, arrays: tuple[mx.array, ...], live: Encoding) -> PartShape:
    # A row of an affine encoding has the width of its scales times the group, and their dtype.
    of_rows = arrays[0] if isinstance(live, Lossless) else arrays[1]
    batch, heads, _, width = of_rows.shape
    width *= live.group_size if isinstance(live, Affine) else 1
    assert batch == 1
    if heads == 0:
        raise NotCacheable(f"{name} of a layer have no heads")
    return PartShape(name, heads, width, dtype_name(name, of_rows, ROW_DTYPES), live)


def dtype_name(name: str, array: mx.array, known: Mapping[mx.Dtype, str]) -> str:
    if array.dtype not in known:
        raise NotCacheable(f"{name} of a layer are {array.dtype}")
    return known[array.dtype]
