"""Everything that is stored, by id, by place and by what keeps it; and what it adds up to."""

from collections.abc import Collection
from dataclasses import replace

from sortedcontainers import SortedList

from cachestore.eviction import Candidate
from cachestore.extent import Extent


class Inventory:
    """Knows of each record and checkpoint its id, where it lies, and whether it is pinned."""

    def __init__(self) -> None:
        self.stored: dict[int, Candidate] = {}  # by id, which is the order of their age
        self.bytes_padding = 0
        self.bytes_stranded = 0
        self.bytes_pinned = 0
        self._at: dict[tuple[int, int], Candidate] = {}  # by slab and offset
        self._lengths: SortedList[int] = SortedList()  # of all extents
        self._pinned: set[Candidate] = set()
        self._last_id = 0

    @property
    def median_bytes(self) -> int:
        """Of all extents; 0 when nothing is stored."""
        return int(self._lengths[(len(self._lengths) - 1) // 2]) if self._lengths else 0

    @property
    def pinned_extents(self) -> list[Extent]:
        return [each.span.extent for each in self._pinned]

    def next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def at(self, slab_id: int, offset: int) -> Candidate | None:
        """What lies in the extent that begins there."""
        return self._at.get((slab_id, offset))

    def add(self, stored: Candidate) -> None:
        extent = stored.span.extent
        self.stored[stored.id] = stored
        self._at[extent.slab_id, extent.offset] = stored
        self._lengths.add(extent.length)
        self.bytes_padding += stored.span.bytes_padding
        self.bytes_stranded += stored.span.bytes_stranded

    def remove(self, stored: Candidate) -> None:
        assert stored.pins == 0
        extent = stored.span.extent
        del self.stored[stored.id]
        del self._at[extent.slab_id, extent.offset]
        self._lengths.remove(extent.length)
        self.bytes_padding -= stored.span.bytes_padding
        self.bytes_stranded -= stored.span.bytes_stranded

    def move(self, stored: Candidate, extent: Extent) -> None:
        """It lies in another extent of the same length now; nobody must have been told of it."""
        before = stored.span.extent
        assert stored.pins == 0
        assert before.length == extent.length
        del self._at[before.slab_id, before.offset]
        self._at[extent.slab_id, extent.offset] = stored
        stored.span = replace(stored.span, extent=extent)

    def pin(self, stored: Candidate) -> None:
        if stored.pins == 0:
            self._pinned.add(stored)
            self.bytes_pinned += stored.bytes_held
        stored.pins += 1

    def unpin(self, stored: Candidate) -> None:
        assert stored.pins > 0
        stored.pins -= 1
        if stored.pins == 0:
            self._pinned.remove(stored)
            self.bytes_pinned -= stored.bytes_held

    def check(self, stored: Collection[Candidate], used: Collection[Extent]) -> None:
        """Verify everything against what is in trees, and the extents that are in use."""
        assert {each.id: each for each in stored} == self.stored
        assert list(self.stored) == sorted(self.stored)
        pinned = {each for each in stored if each.pins > 0}
        assert self._pinned == pinned
        assert self.bytes_pinned == sum(each.bytes_held for each in pinned)
        assert self.bytes_padding == sum(each.span.bytes_padding for each in stored)
        assert self.bytes_stranded == sum(each.span.bytes_stranded for each in stored)
        extents = [each.span.extent for each in stored]
        assert set(extents) == used
        assert len(extents) == len(used)
        at = {(each.span.extent.slab_id, each.span.extent.offset): each for each in stored}
        assert self._at == at
        assert list(self._lengths) == sorted(extent.length for extent in extents)
