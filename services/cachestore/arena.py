"""Which bytes of the slabs belong to what. The memory itself is not touched here."""

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from sortedcontainers import SortedList

from cachestore.config import EXTENT_UNIT_BYTES
from cachestore.extent import Extent


class State(Enum):
    RESERVED = "reserved"
    USED = "used"
    QUARANTINED = "quarantined"


_FOLLOWERS = {
    State.RESERVED: {State.USED, State.QUARANTINED},
    State.USED: set[State](),
    State.QUARANTINED: set[State](),
}


class Hole(NamedTuple):
    """Free bytes, as large as they can be. Ordered for best fit: by length, then by address.

    A tuple because comparisons are most of what the arena does.
    """

    length: int
    slab_id: int = -1
    offset: int = -1


@dataclass(slots=True)
class _Slab:
    """One slab's free bytes, found from either end. Nothing is held when bytes_free == bytes."""

    bytes: int
    bytes_free: int = 0
    hole_at: dict[int, Hole] = field(default_factory=dict)
    hole_until: dict[int, Hole] = field(default_factory=dict)


def aligned(length: int) -> int:
    return -(-length // EXTENT_UNIT_BYTES) * EXTENT_UNIT_BYTES


class Arena:
    """Slabs, tiled without gaps by extents and holes.

                     allocate            turn
        hole  ─────────────────▶ RESERVED ────▶ USED ⟲ slide
         ▲                          │  │          │
         │         free             │  └──────▶ QUARANTINED
         └──────────────────────────┴─────────────┴───┘

    A slab that is one hole can be retired: nothing is allocated in it any more, but it counts
    until it is removed.

    No two holes touch. Extents are handed out by best fit, from the low end of the hole. Slab ids
    and generations are never used twice. Freeing an extent twice, or one of another arena, is a
    programmer's error. Every operation is O(log extents).
    """

    def __init__(self) -> None:
        self._retiring: dict[int, int] = {}  # bytes by slab id
        self._slabs: dict[int, _Slab] = {}
        self._holes: SortedList[Hole] = SortedList()
        self._held: dict[State, set[Extent]] = {state: set() for state in State}
        self._bytes: dict[State, int] = dict.fromkeys(State, 0)
        self._last_slab_id = 0
        self._last_generation = 0
        self.bytes_slabs = 0
        self.changes = 0  # since it was made

    @property
    def slabs(self) -> int:
        return len(self._slabs) + len(self._retiring)

    @property
    def bytes_free(self) -> int:
        return self.bytes_slabs - sum(self._bytes.values()) - self.bytes_retiring

    @property
    def bytes_retiring(self) -> int:
        return sum(self._retiring.values())

    @property
    def empty_slabs(self) -> list[int]:
        """Slabs in which nothing lies, retiring ones aside, the oldest first."""
        return [slab_id for slab_id, slab in self._slabs.items() if slab.bytes_free == slab.bytes]

    @property
    def slab_ids(self) -> list[int]:
        """Slabs in use, the oldest first."""
        return list(self._slabs)

    def holes(self, slab_id: int) -> list[Hole]:
        """All holes of a slab in use, by address."""
        return sorted(self._slabs[slab_id].hole_at.values(), key=lambda hole: hole.offset)

    def is_hole_from(self, slab_id: int, offset: int) -> bool:
        """Whether a hole begins there."""
        return offset in self._slabs[slab_id].hole_at

    def bytes_in_holes(self, length: int) -> int:
        """Bytes of all holes of at least that length; O(holes)."""
        first = self._holes.bisect_left(Hole(length))
        return sum(hole.length for hole in self._holes.islice(first))

    def bytes_in(self, state: State) -> int:
        return self._bytes[state]

    def held(self, state: State) -> AbstractSet[Extent]:
        return self._held[state]

    def add_slab(self, size_bytes: int) -> int:
        assert size_bytes > 0
        assert size_bytes % EXTENT_UNIT_BYTES == 0
        self._last_slab_id += 1
        self._slabs[self._last_slab_id] = _Slab(size_bytes)
        self.bytes_slabs += size_bytes
        self.changes += 1
        self._add_hole(Hole(size_bytes, self._last_slab_id, 0))
        return self._last_slab_id

    def retire_slab(self, slab_id: int) -> None:
        slab = self._slabs[slab_id]
        assert slab.bytes_free == slab.bytes
        self._remove_hole(slab.hole_at[0])
        del self._slabs[slab_id]
        self._retiring[slab_id] = slab.bytes
        self.changes += 1

    def remove_slab(self, slab_id: int) -> None:
        """The memory of a retired slab is given back."""
        self.bytes_slabs -= self._retiring.pop(slab_id)
        self.changes += 1

    def allocate(self, length: int) -> Extent | None:
        """A reserved extent, or None when no hole is large enough."""
        assert length > 0
        assert length % EXTENT_UNIT_BYTES == 0
        index = self._holes.bisect_left(Hole(length))
        if index == len(self._holes):
            return None
        hole: Hole = self._holes[index]
        self._remove_hole(hole)
        if hole.length > length:
            self._add_hole(Hole(hole.length - length, hole.slab_id, hole.offset + length))
        return self._hold(State.RESERVED, hole.slab_id, hole.offset, length)

    def turn(self, extent: Extent, state: State) -> None:
        before = self._state(extent)
        assert state in _FOLLOWERS[before]
        self._take(extent, before)
        self._held[state].add(extent)
        self._bytes[state] += extent.length

    def free(self, extent: Extent) -> None:
        self._take(extent, self._state(extent))
        self._open(extent.slab_id, extent.offset, extent.offset + extent.length)

    def slide(self, extent: Extent) -> Extent:
        """A used extent changes places with the hole right before it; returns its new self."""
        assert extent in self._held[State.USED]
        hole = self._slabs[extent.slab_id].hole_until[extent.offset]
        self._take(extent, State.USED)
        self._remove_hole(hole)
        end = hole.offset + extent.length
        self._open(extent.slab_id, end, end + hole.length)
        return self._hold(State.USED, extent.slab_id, hole.offset, extent.length)

    def could_hold(self, lengths: Iterable[int], staying: Iterable[Extent]) -> bool:
        """Whether extents of these lengths fit when of the used ones only `staying` remain.

        Tried by best fit, the longest first: exact when all but one are equal and that one is
        shorter; with more lengths they might fit another way. Costs O(n log n) for all extents.
        """
        remaining = self._held[State.RESERVED] | self._held[State.QUARANTINED]
        gaps = SortedList(self._gaps(remaining.union(staying)))
        for length in sorted(lengths, reverse=True):
            index = gaps.bisect_left(length)
            if index == len(gaps):
                return False
            gaps.add(gaps.pop(index) - length)
        return True

    def checks(self) -> Iterator[int]:
        """Verify every invariant, as Store.checks does."""
        lengths: dict[int, dict[int, int]] = {slab_id: {} for slab_id in self._slabs}
        generations: set[int] = set()
        for state, held in self._held.items():
            size = 0
            for extent in held:
                assert 0 < extent.generation <= self._last_generation
                generations.add(extent.generation)
                lengths[extent.slab_id][extent.offset] = extent.length
                size += extent.length
                yield 1
            assert self._bytes[state] == size
        extents = sum(map(len, self._held.values()))
        assert len(generations) == extents
        yield from self._check_holes(lengths)
        assert sum(map(len, lengths.values())) == extents + len(self._holes), "extents overlap"
        for slab_id, slab in self._slabs.items():
            tiles, end = lengths.pop(slab_id), 0
            while end < slab.bytes:
                length = tiles.pop(end, 0)
                assert length > 0, "extents overlap or leave a gap"
                assert length % EXTENT_UNIT_BYTES == 0
                end += length
                yield 1
            assert end == slab.bytes
            assert not tiles, "extents overlap or lie outside of their slab"
        assert not self._slabs.keys() & self._retiring.keys()
        size = sum(slab.bytes for slab in self._slabs.values())
        assert self.bytes_slabs == size + self.bytes_retiring

    def _check_holes(self, lengths: dict[int, dict[int, int]]) -> Iterator[int]:
        """Adds their lengths, by slab and offset."""
        bytes_free = dict.fromkeys(self._slabs, 0)
        for hole in self._holes:
            slab, end = self._slabs[hole.slab_id], hole.offset + hole.length
            assert slab.hole_at[hole.offset] == slab.hole_until[end] == hole
            assert end not in slab.hole_at, "two holes touch"
            lengths[hole.slab_id][hole.offset] = hole.length
            bytes_free[hole.slab_id] += hole.length
            yield 1
        slabs = self._slabs.values()
        assert [slab.bytes_free for slab in slabs] == list(bytes_free.values())
        assert sum(len(slab.hole_at) for slab in slabs) == len(self._holes)
        assert sum(len(slab.hole_until) for slab in slabs) == len(self._holes)

    def _gaps(self, extents: Iterable[Extent]) -> Iterator[int]:
        ends = dict.fromkeys(self._slabs, 0)
        for extent in sorted(extents, key=lambda extent: (extent.slab_id, extent.offset)):
            yield extent.offset - ends[extent.slab_id]
            ends[extent.slab_id] = extent.offset + extent.length
        for slab_id, end in ends.items():
            yield self._slabs[slab_id].bytes - end

    def _hold(self, state: State, slab_id: int, offset: int, length: int) -> Extent:
        self._last_generation += 1
        extent = Extent(slab_id, offset, length, self._last_generation)
        self._held[state].add(extent)
        self._bytes[state] += length
        self.changes += 1
        return extent

    def _open(self, slab_id: int, start: int, end: int) -> None:
        """Make a hole of [start, end), together with those that it touches."""
        slab = self._slabs[slab_id]
        if (below := slab.hole_until.get(start)) is not None:
            self._remove_hole(below)
            start = below.offset
        if (above := slab.hole_at.get(end)) is not None:
            self._remove_hole(above)
            end += above.length
        self._add_hole(Hole(end - start, slab_id, start))

    def _state(self, extent: Extent) -> State:
        for state, held in self._held.items():
            if extent in held:
                return state
        raise AssertionError(f"{extent} is not allocated here: freed twice, or foreign")

    def _take(self, extent: Extent, state: State) -> None:
        self._held[state].remove(extent)
        self._bytes[state] -= extent.length
        self.changes += 1

    def _add_hole(self, hole: Hole) -> None:
        slab = self._slabs[hole.slab_id]
        slab.hole_at[hole.offset] = hole
        slab.hole_until[hole.offset + hole.length] = hole
        slab.bytes_free += hole.length
        self._holes.add(hole)

    def _remove_hole(self, hole: Hole) -> None:
        slab = self._slabs[hole.slab_id]
        del slab.hole_at[hole.offset]
        del slab.hole_until[hole.offset + hole.length]
        slab.bytes_free -= hole.length
        self._holes.remove(hole)
