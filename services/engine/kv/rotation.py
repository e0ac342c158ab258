"""A seeded random rotation of rows, which spreads outlier channels over all of them.

Scores do not change when queries and keys are rotated alike; what is made of rotated values is
rotated back. Source: QuaRot, arXiv 2404.00456; TurboQuant, arXiv 2504.19874.
"""

import functools
import hashlib
from dataclasses import dataclass
from typing import Final

import mlx.core as mx

# Hadamard matrices are known to MLX for these sizes times a power of two.
_BASES: Final = (1, 12, 20, 28)
_WIDTH_MAX: Final = 8192

_FLOAT16_MAX: Final = 65504.0

# Of every rotation of rows that are stored; records name theirs.
SEED: Final = 1


@dataclass(frozen=True, slots=True)
class Rotation:
    """Random signs, then a Hadamard matrix: orthogonal, the same for the same seed and width."""

    seed: int

    @staticmethod
    def fits(width: int) -> bool:
        """Whether there is a Hadamard matrix of this size."""
        return any(
            width % base == 0 and (width // base) & (width // base - 1) == 0 for base in _BASES
        ) and (1 < width <= _WIDTH_MAX)

    def apply(self, rows: mx.array) -> mx.array:
        """Rotate the last axis; keeps the dtype, computes in float32. Lazy.

        Each row by itself, to the last bit: what follows is a quantizer, which makes much of it.
        """
        signs = _signs(rows.shape[-1], self.seed)
        return narrowed(mx.hadamard_transform(rows.astype(mx.float32) * signs), rows.dtype)

    def undo(self, rows: mx.array) -> mx.array:
        """What `apply` was given, but for rounding."""
        matrix = _matrix(rows.shape[-1], self.seed)
        return narrowed(rows.astype(mx.float32) @ matrix.T, rows.dtype)


def narrowed(rows: mx.array, dtype: mx.Dtype) -> mx.array:
    """Rows of float32 in another dtype; what float16 cannot hold becomes its largest number."""
    if dtype == mx.float16:
        rows = mx.clip(rows, -_FLOAT16_MAX, _FLOAT16_MAX)
    return rows.astype(dtype)


@functools.cache
def _signs(width: int, seed: int) -> mx.array:
    # Not from a library's generator, whose stream may change between versions: records outlive
    # them.
    drawn = hashlib.shake_256(b"%d %d" % (width, seed)).digest(width)
    signs = mx.array([1.0 if byte & 1 else -1.0 for byte in drawn])
    mx.eval(signs)
    return signs


@functools.cache
def _matrix(width: int, seed: int) -> mx.array:
    # The inverse is no transform that MLX has, where the width is no power of two.
    matrix = Rotation(seed).apply(mx.eye(width))
    mx.eval(matrix)
    return matrix
