"""The state of recurrent layers: mlx-lm's ArraysCache with a row protocol that holds throughout.

mlx-lm's own fails on slots that nothing was written to, and takes a cache whose first slot is one
of those for empty.
"""

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache


class RecurrentCache(ArraysCache):
    """Of one request or of those in a batch: arrays (requests, ...), or None while a slot has none.

    Where one request has an array that another one lacks, the other one's is zeros, as for models
    the state is that nothing was fed to.
    """

    @classmethod
    def of(cls, cache: ArraysCache) -> "RecurrentCache":
        """Fresh, of the same slots."""
        return cls(len(cache.cache))

    @classmethod
    def merge(cls, caches: Sequence["RecurrentCache"]) -> "RecurrentCache":
        """Of requests with one cache each. ValueError when their arrays have different shapes."""
        made = cls(len(caches[0].cache))
        for slot in range(len(made.cache)):
            held = [cache.cache[slot] for cache in caches]
            like = next((array for array in held if array is not None), None)
            if like is not None:
                made.cache[slot] = mx.concatenate(
                    [mx.zeros_like(like) if array is None else array for array in held]
                )
        if made.empty():
            # Tells how many requests there are, until there are arrays.
            made.left_padding = mx.array([0] * len(caches))
        return made

    def extract(self, index: int) -> "RecurrentCache":
        made = type(self)(len(self.cache))
        made.cache = [None if a is None else a[index : index + 1] for a in self.cache]
        return made

    def empty(self) -> bool:
        return all(array is None for array in self.cache)
