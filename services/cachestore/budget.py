"""How much memory the store may take: as people write and read it, and when they do not say."""

import os
import re

from cachestore.config import BUDGET_BYTES_MIN, GIB, MIB

_UNIT_BYTES = {
    "": 1,
    "B": 1,
    **{unit: 1 << shift for unit, shift in zip("KMGT", (10, 20, 30, 40), strict=True)},
    **{f"{unit}IB": 1 << shift for unit, shift in zip("KMGT", (10, 20, 30, 40), strict=True)},
    **{f"{unit}B": 1000**power for unit, power in zip("KMGT", (1, 2, 3, 4), strict=True)},
}
_SHOWN = ("B", "KiB", "MiB", "GiB", "TiB")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Z]*)")


def parse_bytes(text: str) -> int:
    """Bytes of a size such as "8GiB", "512M", "1.5G" or "1048576"; raises ValueError.

    K, M, G and T count in powers of 1024, as do KiB to TiB; KB to TB in powers of 1000.
    """
    match = _SIZE.fullmatch(text.strip().upper())
    if match is None or match[2] not in _UNIT_BYTES:
        raise ValueError(f"{text!r} is not a size; write it like 8GiB, 512M or 1048576")
    # Whole numbers stay integers: a float would round sizes above 2**53.
    number = float(match[1]) if "." in match[1] else int(match[1])
    return int(number * _UNIT_BYTES[match[2]])


def size_text(size: int) -> str:
    """Bytes as people read them, like "1.5 GiB"."""
    power = min((max(size, 1).bit_length() - 1) // 10, len(_SHOWN) - 1)
    return f"{size / 1024**power:,.{1 if power else 0}f} {_SHOWN[power]}"


def parse_budget(text: str, memory_bytes: int) -> int:
    """As `parse_bytes`, for the budget of a store on a machine with this much memory."""
    size = parse_bytes(text)
    if size < BUDGET_BYTES_MIN:
        raise ValueError(f"{text!r} is {size} bytes; give at least {BUDGET_BYTES_MIN // MIB}MiB")
    if size > memory_bytes:
        raise ValueError(f"{text!r} is more than this machine's memory of {memory_bytes} bytes")
    return size


def physical_memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def default_budget_bytes(memory_bytes: int) -> int:
    """An eighth of the memory; at least 1 GiB, unless that is more than half of it."""
    return max(memory_bytes // 8, min(GIB, memory_bytes // 2))
