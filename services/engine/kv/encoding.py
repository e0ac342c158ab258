"""Ways to hold rows: as they are, or quantized.

Encodings work row by row, so that what a row becomes never depends on its neighbours, and a span
of stored rows can begin anywhere. A live cache holds its rows in one encoding and so does each
part of a stored record; where both are the same, rows travel between them as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import mlx.core as mx

from cachestore import record
from engine.kv.rotation import Rotation

_FLOAT16_HALF_MAX: Final = 32752.0


class Encoding(Protocol):
    """One way to hold rows. `rows` are (..., rows, width); so are the arrays, each of its width."""

    @property
    def header(self) -> record.Encoding:
        """What a record says of it."""

    def arrays(self, shape: "PartShape") -> tuple[record.ArraySpec, ...]: ...

    def encode(self, rows: mx.array) -> tuple[mx.array, ...]:
        """Lazy; may return its argument."""

    def decode(self, arrays: Sequence[mx.array]) -> mx.array:
        """Lazy; may return its argument. Gives the dtype that was encoded."""


@dataclass(frozen=True, slots=True)
class Lossless:
    """The rows as they are."""

    @property
    def header(self) -> record.Encoding:
        return {"name": "none"}

    def arrays(self, shape: "PartShape") -> tuple[record.ArraySpec, ...]:
        return (record.ArraySpec("rows", shape.dtype, shape.heads, shape.width),)

    def encode(self, rows: mx.array) -> tuple[mx.array, ...]:
        return (rows,)

    def decode(self, arrays: Sequence[mx.array]) -> mx.array:
        (rows,) = arrays
        return rows


@dataclass(frozen=True, slots=True)
class PartShape:
    """What one layer keeps of each token under one name; dtype as records spell it.

    `live` is how its cache holds the rows, and dtype what attention sees of them.
    """

    name: str
    heads: int
    width: int
    dtype: str
    live: Encoding = Lossless()

    @property
    def mlx_dtype(self) -> mx.Dtype:
        dtype: mx.Dtype = getattr(mx, self.dtype)
        return dtype


@dataclass(frozen=True, slots=True)
class Affine:
    """MLX's affine quantization: a scale and a bias, in the rows' dtype, for each group.

    With a rotation, it is the rotated rows that are quantized.
    """

    bits: int
    group_size: int
    rotation: Rotation | None = None

    def fits(self, width: int) -> bool:
        """Whether rows of this width can be held."""
        rotates = self.rotation is None or self.rotation.fits(width)
        return width % self.group_size == 0 and rotates

    @property
    def header(self) -> record.Encoding:
        plain: record.Encoding = {
            "name": "affine",
            "bits": self.bits,
            "group_size": self.group_size,
        }
        return plain if self.rotation is None else {**plain, "hadamard_seed": self.rotation.seed}

    def arrays(self, shape: "PartShape") -> tuple[record.ArraySpec, ...]:
        words, groups = shape.width * self.bits // 32, shape.width // self.group_size
        return (
            record.ArraySpec("codes", "uint32", shape.heads, words),
            record.ArraySpec("scales", shape.dtype, shape.heads, groups),
            record.ArraySpec("biases", shape.dtype, shape.heads, groups),
        )

    def encode(self, rows: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        if self.rotation is not None:
            rows = self.rotation.apply(rows)
            if rows.dtype == mx.float16:
                # A code times its scale is as much as the range of a group, and must be finite.
                rows = mx.clip(rows, -_FLOAT16_HALF_MAX, _FLOAT16_HALF_MAX)
        codes, scales, biases = mx.quantize(rows, group_size=self.group_size, bits=self.bits)
        return codes, scales, biases

    def decode(self, arrays: Sequence[mx.array]) -> mx.array:
        rows = self.dequantize(arrays)
        return rows if self.rotation is None else self.rotation.undo(rows)

    def dequantize(self, arrays: Sequence[mx.array]) -> mx.array:
        """The rows as they were quantized: still rotated, if they are. Lazy."""
        codes, scales, biases = arrays
        if self.bits == 8 and mx.default_device().type == mx.cpu:
            # The same bits in a third of the time: MLX's CPU kernel unpacks code by code.
            grouped = codes.view(mx.uint8).reshape(*scales.shape, self.group_size)
            rows = grouped.astype(scales.dtype) * scales[..., None] + biases[..., None]
            return rows.flatten(-2)
        return mx.dequantize(codes, scales, biases, group_size=self.group_size, bits=self.bits)


def convert(arrays: Sequence[mx.array], held: Encoding, wanted: Encoding) -> tuple[mx.array, ...]:
    """Rows of one encoding in another one, lazy. Never decodes what is wanted as it is."""
    return tuple(arrays) if held == wanted else wanted.encode(held.decode(arrays))
