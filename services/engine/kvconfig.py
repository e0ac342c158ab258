"""How live caches hold their rows, as the flags say it. No MLX here."""

import argparse
from dataclasses import dataclass
from typing import Final

from engine.flags import ConfigError

# What MLX's affine quantizer has.
AFFINE_BITS: Final = (2, 3, 4, 5, 6, 8)
AFFINE_GROUP_SIZES: Final = (32, 64, 128)
GROUP_SIZE_DEFAULT: Final = 64
# First rows that a bounded cache never drops, as in mlx-lm.
WINDOW_KEEP: Final = 4

BitsPair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class KvConfig:
    """None where the user said nothing. `bits` are those of keys and values.

    Raises ConfigError for what cannot be, or would have no effect.
    """

    bits: BitsPair | None = None
    group_size: int | None = None
    quantized_start: int = 0
    max_size: int | None = None

    def __post_init__(self) -> None:
        for bits in self.bits or ():
            if bits not in AFFINE_BITS:
                raise ConfigError(f"--kv-bits {bits}: no such bits; use {_listed(AFFINE_BITS)}")
        if self.group_size is not None and self.group_size not in AFFINE_GROUP_SIZES:
            raise ConfigError(
                f"--kv-group-size {self.group_size}: no such group; "
                f"use {_listed(AFFINE_GROUP_SIZES)}"
            )
        if self.bits is None:
            for flag, given in (
                ("--kv-group-size", self.group_size is not None),
                ("--quantized-kv-start", self.quantized_start > 0),
            ):
                if given:
                    raise ConfigError(
                        f"{flag} would have no effect: live caches are in full precision; "
                        "add --kv-bits 8, or leave it out"
                    )
        if self.max_size is not None and self.max_size <= WINDOW_KEEP:
            raise ConfigError(
                f"--max-kv-size {self.max_size}: the first {WINDOW_KEEP} rows are always kept; "
                f"use at least {WINDOW_KEEP + 1}"
            )
        if self.max_size is not None and self.quantized_start:
            raise ConfigError(
                "--quantized-kv-start: a cache that is bounded by --max-kv-size is quantized from "
                "its first row; leave one of the two out"
            )

    @property
    def changes(self) -> bool:
        """Whether any layer is to have another cache than without flags."""
        return self.bits is not None or self.max_size is not None

    def check_batch(self, max_batch: int | None) -> None:
        """Raises ConfigError when so many rows at once cannot be."""
        if self.quantized_start and max_batch != 1:
            raise ConfigError(
                f"--quantized-kv-start {self.quantized_start} needs --max-batch 1: the rows of one "
                "batch are all quantized or none; add it, or leave the flag out"
            )


def read_bits(text: str) -> BitsPair | None:
    """Reads "none", N, or K,V, as argparse wants it."""
    if text == "none":
        return None
    numbers = text.split(",")
    # isdigit alone takes digits of every script.
    if len(numbers) > 2 or not all(n.isascii() and n.isdigit() for n in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is none of none, N and K,V (8, or 8,4)")
    keys, values = int(numbers[0]), int(numbers[-1])
    return keys, values


def _listed(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"
