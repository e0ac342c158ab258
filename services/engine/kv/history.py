"""Caches of plain layers: rows of tokens, in full precision or quantized, alone or in a batch.

They take part in mlx-lm's row protocol (`merge`, `extend`, `filter`, `extract`, `prepare`,
`finalize`, `trim`). JoiningKVCache and QuantizedKVCache are of one request, BatchKVCache is of
those in a batch, in either precision; all replace mlx-lm's.

A quantized cache hands out `PackedHistory` in place of arrays, for the attention that
attention.py puts in the place of mlx-lm's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import mlx.core as mx
from mlx_lm.models.cache import KVCache, _BaseCache

from engine.kv.attention import PackedHistory
from engine.kv.columns import Columns, positions
from engine.kv.encoding import Affine, Encoding, Lossless
from engine.kv.rotation import Rotation

# Parts of a layer, keys and values for most: each as the arrays of its encoding.
Rows = tuple[tuple[mx.array, ...], ...]


def sliced(rows: Rows, cut: slice) -> Rows:
    """Some of them, lazy."""
    return tuple(tuple(array[:, :, cut] for array in part) for part in rows)


@dataclass(frozen=True, slots=True)
class Precision:
    """How a live cache holds its keys and its values."""

    keys: Encoding
    values: Encoding

    @classmethod
    def affine(
        cls,
        bits: int | tuple[int, int],
        group_size: int | tuple[int, int] = 64,
        rotation: Rotation | None = None,
    ) -> "Precision":
        """Pairs are those of keys and values."""
        key_bits, value_bits = bits if isinstance(bits, tuple) else (bits, bits)
        sizes = group_size if isinstance(group_size, tuple) else (group_size, group_size)
        return cls(Affine(key_bits, sizes[0], rotation), Affine(value_bits, sizes[1], rotation))

    def encode(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        """The arrays of keys and then those of values, lazy."""
        return [*self.keys.encode(keys), *self.values.encode(values)]

    def split(self, arrays: Sequence[mx.array]) -> Rows:
        """What `encode` returned, apart again."""
        count = 3 if isinstance(self.keys, Affine) else 1
        return tuple(arrays[:count]), tuple(arrays[count:])

    def decode(self, rows: Rows) -> tuple[mx.array, mx.array]:
        """Keys and values in full precision, lazy."""
        keys, values = rows
        return self.keys.decode(keys), self.values.decode(values)


FULL: Final = Precision(Lossless(), Lossless())


class History(_BaseCache):
    """Rows of one or more sequences. `_ends`: how many each has; negative where padding is still
    to come."""

    precision: Precision
    _ends: list[int]
    _columns: Columns

    def __init__(self, precision: Precision, ends: Sequence[int]) -> None:
        self.precision = precision
        self._ends = list(ends)
        self._columns = Columns(len(self._ends))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append rows (sequences, heads, rows, width); everything that is held, as attention
        takes it."""
        self._columns.write(self._ends, self.precision.encode(keys, values))
        self._ends = [end + keys.shape[2] for end in self._ends]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """What attention took at the last update: some layers read what another one holds."""
        return handed(self.precision, self._columns.arrays, self.size())

    # Some models reach for the buffers of the rows, to let lazy work depend on them or to clear
    # what they do not need (deepseek_v32, minimax_m3_vl).

    @property
    def keys(self) -> mx.array:
        """With all capacity. AttributeError when rows are quantized, or there are none yet."""
        return self._buffers()[0]

    @keys.setter
    def keys(self, value: mx.array) -> None:
        self._buffers()[0] = value

    @property
    def values(self) -> mx.array:
        return self._buffers()[1]

    @values.setter
    def values(self, value: mx.array) -> None:
        self._buffers()[1] = value

    def _buffers(self) -> list[mx.array]:
        if self.precision != FULL or self.empty():
            raise AttributeError("there are no keys and values in full precision")
        return self._columns.buffers

    def rows(self, index: int, first: int, end: int) -> Rows:
        """Rows [first, end) of one sequence as they are held, (1, heads, end - first, ...).

        Lazy slices: a reference that is kept when the next rows are written makes MLX copy all.
        """
        sliced = [a[index : index + 1, :, first:end] for a in self._columns.arrays]
        return self.precision.split(sliced)

    def end(self, index: int) -> int:
        """How many rows one sequence has had; negative where padding is still to come."""
        return self._ends[index]

    def part(self, index: int = 0) -> tuple[list[mx.array], int]:
        """One sequence's rows without a copy: its arrays, none while it is empty, and how many
        rows of them it has."""
        return [a[index : index + 1] for a in self._columns.arrays], self._ends[index]

    def make_mask(
        self, count: int, return_array: bool = False, window_size: int | None = None
    ) -> Any:
        """Which columns the next `count` tokens of each sequence see: None, "causal", or a
        boolean array (sequences, 1, count, columns)."""
        equal = len(set(self._ends)) == 1
        if equal and window_size is None and not return_array:
            return None if count == 1 else "causal"
        positions = mx.array(self._ends)[:, None, None, None] + mx.arange(count)[:, None]
        # A token of left padding sees the first row, for it must see some.
        positions = mx.maximum(positions, 0)
        columns = mx.arange(self.size() + count)
        mask = columns <= positions
        if window_size is not None:
            mask = mask & (columns > positions - window_size)
        return mask

    @property
    def state(self) -> Any:
        return self._columns.arrays, self._ends, self.precision

    @state.setter
    def state(self, value: Any) -> None:
        arrays, ends, self.precision = value
        self._ends = list(ends)
        self._columns = Columns(len(self._ends), arrays)

    def is_trimmable(self) -> bool:
        return True

    def trim(self, count: int) -> int:
        """Take the last `count` rows of each sequence back, or as many as the longest has."""
        count = min(self.size(), count)
        self._ends = [end - count for end in self._ends]
        return count

    def size(self) -> int:
        """Rows of the longest sequence."""
        return max(0, *self._ends) if self._ends else 0

    def empty(self) -> bool:
        return self._columns.empty

    @property
    def nbytes(self) -> int:
        """What is allocated, spare capacity too."""
        return self._columns.nbytes


class BatchHistory(History):
    """Of the requests in a batch."""

    @property
    def offset(self) -> mx.array:
        """Position of each sequence's next token, (sequences,)."""
        # An object of its own, for += of whoever gets it changes the object.
        return mx.array(positions(tuple(self._ends)))

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """What follows is padded: on the left, only of an empty cache, or on the right, until
        `finalize`."""
        if left_padding is not None:
            if not self.empty():
                raise ValueError("only an empty cache can be padded on the left")
            self._ends = [end - pad for end, pad in zip(self._ends, left_padding, strict=True)]
        if right_padding is not None and lengths is not None:
            added = zip(self._ends, lengths, strict=True)
            self._unpadded = [end + length for end, length in added]

    # Where sequences will end without the padding on the right.
    _unpadded: Sequence[int] = ()

    def finalize(self) -> None:
        """Forget the padding on the right. It is beyond the ends, and will be written over."""
        if self._unpadded:
            self._ends = list(self._unpadded)
            self._unpadded = ()

    def filter(self, kept: Sequence[int]) -> None:
        """Keep these sequences, in this order."""
        kept = list(kept)
        self._ends = [self._ends[index] for index in kept]
        self._columns.keep(kept, self.size())

    def extend(self, other: Self) -> None:
        """Take over the sequences of another one."""
        self._ends += other._ends
        self._columns.append(other._columns, self.size())


class BatchKVCache(BatchHistory):
    """Rows are never decoded and encoded again."""

    def __init__(self, precision: Precision, left_padding: Sequence[int]) -> None:
        super().__init__(precision, [-pad for pad in left_padding])

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> "BatchKVCache":
        """Of requests with one cache each, whose rows are not copied if there is only one.

        ValueError when they are not of one precision.
        """
        parts = [cache.part() for cache in caches]
        made = cls(same(caches), [-rows for _, rows in parts])
        made._columns = Columns.joined(parts)
        return made

    def extract(self, index: int) -> Any:
        end = max(0, self._ends[index])
        arrays = self._columns.copy(index, end)
        one = JoiningKVCache if self.precision == FULL else QuantizedKVCache
        return one.of(self.precision, arrays, end)


class JoiningKVCache(KVCache):
    """mlx-lm's, of one request in full precision; in a batch it becomes ours."""

    precision: Final = FULL
    merge = BatchKVCache.merge

    @classmethod
    def of(cls, precision: Precision, arrays: Sequence[mx.array] = (), rows: int = 0) -> Self:
        """Of rows (1, heads, rows, width), keys and values."""
        assert precision == FULL
        made = cls()
        if arrays:
            made.state = (*arrays, rows)
        return made

    def part(self) -> tuple[list[mx.array], int]:
        """As History's."""
        held: Any = self
        return [] if held.empty() else [held.keys, held.values], held.offset


class QuantizedKVCache(History):
    """Of one request. mlx-lm's, with bits and group sizes for keys and values apart, at all of
    MLX's bits, and with a rotation before the quantizer."""

    def __init__(
        self,
        bits: int | tuple[int, int] = 8,
        group_size: int | tuple[int, int] = 64,
        rotation: Rotation | None = None,
    ) -> None:
        """Pairs are those of keys and values."""
        super().__init__(Precision.affine(bits, group_size, rotation), [0])

    @classmethod
    def of(cls, precision: Precision, arrays: Sequence[mx.array] = (), rows: int = 0) -> Self:
        """With rows that are encoded already, (1, heads, rows, ...) in each array."""
        made = cls.__new__(cls)
        made.state = (arrays, [rows], precision)
        return made

    @classmethod
    def from_cache(cls, cache: Any, precision: Precision) -> Self:
        """Of the rows of mlx-lm's KVCache; one that is quantized already is given back."""
        if isinstance(cache, cls):
            return cache
        if cache.empty():
            return cls.of(precision)
        rows = precision.encode(*cache.keys_and_values())
        return cls.of(precision, rows, cache.offset)

    @property
    def offset(self) -> int:
        """Position of the next token."""
        return self._ends[0]

    def dequantize(self) -> tuple[mx.array, mx.array]:
        """Keys and values as they are read, (1, heads, rows, width)."""
        return self.precision.decode(self.rows(0, 0, self.offset))

    merge = BatchKVCache.merge


class LateKVCache(History):
    """Of one request: in full precision until it has `start` rows, then quantized, all of it."""

    def __init__(self, later: Precision, start: int) -> None:
        super().__init__(FULL, [0])
        self._later = later
        self._start = start

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        if self.precision == FULL and self.size() >= self._start:
            rows = self._later.encode(*self._columns.arrays)
            self.precision, self._columns = self._later, Columns(self._columns.sequences, rows)
        return super().update_and_fetch(keys, values)

    @property
    def offset(self) -> Any:
        """Position of the next token."""
        return self._ends[0]

    @classmethod
    def merge(cls, caches: Sequence["LateKVCache"]) -> "BatchLateKVCache":
        """A batch of this one request."""
        (alone,) = caches
        made = BatchLateKVCache(alone._later, alone._start)
        made.state = alone.state
        return made


class BatchLateKVCache(LateKVCache, BatchHistory):
    """In a batch that has one row."""

    @property
    def offset(self) -> mx.array:
        """Position of the next token, (1,)."""
        return mx.array(self._ends)


def same(caches: Sequence[Any]) -> Precision:
    """The precision of all; ValueError when they differ."""
    precision: Precision = caches[0].precision
    if any(cache.precision != precision for cache in caches):
        raise ValueError("caches of different precision cannot share a batch")
    return precision


def handed(precision: Precision, arrays: Sequence[mx.array], columns: int) -> tuple[Any, Any]:
    """Keys and values as attention takes them."""
    keys, values = precision.split(arrays)
    return _hand(precision.keys, keys, columns), _hand(precision.values, values, columns)


def _hand(encoding: Encoding, arrays: tuple[mx.array, ...], columns: int) -> Any:
    if isinstance(encoding, Affine):
        codes, scales, biases = arrays
        return PackedHistory((codes, scales, biases), encoding, columns)
    return arrays[0][:, :, :columns]
