"""Memory of the live caches: the rows of several sequences side by side.

    arrays (sequences, heads, columns, width)

    sequence 0   ├─ row 0 ─┼─ row 1 ─┼─ ... ────────────────┤ end 0   ┊ capacity
    sequence 1   ├─ row 0 ─┼─ ... ─────┤ end 1                        ┊
    spare        ┊                                                    ┊

Every sequence begins at column 0. So nothing moves when a longer one joins, what a sequence may
see ends at one number, and whoever leaves is replaced by the last one: a join or a leave copies
that sequence, not all of them, as long as capacity lasts. Capacity grows by a quarter, and is
given back when it is more than CAPACITY_SHARE_MAX of what is used.

What lies beyond a sequence's end is finite (zeros, or rows of this sequence that were taken
back), for attention multiplies it by probabilities of zero.
"""

import functools
from collections.abc import Sequence
from typing import Final

import mlx.core as mx
import numpy as np

# Capacity of at most this many times the sequences times the longest of them; and so many columns
# that are never too many.
CAPACITY_SHARE_MAX: Final = 1.5
_COLUMNS_MIN: Final = 64
# What buffers grow by, of their columns.
_SPARE: Final = 0.25
# From this capacity on a multiple of it: CUDA's attention of one query is several times faster
# for full precision (cuDNN) if it is, and its product with packed keys for multiples of 128.
_COLUMNS_STEP: Final = 256


class Columns:
    """Arrays that grow, for `sequences` in use; without arrays while nothing was ever written.

    Lazy throughout, and in place as far as MLX allows: as long as nobody else refers to an array
    when it is written to.
    """

    def __init__(
        self, sequences: int, arrays: Sequence[mx.array] = (), limit: int | None = None
    ) -> None:
        """Arrays of exactly these sequences become its memory, which never has more columns than
        `limit`."""
        assert all(array.shape[0] == sequences for array in arrays)
        self.sequences = sequences
        self._limit = limit
        # Objects of our own: assigning to a part of an array changes the object.
        self._arrays = [mx.array(array) for array in arrays]

    @classmethod
    def joined(
        cls, parts: Sequence[tuple[Sequence[mx.array], int]], limit: int | None = None
    ) -> "Columns":
        """One sequence for each part: its arrays, none while it is empty, and its rows."""
        made = cls(len(parts), parts[0][0] if len(parts) == 1 else (), limit)
        if len(parts) > 1:
            filled = next((arrays for arrays, _ in parts if arrays), ())
            columns = made._roomy(max(rows for _, rows in parts))
            for index, like in enumerate(filled):
                blank = mx.zeros((1, like.shape[1], 0, like.shape[3]), like.dtype)
                held = [arrays[index][:, :, :rows] if arrays else blank for arrays, rows in parts]
                stack = [_padded(rows, 1, columns) for rows in held]
                made._arrays.append(mx.concatenate(stack, axis=0))
        return made

    @property
    def empty(self) -> bool:
        return not self._arrays

    @property
    def arrays(self) -> list[mx.array]:
        """Of the sequences in use, with all their columns."""
        return [array[: self.sequences] for array in self._arrays]

    @property
    def buffers(self) -> list[mx.array]:
        """With spare sequences; the object itself, whose items may be replaced by their like."""
        return self._arrays

    @property
    def capacity(self) -> int:
        """Columns."""
        return self._arrays[0].shape[2] if self._arrays else 0

    @property
    def nbytes(self) -> int:
        """With spare sequences and columns."""
        return sum(array.nbytes for array in self._arrays)

    def reserve(self, columns: int, like: Sequence[mx.array]) -> None:
        """Have capacity for so many columns, of arrays `like` these."""
        if not self._arrays:
            self._arrays = [
                mx.zeros((self.sequences, a.shape[1], self._roomy(columns), a.shape[3]), a.dtype)
                for a in like
            ]
        self._reserve(self.sequences, columns)

    def write(self, first: Sequence[int], rows: Sequence[mx.array]) -> None:
        """Write rows (sequences, heads, rows, width) of each array from column first[i] on; those
        before column 0 are dropped."""
        count = rows[0].shape[2]
        self.reserve(max(first) + count, like=rows)
        if min(first) < 0:
            for index, begin in enumerate(first):
                skipped = min(max(0, -begin), count)
                part = [array[index : index + 1, :, skipped:] for array in rows]
                self.write_one(index, begin + skipped, part)
        elif len(set(first)) == 1:
            for array, new in zip(self._arrays, rows, strict=True):
                array[: self.sequences, :, first[0] : first[0] + count] = new
        else:
            self._scatter(first, rows)

    def write_one(self, index: int, first: int, rows: Sequence[mx.array]) -> None:
        """Write rows (1, heads, rows, width) of one sequence, where there is capacity."""
        count = rows[0].shape[2]
        for array, new in zip(self._arrays, rows, strict=True):
            if count:
                array[index : index + 1, :, first : first + count] = new

    def _scatter(self, first: Sequence[int], rows: Sequence[mx.array]) -> None:
        count, spare = rows[0].shape[2], self._arrays[0].shape[0] - self.sequences
        places = _places((*first, *([0] * spare)), count)
        for index, new in enumerate(rows):
            wide = mx.pad(new, [(0, spare), (0, 0), (0, 0), (0, 0)]) if spare else new
            self._arrays[index] = mx.put_along_axis(
                self._arrays[index], mx.broadcast_to(places, wide.shape), wide, axis=2
            )

    def append(self, other: "Columns", end: int) -> None:
        """Take over the sequences of another one, whose longest has `end` rows."""
        first = self.sequences
        self.sequences += other.sequences
        if other.empty and self.empty:
            return
        if self.empty:
            self._arrays = [mx.zeros((first, *a.shape[1:]), a.dtype) for a in other._arrays]
        # Every other sequence becomes as wide: the quarter waits until they grow.
        self._reserve(self.sequences, end, spare=0)
        for index, array in enumerate(self._arrays):
            # Whole sequences, so that nothing is left of whoever was there before.
            new = mx.zeros((other.sequences, *array.shape[1:]), array.dtype)
            if not other.empty:
                held = other._arrays[index][: other.sequences, :, :end]
                new = _padded(held, other.sequences, array.shape[2])
            array[first : self.sequences] = new

    def keep(self, kept: Sequence[int], end: int) -> None:
        """Keep these sequences in this order; the longest of them has `end` rows."""
        self.sequences = len(kept)
        if self.empty:
            return
        moved = [(to, of) for to, of in enumerate(kept) if to != of]
        capacity = self._arrays[0].shape[0] * self.capacity
        used = len(kept) * max(end, 2 * _COLUMNS_MIN)
        if 2 * len(moved) > len(kept) or capacity > CAPACITY_SHARE_MAX * used:
            columns = min(self.capacity, self._roomy(end))
            places = mx.array(list(kept), dtype=mx.int32)
            self._arrays = [array[:, :, :columns][places] for array in self._arrays]
            return
        for array in self._arrays:
            sources = [mx.take(array, mx.array([of]), axis=0) for _, of in moved]
            mx.eval(sources)  # else they refer to what is written to
            for (to, _), source in zip(moved, sources, strict=True):
                array[to : to + 1] = source

    def copy(self, index: int, end: int) -> list[mx.array]:
        """Rows [0, end) of one sequence, (1, heads, end, width), lazy, sharing no memory."""
        places = mx.array([index])
        return [mx.take(array[:, :, :end], places, axis=0) for array in self._arrays]

    def _reserve(self, sequences: int, columns: int, spare: float = _SPARE) -> None:
        if not self._arrays:
            return
        if sequences <= self._arrays[0].shape[0] and columns <= self.capacity:
            return
        columns = self._roomy(columns, spare) if columns > self.capacity else self.capacity
        # All is copied, and without spare sequences, which would grow too.
        for index, array in enumerate(self._arrays):
            self._arrays[index] = _padded(array[:sequences], sequences, columns)

    def _roomy(self, columns: int, spare: float = _SPARE) -> int:
        """Capacity for so many columns and some that follow, a share of them at least."""
        room = columns + max(_COLUMNS_MIN, int(spare * columns))
        if columns >= 4 * _COLUMNS_STEP:  # of fewer columns a whole step would be too much
            room = max(room, columns + _COLUMNS_MIN + _COLUMNS_STEP - 1)
            room -= room % _COLUMNS_STEP
        return room if self._limit is None else max(columns, min(room, self._limit))


@functools.lru_cache(maxsize=8)
def positions(ends: tuple[int, ...]) -> mx.array:
    """(sequences,). All layers of a step ask for the same, and each array of host memory costs a
    GPU a transfer. Made without an operation, which would belong to the stream of one thread."""
    return mx.array(ends)


@functools.lru_cache(maxsize=8)
def _places(first: tuple[int, ...], count: int) -> mx.array:
    """Columns of `count` rows from column first[i] on, (sequences, 1, count, 1); as positions."""
    columns = np.array(first, np.int32)[:, None] + np.arange(count, dtype=np.int32)
    return mx.array(columns[:, None, :, None])


def _padded(array: mx.array, sequences: int, columns: int) -> mx.array:
    spare = [(0, sequences - array.shape[0]), (0, 0), (0, columns - array.shape[2]), (0, 0)]
    return mx.pad(array, spare)
