"""Everything that is stored, by id, by place and by what keeps it; and what it adds up to."""

from collections import Counter
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import pairwise

from sortedcontainers import SortedList

from cachestore.eviction import Candidate
from cachestore.extent import Extent

# At whatever is stored, to check it: that takes longer than elsewhere.
_LOOKS = 4


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

    def checks(self, stored: Sequence[Candidate], used: AbstractSet[Extent]) -> Iterator[int]:
        """Verify everything, as Store.checks does, against what is in trees, each once, and the
        extents that are in use."""
        counts = {len(self.stored), len(self._at), len(self._lengths), len(used)}
        assert counts == {len(stored)}
        lengths: Counter[int] = Counter()
        pinned = bytes_pinned = bytes_padding = bytes_stranded = 0
        for each in stored:
            extent = each.span.extent
            assert self.stored.get(each.id) is each
            assert self._at.get((extent.slab_id, extent.offset)) is each
            assert extent in used
            assert (each in self._pinned) == (each.pins > 0)
            lengths[extent.length] += 1
            pinned += each.pins > 0
            bytes_pinned += each.bytes_held if each.pins > 0 else 0
            bytes_padding += each.span.bytes_padding
            bytes_stranded += each.span.bytes_stranded
            yield _LOOKS
        assert len(self._pinned) == pinned
        assert self.bytes_pinned == bytes_pinned
        assert self.bytes_padding == bytes_padding
        assert self.bytes_stranded == bytes_stranded
        for before, after in pairwise(self.stored):
            assert before < after
            yield 1
        before = 0
        for length in self._lengths:
            assert before <= length
            before = length
            lengths[length] -= 1
            yield 1
        assert not any(lengths.values())
