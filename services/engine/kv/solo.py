"""Caches for models that mlx-lm's batcher cannot batch: one row, passed through.

Some layers have no `merge` (chunked attention), some models read the cache's offset as a plain
number. For those the batch has one row, and its caches are the model's own, given the row
protocol as far as one row needs it. Changing the class keeps every attribute, special method and
isinstance check of the original.
"""

import copy
from functools import cache
from typing import Any, Self


class _OneRow:
    """mlx-lm's row protocol for a batch of exactly one row."""

    @classmethod
    def merge(cls, caches: list[Self]) -> Self:
        assert len(caches) == 1
        return caches[0]

    def filter(self, keep: list[int]) -> None:
        assert list(keep) == [0]

    def extract(self, index: int) -> Self:
        assert index == 0
        return copy.deepcopy(self)

    def prepare(self, **_: Any) -> None:
        """Nothing is padded."""

    def finalize(self) -> None:
        """Nothing is padded."""


@cache
def _one_row_class(kind: type) -> type:
    return type(f"OneRow{kind.__name__}", (_OneRow, kind), {})


def one_row(caches: list[Any]) -> list[Any]:
    """Give fresh caches of one request, as make_prompt_cache returns them, the row protocol."""
    for layer in caches:
        kind: type = type(layer)
        layer.__class__ = _one_row_class(kind)
    return caches
