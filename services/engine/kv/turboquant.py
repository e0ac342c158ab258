"""TurboQuant: rows as a norm and a few bits for each coordinate of their rotated direction.

A seeded rotation makes every direction look like a random one, whose coordinates are distributed
alike whatever the row was; so one codebook, computed beforehand, fits all. Source: algorithm
TurboQuant_mse of arXiv 2504.19874.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import _BaseCache, create_attention_mask

from cachestore import record
from engine.kv.codebook import boundaries_between, levels
from engine.kv.encoding import PartShape
from engine.kv.rotation import SEED, Rotation, narrowed

TURBO_BITS: Final = (1, 2, 3, 4)

# Codes are packed in groups of this many, which take `bits` bytes.
_GROUP: Final = 8
_BFLOAT16_MAX: Final = 3.3895e38


@dataclass(frozen=True, slots=True)
class TurboQuant:
    """An encoding (see engine.kv.encoding) of rows of one dtype, as records spell it.

    Norms are bfloat16 whatever the rows are: a float16 row may have a norm that float16 cannot
    hold, and the rounding is far below the codes' own error. A row with a NaN or an infinity
    becomes NaN.
    """

    bits: int
    dtype: str
    seed: int = SEED

    def __post_init__(self) -> None:
        if self.bits not in TURBO_BITS:
            raise ValueError(f"TurboQuant has no {self.bits} bits; use one of {TURBO_BITS}")

    @staticmethod
    def fits(width: int) -> bool:
        """Whether rows of this width can be held: rotated, and in whole bytes."""
        return width % _GROUP == 0 and Rotation.fits(width)

    @property
    def header(self) -> record.Encoding:
        return {
            "name": "turboquant",
            "bits": self.bits,
            "hadamard_seed": self.seed,
            "dtype": self.dtype,
        }

    def arrays(self, shape: PartShape) -> tuple[record.ArraySpec, ...]:
        return (
            record.ArraySpec("codes", "uint8", shape.heads, shape.width * self.bits // 8),
            record.ArraySpec("norms", "bfloat16", shape.heads, 1),
        )

    def encode(self, rows: mx.array) -> tuple[mx.array, ...]:
        rows = rows.astype(mx.float32)
        # In two steps, because the squares of 1e30 or 1e-30 are out of float32's range.
        most, least = (bound(axis=-1, keepdims=True) for bound in (rows.max, rows.min))
        largest = mx.maximum(most, -least)
        rows = rows / mx.where(largest > 0, largest, 1.0)
        length = mx.sqrt(mx.square(rows).sum(axis=-1, keepdims=True))
        norms = mx.minimum(largest * length, _BFLOAT16_MAX).astype(mx.bfloat16)
        directions = Rotation(self.seed).apply(rows) / mx.where(length > 0, length, 1.0)
        return _pack(self._nearest(directions), self.bits), norms

    def decode(self, arrays: Sequence[mx.array]) -> mx.array:
        codes, norms = arrays
        width = codes.shape[-1] * 8 // self.bits
        pairs = _unpack_pairs(codes, self.bits)
        # Along an axis, because gathering single elements takes twenty times as long on a CPU.
        found = mx.take_along_axis(_pair_table(width, self.bits), pairs.reshape(1, -1), axis=1)
        directions = found.view(mx.float32).reshape(*codes.shape[:-1], width)
        rows = Rotation(self.seed).undo(directions * norms.astype(mx.float32))
        return narrowed(rows, getattr(mx, self.dtype))

    def _nearest(self, directions: mx.array) -> mx.array:
        """The code of the level nearest to each coordinate: its sign, above the magnitude's."""
        codes = (directions < 0).view(mx.uint8) * (1 << (self.bits - 1))
        magnitudes = mx.abs(directions)
        # One boundary at a time: all at once would need memory for each.
        for boundary in _boundaries(directions.shape[-1], self.bits):
            codes = codes + (magnitudes > boundary).view(mx.uint8)
        return codes


class TurboQuantKVCache(_BaseCache):
    """As mlx-lm's KVCache, for one request, but its rows are held in TurboQuant's encoding.

    `keys` and `values` are each None or (codes, norms), arrays (batch, heads, capacity, ...).
    It saves memory, not time: `update_and_fetch` decodes all rows. ValueError for bits that do
    not exist, and for rows of a width that has no Hadamard transform.
    """

    # No attribute may be named `bits`: mlx-lm would attend to keys and values as packed ones.
    step: Final = 256

    def __init__(self, bits: int = 4, seed: int = SEED) -> None:
        # The dtype is that of the first rows.
        self.encoding = TurboQuant(bits, "float32", seed)
        self.keys: tuple[mx.array, ...] | None = None
        self.values: tuple[mx.array, ...] | None = None
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends rows (batch, heads, rows, width); all rows, decoded, in the dtype of the first.

        Lazy.
        """
        for rows in (keys, values):
            if not TurboQuant.fits(rows.shape[-1]):
                raise ValueError(
                    f"TurboQuant needs a Hadamard transform, and width {rows.shape[-1]} has none; "
                    "use another cache for this model"
                )
        if self.empty():
            dtype = str(keys.dtype).removeprefix("mlx.core.")
            self.encoding = replace(self.encoding, dtype=dtype)
        self.keys = self._append(self.keys, self.encoding.encode(keys))
        self.values = self._append(self.values, self.encoding.encode(values))
        self.offset += keys.shape[2]
        return self.dequantize()

    def _append(
        self, held: tuple[mx.array, ...] | None, rows: tuple[mx.array, ...]
    ) -> tuple[mx.array, ...]:
        count = rows[0].shape[2]
        steps = -(-count // self.step)
        grown = []
        for index, new in enumerate(rows):
            empty = mx.zeros((*new.shape[:2], steps * self.step, new.shape[3]), new.dtype)
            buffer = empty if held is None else held[index]
            if self.offset + count > buffer.shape[2]:
                buffer = mx.concatenate([buffer[..., : self.offset, :], empty], axis=2)
            buffer[..., self.offset : self.offset + count, :] = new
            grown.append(buffer)
        return tuple(grown)

    def dequantize(self) -> tuple[mx.array, mx.array]:
        """Keys and values (batch, heads, offset, width); lazy. ValueError for an empty cache."""
        if self.keys is None or self.values is None:
            raise ValueError("an empty TurboQuantKVCache has no rows to dequantize")
        return self._decode(self.keys), self._decode(self.values)

    def _decode(self, part: tuple[mx.array, ...]) -> mx.array:
        return self.encoding.decode([array[..., : self.offset, :] for array in part])

    def copy(self) -> Self:
        """A cache of the same rows that shares no mutable state with this one."""
        made = type(self).__new__(type(self))
        made.state = self.state
        return made

    @property
    def state(self) -> tuple[Any, ...]:
        encoding = self.encoding
        return self.keys, self.values, self.offset, encoding.bits, encoding.dtype, encoding.seed

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        keys, values, self.offset, bits, dtype, seed = state
        self.encoding = TurboQuant(bits, dtype, seed)
        self.keys, self.values = _own(keys), _own(values)

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.keys is None

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        n = min(self.offset, n)
        self.offset -= n
        return n

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        mask: mx.array | str | None = create_attention_mask(
            N, self.offset, return_array, window_size
        )
        return mask

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for part in (self.keys, self.values) for array in part or ())


def _own(part: Sequence[mx.array] | None) -> tuple[mx.array, ...] | None:
    """Arrays that nobody else updates: MLX changes the object, not the memory others see."""
    return None if part is None else tuple(array[...] for array in part)


def _pack(codes: mx.array, bits: int) -> mx.array:
    """Codes (..., width) to bytes (..., width * bits / 8): code i is at bit i * bits."""
    grouped = codes.reshape(*codes.shape[:-1], -1, _GROUP).astype(mx.uint32)
    words = (grouped << _shifts(bits, _GROUP)).sum(axis=-1, keepdims=True)
    return mx.contiguous(words.view(mx.uint8)[..., :bits].flatten(-2))


def _unpack_pairs(packed: mx.array, bits: int) -> mx.array:
    """Bytes to numbers (..., width / 2), each the codes of two neighbours: the first is lower."""
    grouped = packed.reshape(*packed.shape[:-1], -1, bits)
    # Four bytes make a word.
    words = mx.pad(grouped, [(0, 0)] * (grouped.ndim - 1) + [(0, 4 - bits)]).view(mx.uint32)
    pairs: mx.array = (words >> _shifts(2 * bits, _GROUP // 2)) & (4**bits - 1)
    return pairs.flatten(-2)


def _shifts(step: int, count: int) -> mx.array:
    return mx.array([step * index for index in range(count)], dtype=mx.uint32)


def _boundaries(width: int, bits: int) -> list[float]:
    """Between the magnitudes of neighbouring levels, for unit vectors."""
    return [float(b) / math.sqrt(width) for b in boundaries_between(levels(width, bits))]


@functools.cache
def _pair_table(width: int, bits: int) -> mx.array:
    """For each two codes (see _unpack_pairs) their two levels, as one element: (1, 4**bits)."""
    positive = np.array(levels(width, bits)) / math.sqrt(width)
    by_code = np.concatenate([positive, -positive]).astype(np.float32)
    second, first = np.meshgrid(by_code, by_code, indexing="ij")
    pairs = np.stack([first, second], axis=-1).reshape(1, -1).view(np.uint64)
    table = mx.array(pairs)
    mx.eval(table)
    return table
