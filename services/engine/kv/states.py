"""Kinds of layer cache that are state: what they hold at one position (see kinds.py)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache

from engine.kv.encoding import PartShape
from engine.kv.history import FULL, Rows
from engine.kv.kinds import (
    ROW_DTYPES,
    KeysAndValues,
    Named,
    NotCacheable,
    buffers,
    dtype_name,
    shapes,
)
from engine.kv.recurrent import RecurrentCache
from engine.kv.rotating import WindowKVCache

_STATE_DTYPES: Final = {
    **ROW_DTYPES,
    mx.uint8: "uint8",
    mx.uint16: "uint16",
    mx.uint32: "uint32",
    mx.int32: "int32",
    mx.int64: "int64",
}


@dataclass(frozen=True, slots=True)
class Window(KeysAndValues):
    """The first `keep` rows and the latest ones, `size` in all (kv/rotating.py). The order of its
    rows follows from the position, so they are stored in the order of their places."""

    size: int
    keep: int
    name: ClassVar[str] = "window"

    @classmethod
    def of(cls, cache: Any) -> "Window":
        arrays, _ = cache.part()
        return cls(*shapes(arrays, cache.precision), cache.max_size, cache.keep)

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
        return self.filled(self.precision.split([array[:, :, :rows] for array in arrays]))

    def restore(self, parts: Named, position: int) -> Any:
        made = WindowKVCache(self.precision, self.size, self.keep)
        made.state = self.pair(parts), [position], self.precision, self.size, self.keep
        return made


@dataclass(frozen=True, slots=True)
class Chunk(KeysAndValues):
    """mlx-lm's ChunkedKVCache: the latest `size` rows, and those of one step beside them, which
    it drops before the next."""

    size: int
    name: ClassVar[str] = "chunk"

    @classmethod
    def of(cls, cache: Any) -> "Chunk":
        return cls(*shapes(buffers(cache), FULL), cache.chunk_size)

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
        return self.filled(((cache.keys[:, :, rows],), (cache.values[:, :, rows],)))

    def restore(self, parts: Named, position: int) -> Any:
        keys, values = self.pair(parts)
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
        return cls(tuple(array.shape[1:]), dtype_name("a state", array, _STATE_DTYPES))
