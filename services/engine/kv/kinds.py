"""The kinds of layer cache that the store can hold, by our own names.

A layer is *rows* when its cache can be cut at any token: rows of tokens are taken out of it, and
a cache is made of the first so many of them. It is *state* when it cannot (bounded windows,
recurrent layers, attention in chunks): what it holds at one exact position is taken out, a
snapshot, and comes back at that position only.

A kind knows its geometry, which is part of a model's identity; how to take what is stored out of
a live cache, of one request or of a batch; and how to make a cache of it. Everything between
(grouping, encoding, records, copies) deals in named parts of shape (1, heads, rows, width) and
works for any kind. A class that has no entry here is never cached.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

import mlx.core as mx
from mlx_lm.models.cache import CacheList, ChunkedKVCache, ConcatenateKVCache

from engine.kv.encoding import Affine, Encoding, Lossless, PartShape
from engine.kv.history import FULL, History, JoiningKVCache, Precision, QuantizedKVCache, Rows
from engine.kv.recurrent import RecurrentCache
from engine.kv.rotating import WindowKVCache

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
class _KeysAndValues:
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

    def _filled(self, pair: Rows) -> Rows:
        """Without what has no width."""
        return tuple(part for part in pair if part[0].shape[-1])

    def _pair(self, parts: Named) -> list[mx.array]:
        """The arrays of keys and then those of values, those without width made anew."""
        rows = next(iter(parts.values()))[0].shape[2]
        arrays: list[mx.array] = []
        for shape in (self.keys, self.values):
            empty = (mx.zeros((1, shape.heads, rows, 0), shape.mlx_dtype),)
            arrays += parts.get(shape.name, empty)
        return arrays


@dataclass(frozen=True, slots=True)
class PlainKV(_KeysAndValues):
    """Keys and values, appended to: mlx-lm's KVCache, in a batch ours."""

    name: ClassVar[str] = "kv"

    @classmethod
    def of(cls, cache: Any) -> "PlainKV":
        arrays, _ = cache.part()
        return cls(*_shapes(arrays, cache.precision))

    def rows(self, cache: Any, index: int, first: int, end: int) -> Rows:
        if isinstance(cache, History):
            return self._filled(cache.rows(index, first, end))
        return self._filled(((cache.keys[:, :, first:end],), (cache.values[:, :, first:end],)))

    def restore(self, parts: Named, position: int) -> Any:
        one = JoiningKVCache if self.precision == FULL else QuantizedKVCache
        return one.of(self.precision, self._pair(parts), position)


@dataclass(frozen=True, slots=True)
class ConcatenatedKV(_KeysAndValues):
    """mlx-lm's ConcatenateKVCache, which has no capacity to spare and runs in no batch."""

    name: ClassVar[str] = "concatenated"

    @classmethod
    def of(cls, cache: Any) -> "ConcatenatedKV":
        return cls(*_shapes(_held(cache), FULL))

    def rows(self, cache: Any, index: int, first: int, end: int) -> Rows:
        assert index == 0
        return self._filled(((cache.keys[:, :, first:end],), (cache.values[:, :, first:end],)))

    def restore(self, parts: Named, position: int) -> Any:
        cache: Any = ConcatenateKVCache.from_state(self._pair(parts))  # type: ignore[no-untyped-call]
        assert cache.offset == position
        return cache


@dataclass(frozen=True, slots=True)
class Window(_KeysAndValues):
    """The first `keep` rows and the latest ones, `size` in all (kv/rotating.py). The order of its
    rows follows from the position, so they are stored in the order of their places."""

    size: int
    keep: int
    name: ClassVar[str] = "window"

    @classmethod
    def of(cls, cache: Any) -> "Window":
        arrays, _ = cache.part()
        return cls(*_shapes(arrays, cache.precision), cache.max_size, cache.keep)

    def __str__(self) -> str:
        first = f" with the first {self.keep}" if self.keep else ""
        return f"window of {self.size} rows{first}"

    def describe(self) -> Mapping[str, Any]:
        return {"size": self.size, "keep": self.keep}

    def rows_at(self, position: int) -> int:
        return min(position, self.size)

    def first_rows(self, position: int, tokens: int) -> int:
        latest = position - (self.size - self.keep)
        return min(tokens, position) if latest < tokens else min(tokens, self.keep)

    def snapshot(self, cache: Any, index: int) -> Rows:
        arrays, rows = cache.part(index)
        return self._filled(self.precision.split([array[:, :, :rows] for array in arrays]))

    def restore(self, parts: Named, position: int) -> Any:
        made = WindowKVCache(self.precision, self.size, self.keep)
        made.state = self._pair(parts), [position], self.precision, self.size, self.keep
        return made


@dataclass(frozen=True, slots=True)
class Chunk(_KeysAndValues):
    """mlx-lm's ChunkedKVCache: the latest `size` rows, and those of one step beside them, which
    it drops before the next."""

    size: int
    name: ClassVar[str] = "chunk"

    @classmethod
    def of(cls, cache: Any) -> "Chunk":
        return cls(*_shapes(_held(cache), FULL), cache.chunk_size)

    def __str__(self) -> str:
        return f"chunks of {self.size} rows"

    def describe(self) -> Mapping[str, Any]:
        return {"size": self.size}

    def rows_at(self, position: int) -> int:
        return min(position, self.size)

    def first_rows(self, position: int, tokens: int) -> int:
        return max(0, min(tokens, position) - max(0, position - self.size))

    def snapshot(self, cache: Any, index: int) -> Rows:
        assert index == 0  # it runs in no batch
        end = cache.offset - cache.start_position
        rows = slice(end - self.rows_at(cache.offset), end)
        return self._filled(((cache.keys[:, :, rows],), (cache.values[:, :, rows],)))

    def restore(self, parts: Named, position: int) -> Any:
        keys, values = self._pair(parts)
        first = position - self.rows_at(position)
        state = keys, values, position, self.size, first
        return ChunkedKVCache.from_state(state)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Recurrent:
    """mlx-lm's ArraysCache: some arrays (batch, ...), whatever they mean; None for an empty slot.
    Each is one row of one head here."""

    slots: tuple["ArrayShape | None", ...]
    name: ClassVar[str] = "recurrent"

    @classmethod
    def of(cls, cache: Any) -> "Recurrent":
        return cls(tuple(None if a is None else ArrayShape.of(a) for a in cache.cache))

    def __str__(self) -> str:
        return "recurrent state"

    @property
    def parts(self) -> tuple[PartShape, ...]:
        return tuple(
            PartShape(f"state {slot}", 1, math.prod(array.shape), array.dtype)
            for slot, array in enumerate(self.slots)
            if array is not None
        )

    def describe(self) -> Mapping[str, Any]:
        return {"slots": [array and [*array.shape] for array in self.slots]}

    def rows_at(self, position: int) -> int:
        return 1

    def first_rows(self, position: int, tokens: int) -> int:
        return 0

    def snapshot(self, cache: Any, index: int) -> Rows:
        held = [None if a is None else a[index : index + 1] for a in cache.cache]
        found = tuple(None if a is None else ArrayShape.of(a) for a in held)
        if found != self.slots:
            raise NotCacheable(f"a recurrent layer holds {found}, and not {self.slots} as at load")
        return tuple((a.reshape(1, 1, 1, -1),) for a in held if a is not None)

    def restore(self, parts: Named, position: int) -> Any:
        made = RecurrentCache(len(self.slots))
        for slot, array in enumerate(self.slots):
            if array is not None:
                (rows,) = parts[f"state {slot}"]
                made[slot] = rows.reshape(1, *array.shape)
        return made


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """Of one request's array in a recurrent layer: `shape` without the batch; dtype as records
    spell it."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, array: mx.array) -> "ArrayShape":
        """NotCacheable for what a record cannot hold."""
        if array.size == 0:
            raise NotCacheable(f"a state of a layer is empty ({array.shape})")
        return cls(tuple(array.shape[1:]), _dtype("a state", array, _STATE_DTYPES))


# By exact class: a subclass may rotate or share its rows. What learns a kind from a cache of one
# request that has been fed.
ROW_KINDS: Final[Mapping[type, Callable[[Any], RowKind]]] = {
    JoiningKVCache: PlainKV.of,
    QuantizedKVCache: PlainKV.of,
    ConcatenateKVCache: ConcatenatedKV.of,
}
STATE_KINDS: Final[Mapping[type, Callable[[Any], StateKind]]] = {
    WindowKVCache: Window.of,
    ChunkedKVCache: Chunk.of,
    RecurrentCache: Recurrent.of,
}


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
    parts, of those that are rows none."""

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
    return Snapshot(tuple(taken))


_DTYPES: Final = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}
_STATE_DTYPES: Final = {
    **_DTYPES,
    mx.uint8: "uint8",
    mx.uint16: "uint16",
    mx.uint32: "uint32",
    mx.int32: "int32",
    mx.int64: "int64",
}


def _held(cache: Any) -> list[mx.array]:
    return [] if cache.empty() else [cache.keys, cache.values]


def _shapes(arrays: Sequence[mx.array], precision: Precision) -> tuple[PartShape, PartShape]:
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
    return PartShape(name, heads, width, _dtype(name, of_rows, _DTYPES), live)


def _dtype(name: str, array: mx.array, known: Mapping[mx.Dtype, str]) -> str:
    if array.dtype not in known:
        raise NotCacheable(f"{name} of a layer are {array.dtype}")
    return known[array.dtype]
