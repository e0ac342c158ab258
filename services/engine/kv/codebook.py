"""Lloyd-Max codebooks for one coordinate of a random unit vector.

Source: S. P. Lloyd, "Least squares quantization in PCM"; TurboQuant, arXiv 2504.19874, section 3.
"""

import functools
import math
from typing import Final

import numpy as np
import numpy.typing as npt

# Of the half of the density that is integrated: beyond 12 standard deviations is nothing.
_POINTS: Final = 2**16 + 1
_DEVIATIONS_MAX: Final = 12.0
_ITERATIONS_MAX: Final = 100_000
# In standard deviations, as everything here. Levels are rounded, so that they do not depend on
# the last bits of a machine's cosine: records outlive them.
_TOLERANCE: Final = 1e-11
_ROUNDING: Final = 2.0**-16


@functools.cache
def levels(width: int, bits: int) -> tuple[float, ...]:
    """The positive levels, ascending; with their negatives they are all 2**bits.

    In units of a coordinate's standard deviation, 1 / sqrt(width). `width` is at least 3.
    """
    count = 2 ** (bits - 1)
    found = (np.arange(count) + 0.5) * min(3.0, math.sqrt(width) / 2) / count
    density = _HalfDensity(width)
    for _ in range(_ITERATIONS_MAX):
        before = found
        edges = np.concatenate([[0.0], boundaries_between(before), [density.end]])
        found = density.means(edges)
        if np.abs(found - before).max() < _TOLERANCE:
            return tuple(float(level) for level in np.rint(found / _ROUNDING) * _ROUNDING)
    raise AssertionError(f"no codebook of {bits} bits for width {width}")


def boundaries_between(positive: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Where the nearest of two neighbouring levels changes."""
    ascending = np.asarray(positive, np.float64)
    return (ascending[1:] + ascending[:-1]) / 2


class _HalfDensity:
    """A coordinate x of a unit vector has density proportional to (1 - x**2)**((width - 3) / 2).

    With x = sin(angle) that is cos(angle)**(width - 2), which is smooth up to the ends.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._deviation = 1 / math.sqrt(width)
        last = min(math.pi / 2, _DEVIATIONS_MAX * self._deviation)
        self.end: Final = math.sin(last) / self._deviation
        self._angles = np.linspace(0.0, last, _POINTS)
        density = np.cos(self._angles) ** (width - 2)
        steps = (density[1:] + density[:-1]) / 2 * (last / (_POINTS - 1))
        self._masses = np.concatenate([[0.0], np.cumsum(steps)])

    def means(self, edges: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Mean of the density between each edge and the next."""
        angles = np.arcsin(np.minimum(edges * self._deviation, 1.0))
        masses = np.diff(np.interp(angles, self._angles, self._masses))
        moments = -np.diff(np.cos(angles) ** (self._width - 1)) / (self._width - 1)
        means: npt.NDArray[np.float64] = moments / masses / self._deviation
        return means
