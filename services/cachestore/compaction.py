"""Makes free bytes useful: records that nobody uses move together, so that holes become one.

A checkpoint is a record here as any other."""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from cachestore.eviction import Candidate
from cachestore.extent import Extent
from cachestore.holdings import Holdings

# Of the free bytes, so much should lie in holes that a record of the median size fits in.
USEFUL_SHARE = 0.9
# Below this share of all slabs, free bytes are not worth any copying.
FREE_SHARE_MIN = 1 / 64
# Copied at once, which takes 1 ms, and ten times that while others use the memory. A single longer
# record may take twelve times as long.
SLICE_BYTES = 2 << 20
RECORD_BYTES_MAX = 12 * SLICE_BYTES
# Holes with more records in between are not brought together.
RECORDS_BETWEEN_MAX = 64

Move = Callable[[Extent, Extent], None]


class _Gap(NamedTuple):
    """What lies between two holes, and what it costs to bring them together: bytes to be copied
    for each free byte that is useless as it is."""

    cost: float
    slab_id: int
    end: int
    records: list[Candidate]


class Compaction:
    """Evictions leave holes as long as the records that went, and writes leave rests of holes:
    after many, two thirds of the free bytes are in holes that are too small for most records.

                ├─ A ─┤ hole ├─ B ─┤ hole ├─ C ─┤
        step    ├─ A ─├─ B ─┤    hole     ├─ C ─┤

    A record moves towards the low end of its slab, past the hole before it. Only records without
    a pin move: no client has been told where they are. A step takes the cheapest ones of one slab.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._last_slab = 0
        self._fruitless = 0
        self.bytes_moved = 0

    @property
    def wanted(self) -> bool:
        """Whether too much of the free bytes is useless."""
        arena = self._holdings.arena
        free = arena.bytes_free
        return (
            free > FREE_SHARE_MIN * arena.bytes_slabs
            and self._holdings.bytes_useful < USEFUL_SHARE * free
        )

    def step(self, move: Move) -> bool:
        """Move some records with `move(from, to)`, which may overlap. False when there is no more
        to do, or a whole round has found nothing that can be moved."""
        if not self.wanted or self._fruitless > self._holdings.arena.slabs:
            self._fruitless = 0
            return False
        gaps = sorted(self._gaps(self._next_slab()))
        self._fruitless = 0 if gaps else self._fruitless + 1
        left = SLICE_BYTES
        for gap in gaps:
            if not self._holdings.arena.is_hole_from(gap.slab_id, gap.end):
                continue  # the hole behind has moved on, with what was between it and the next
            for record in gap.records:
                if record.bytes_held > left < SLICE_BYTES:
                    return True
                source = record.span.extent
                move(source, self._holdings.slide(record))
                self.bytes_moved += source.length
                left -= source.length
        return True

    def _next_slab(self) -> int:
        slab_ids = self._holdings.arena.slab_ids
        self._last_slab = next((s for s in slab_ids if s > self._last_slab), slab_ids[0])
        return self._last_slab

    def _gaps(self, slab_id: int) -> list[_Gap]:
        gaps = []
        median = self._holdings.inventory.median_bytes
        for low, high in pairwise(self._holdings.arena.holes(slab_id)):
            useless = sum(hole.length for hole in (low, high) if hole.length < median)
            end = low.offset + low.length
            records = self._movable(slab_id, end, high.offset) if useless else []
            if records:
                gaps.append(
                    _Gap((high.offset - end) / useless, slab_id, high.offset, records),
                )
        return gaps

    def _movable(self, slab_id: int, start: int, end: int) -> list[Candidate]:
        """The records that fill [start, end) of a slab; none unless all can be moved."""
        records: list[Candidate] = []
        while start < end:
            record = self._holdings.inventory.at(slab_id, start)
            if (
                record is None
                or record.pins > 0
                or record.bytes_held > RECORD_BYTES_MAX
                or len(records) == RECORDS_BETWEEN_MAX
            ):
                return []
            records.append(record)
            start += record.bytes_held
        return records
