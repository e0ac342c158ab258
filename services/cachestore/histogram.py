"""How often something was how large, in memory that does not grow."""

from bisect import bisect_left
from collections.abc import Iterable


class Histogram:
    """Counts values in classes: each class ends at its bound, and one more has what lies above.

    counts:    [0]    [1]    [2]      [3]
              ─────┼──────┼──────┼─────────
    bounds:       [0]    [1]    [2]
    """

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        assert list(self.bounds) == sorted(set(self.bounds))
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def quantile(self, share: float) -> float:
        """Bound of the class that holds the smallest `share` of all; the last one for what lies
        above it, and 0 when there are no values."""
        assert 0 < share <= 1
        wanted = share * sum(self.counts)
        below = 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            below += count
            if count and below >= wanted:
                return bound
        return self.bounds[-1] if self.counts[-1] else 0.0

    def coarser(self, step: int) -> "Histogram":
        """The same values by the first bound and every `step`-th after it."""
        merged = Histogram(self.bounds[::step])
        for index, count in enumerate(self.counts):
            merged.counts[min(-(-index // step), len(merged.bounds))] += count
        merged.sum = self.sum
        return merged


def doubling(first: float, classes: int, per_doubling: int = 1) -> tuple[float, ...]:
    """So many bounds from `first`, each `2 ** (1 / per_doubling)` times the one before."""
    return tuple(first * 2.0 ** (index / per_doubling) for index in range(classes))
