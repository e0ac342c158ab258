"""Placeholder; replaced."""

from typing import Any

from engine.kv.encoding import Affine


class PackedHistory(tuple):  # type: ignore[type-arg]
    encoding: Affine
    columns: int

    def __new__(cls, arrays: Any, encoding: Affine, columns: int) -> "PackedHistory":
        made = super().__new__(cls, arrays)
        made.encoding = encoding
        made.columns = columns
        return made
