"""Bounded windows: the first `keep` rows and the latest ones, in full precision or quantized.

WindowKVCache is of one request, BatchWindowKVCache of those in a batch; they replace mlx-lm's
RotatingKVCache, which cannot be quantized, and its BatchRotatingKVCache, which loses `keep` and
whose merge takes no window that holds fewer rows than it could.

The place of a row follows from its position, as in mlx-lm's RotatingKVCache once it decodes:

    ├─ first keep rows ─┼─ position p at keep + (p - keep) % (max_size - keep) ─┤

so sequences in different turns of the ring share a batch without being moved, and nothing has to
be remembered beside how many rows each ever had. Unlike mlx-lm's, whose prefill hides them, the
first `keep` rows are visible to every later token, however a prompt is cut into chunks.
"""

from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.kv.columns import Columns
from engine.kv.history import BatchHistory, History, Precision, handed, same


class WindowHistory(History):
    """`_ends` counts all rows that a sequence ever had, of which the window holds the latest."""

    max_size: int
    keep: int
    # What several new rows saw, which may be more than the window holds now: for other layers of
    # the same forward pass.
    _given: tuple[Any, Any] | None

    def __init__(
        self, precision: Precision, ends: Sequence[int], max_size: int, keep: int = 0
    ) -> None:
        """ValueError when `max_size` leaves no room beside `keep`."""
        if not 0 <= keep < max_size:
            raise ValueError(f"a window of {max_size} rows cannot keep the first {keep}")
        self.state = (), ends, precision, max_size, keep

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """As History; of several new rows each still sees what the window held before it."""
        count = keys.shape[2]
        rows = self.precision.encode(keys, values)
        self._given = None
        if self._in_place(count):
            self._columns.write([self._place(end) for end in self._ends], rows)
            self._ends = [end + 1 for end in self._ends]
            return self.keys_and_values()
        seen = rows
        if not self.empty():
            before = [array[:, :, : self.size()] for array in self._columns.arrays]
            seen = [mx.concatenate(list(pair), axis=2) for pair in zip(before, rows, strict=True)]
        self._write_latest(rows, count)
        self._ends = [end + count for end in self._ends]
        self._given = handed(self.precision, seen, seen[0].shape[2])
        return self._given

    def keys_and_values(self) -> tuple[Any, Any]:
        """What is held; until the end of a forward pass, what its `update_and_fetch` gave, for
        layers that read the rows of another one."""
        return self._given or super().keys_and_values()

    def _write_latest(self, rows: Sequence[mx.array], count: int) -> None:
        """Write those of the new rows that the window is to hold."""
        self._columns.reserve(min(self.max_size, max(self._ends) + count), like=rows)
        for index, end in enumerate(self._ends):
            first, last = max(0, end), end + self._real(index, count)
            latest = max(first, last - self._turn)
            for begin, stop in (first, min(last, self.keep)), (max(latest, self.keep), last):
                for of, to in self._pieces(begin, stop):
                    part = [a[index : index + 1, :, of.start - end : of.stop - end] for a in rows]
                    self._columns.write_one(index, to, part)

    def _pieces(self, begin: int, stop: int) -> list[tuple[range, int]]:
        """Positions [begin, stop) in runs that lie side by side, each with its first column."""
        pieces = []
        while begin < stop:
            column = self._place(begin)
            room = (self.keep if begin < self.keep else self.max_size) - column
            end = min(stop, begin + room)
            pieces.append((range(begin, end), column))
            begin = end
        return pieces

    def _place(self, position: int) -> int:
        """The column of a position."""
        if position < self.keep:
            return position
        return self.keep + (position - self.keep) % self._turn

    @property
    def _turn(self) -> int:
        """Rows after which a place is used again."""
        return self.max_size - self.keep

    def _in_place(self, count: int) -> bool:
        """Whether the next rows take their places at once: one of each sequence, no padding."""
        one = count == 1 and min(self._ends) >= 0
        return one and all(self._real(index, 1) for index in range(len(self._ends)))

    def _real(self, index: int, count: int) -> int:
        """How many of `count` new rows of a sequence are not padding."""
        return count

    def part(self, index: int = 0) -> tuple[list[mx.array], int]:
        """As History's: the rows that are held, not all that there ever were."""
        arrays, end = super().part(index)
        return arrays, min(end, self.max_size)

    def make_mask(
        self, count: int, return_array: bool = False, window_size: int | None = None
    ) -> Any:
        """As History's."""
        new = np.array(self._ends)[:, None] + np.arange(count)
        if self._in_place(count):
            held = self._positions([end + 1 for end in self._ends])
        else:
            real = [[self._real(index, count)] for index in range(len(self._ends))]
            fed = np.where(np.arange(count) < real, new, -1)
            held = np.concatenate([self._positions(self._ends), fed], axis=1)
        window = min(window_size or self._turn, self._turn)
        full = self._in_place(count) and bool((held >= 0).all())
        if full and window == self._turn and not return_array:
            return None
        # A token of left padding sees the first row, for it must see some.
        queries = mx.maximum(mx.array(new)[:, None, :, None], 0)
        columns = mx.array(held)[:, None, None, :]
        near = (columns > queries - window) | (columns < self.keep)
        return (columns >= 0) & (columns <= queries) & near

    def _positions(self, ends: Sequence[int]) -> npt.NDArray[np.int64]:
        """Which position each column holds when sequences have had so many rows, -1 for none:
        (sequences, columns)."""
        columns = np.arange(min(max(0, *ends), self.max_size))
        last = np.array(ends)[:, None] - 1
        latest = np.where(columns < self.keep, columns, last - (last - columns) % self._turn)
        return np.where((latest >= columns) & (latest <= last), latest, -1)

    @property
    def state(self) -> Any:
        # The forward pass is over when mlx-lm asks for what it is to evaluate; held any longer,
        # the rows that each layer saw would all be in memory at once.
        self._given = None
        return self._columns.arrays, self._ends, self.precision, self.max_size, self.keep

    @state.setter
    def state(self, value: Any) -> None:
        arrays, ends, self.precision, self.max_size, self.keep = value
        self._ends = list(ends)
        self._columns = Columns(len(self._ends), arrays, limit=self.max_size)
        self._given = None

    def is_trimmable(self) -> bool:
        """Only until rows have been overwritten."""
        return max(self._ends, default=0) < self.max_size

    def size(self) -> int:
        return min(super().size(), self.max_size)

    def temporal(self, index: int = 0) -> tuple[mx.array, mx.array]:
        """What is held of one sequence, decoded, in the order of positions, lazy."""
        held = self._positions(self._ends)[index]
        order = mx.array([int(c) for c in np.argsort(held, kind="stable") if held[c] >= 0])
        arrays = [mx.take(a[index : index + 1], order, axis=2) for a in self._columns.arrays]
        return self.precision.decode(self.precision.split(arrays))


class WindowKVCache(WindowHistory):
    """Of one request."""

    def __init__(self, precision: Precision, max_size: int, keep: int = 0) -> None:
        super().__init__(precision, [0], max_size, keep)

    @classmethod
    def from_cache(cls, cache: Any, precision: Precision) -> Self:
        """Of mlx-lm's RotatingKVCache, whatever turn it is in; one that is ours is given back."""
        if isinstance(cache, cls):
            return cache
        made = cls(precision, cache.max_size, cache.keep)
        if cache.empty():
            return made
        keys, values = (cache._temporal_order(rows) for rows in (cache.keys, cache.values))
        # After a prefill it holds more than the window, until the next token.
        beyond = max(0, keys.shape[2] - cache.max_size)
        kept = min(cache.keep, keys.shape[2])
        made._restore(precision.encode(keys, values), kept, beyond, cache.offset)
        return made

    def _restore(self, rows: Sequence[mx.array], kept: int, beyond: int, end: int) -> None:
        """Take rows in the order of positions: the first `kept`, and without `beyond` after them
        the latest."""
        self._ends = [0]
        self._write_latest([row[:, :, :kept] for row in rows], kept)
        latest = [row[:, :, kept + beyond :] for row in rows]
        self._ends = [end - latest[0].shape[2]]
        self._write_latest(latest, latest[0].shape[2])
        self._ends = [end]

    @property
    def offset(self) -> int:
        """Position of the next token."""
        return self._ends[0]

    @classmethod
    def merge(cls, caches: Sequence["WindowKVCache"]) -> "BatchWindowKVCache":
        return BatchWindowKVCache.merge(caches)


class BatchWindowKVCache(WindowHistory, BatchHistory):
    """Of the requests in a batch. Rows are never decoded and encoded again."""

    def __init__(
        self, precision: Precision, left_padding: Sequence[int], max_size: int, keep: int = 0
    ) -> None:
        super().__init__(precision, [-pad for pad in left_padding], max_size, keep)

    def _real(self, index: int, count: int) -> int:
        if not self._unpadded:
            return count
        return min(max(0, self._unpadded[index] - self._ends[index]), count)

    @classmethod
    def merge(cls, caches: Sequence[WindowKVCache]) -> "BatchWindowKVCache":
        """ValueError when they are not of one precision and one window."""
        first = caches[0]
        if any((c.max_size, c.keep) != (first.max_size, first.keep) for c in caches):
            raise ValueError("windows of different sizes cannot share a batch")
        made = cls(same(caches), [-cache.offset for cache in caches], first.max_size, first.keep)
        parts = [cache.part() for cache in caches]
        made._columns = Columns.joined(parts, first.max_size)
        return made

    def extract(self, index: int) -> WindowKVCache:
        end = max(0, self._ends[index])
        arrays = self._columns.copy(index, min(end, self.max_size))
        made = WindowKVCache(self.precision, self.max_size, self.keep)
        made.state = arrays, [end], self.precision, self.max_size, self.keep
        return made
