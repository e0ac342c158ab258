"""The arena against a map of its units of 256 bytes."""

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cachestore.arena import Arena, State
from cachestore.extent import Extent
from tests.support.machines import MACHINE
from tests.support.whole import whole

UNIT = 256
UNITS = st.integers(1, 6)


class ArenaMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena()
        self.slabs: dict[int, int] = {}
        self.live: dict[Extent, State] = {}
        self.retiring: dict[int, int] = {}
        self.last_slab_id = 0
        self.freed: list[Extent] = []

    def gaps(self, staying: set[Extent]) -> list[tuple[int, int, int]]:
        """(units, slab, first unit) of each run of units outside `staying`."""
        gaps = []
        for slab_id, units in self.slabs.items():
            taken = {
                unit
                for extent in staying
                if extent.slab_id == slab_id
                for unit in range(extent.offset // UNIT, (extent.offset + extent.length) // UNIT)
            }
            start = 0
            for unit in range(units + 1):
                if unit == units or unit in taken:
                    gaps += [(unit - start, slab_id, start)] if unit > start else []
                    start = unit + 1
        return sorted(gaps)

    @initialize(units=st.integers(4, 24))
    def add_first_slab(self, units: int) -> None:
        self.add_slab(units)

    @rule(units=st.integers(1, 24))
    def add_slab(self, units: int) -> None:
        if len(self.slabs) < 4:
            slab_id = self.arena.add_slab(units * UNIT)
            assert slab_id > self.last_slab_id
            self.last_slab_id = slab_id
            self.slabs[slab_id] = units

    @rule(data=st.data())
    def retire_slab(self, data: st.DataObject) -> None:
        busy = {extent.slab_id for extent in self.live}
        empty = [slab_id for slab_id in self.slabs if slab_id not in busy]
        assert self.arena.empty_slabs == empty
        slab_id = data.draw(st.sampled_from(sorted(self.slabs) or [0]))
        if slab_id in empty:
            self.arena.retire_slab(slab_id)
            self.retiring[slab_id] = self.slabs.pop(slab_id)
        else:
            with pytest.raises((AssertionError, KeyError)):
                self.arena.retire_slab(slab_id)

    @precondition(lambda self: self.retiring)
    @rule(data=st.data())
    def remove_slab(self, data: st.DataObject) -> None:
        slab_id = data.draw(st.sampled_from(sorted(self.retiring)))
        self.arena.remove_slab(slab_id)
        del self.retiring[slab_id]

    @rule(units=UNITS)
    def allocate(self, units: int) -> None:
        fitting = [gap for gap in self.gaps(set(self.live)) if gap[0] >= units]
        extent = self.arena.allocate(units * UNIT)
        if not fitting:
            assert extent is None
            return
        assert extent is not None
        assert (extent.slab_id, extent.offset // UNIT) == fitting[0][1:], "not the best fit"
        assert extent.length == units * UNIT
        generations = [known.generation for known in [*self.live, *self.freed]]
        assert extent.generation > max(generations, default=0)
        self.live[extent] = State.RESERVED

    @precondition(lambda self: self.live)
    @rule(data=st.data(), state=st.sampled_from([State.USED, State.QUARANTINED]))
    def turn(self, data: st.DataObject, state: State) -> None:
        extent = data.draw(st.sampled_from(list(self.live)))
        if self.live[extent] is State.RESERVED:
            self.arena.turn(extent, state)
            self.live[extent] = state
        else:
            with pytest.raises(AssertionError):
                self.arena.turn(extent, state)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def slide(self, data: st.DataObject) -> None:
        extent = data.draw(st.sampled_from(list(self.live)))
        end = extent.offset // UNIT
        before = [
            units
            for units, slab_id, first in self.gaps(set(self.live))
            if slab_id == extent.slab_id and first + units == end
        ]
        if self.live[extent] is not State.USED or not before:
            with pytest.raises((AssertionError, KeyError)):
                self.arena.slide(extent)
            return
        moved = self.arena.slide(extent)
        assert (moved.slab_id, moved.length) == (extent.slab_id, extent.length)
        assert moved.offset == extent.offset - before[0] * UNIT
        assert moved.generation > max(known.generation for known in [*self.live, *self.freed])
        del self.live[extent]
        self.freed.append(extent)
        self.live[moved] = State.USED

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        extent = data.draw(st.sampled_from(list(self.live)))
        self.arena.free(extent)
        del self.live[extent]
        self.freed.append(extent)

    @precondition(lambda self: self.freed)
    @rule(data=st.data())
    def free_twice(self, data: st.DataObject) -> None:
        with pytest.raises(AssertionError):
            self.arena.free(data.draw(st.sampled_from(self.freed)))

    @rule(data=st.data(), units=UNITS, count=st.integers(1, 5))
    def ask_for_room(self, data: st.DataObject, units: int, count: int) -> None:
        used = [extent for extent, state in self.live.items() if state is State.USED]
        staying = {extent for extent in used if data.draw(st.booleans())}
        last = data.draw(st.integers(1, units))
        blocked = staying | (self.live.keys() - used)
        # Where the whole ones go does not matter: what they leave of a gap is the same.
        left = [gap[0] for gap in self.gaps(blocked)]
        placed = 0
        for wanted in [units] * (count - 1) + [last]:
            fitting = [index for index, gap in enumerate(left) if gap >= wanted]
            if fitting:
                left[fitting[0]] -= wanted
                placed += 1
        lengths = [units * UNIT] * (count - 1) + [last * UNIT]
        assert self.arena.could_hold(lengths, staying) == (placed == count)

    @invariant()
    def bytes_add_up(self) -> None:
        whole(self.arena.checks())
        assert self.arena.slabs == len(self.slabs) + len(self.retiring)
        assert self.arena.bytes_retiring == sum(self.retiring.values()) * UNIT
        used = sum(self.slabs.values()) * UNIT
        assert self.arena.bytes_slabs == used + self.arena.bytes_retiring
        for state in State:
            held = {extent for extent, known in self.live.items() if known is state}
            assert self.arena.held(state) == held
            assert self.arena.bytes_in(state) == sum(extent.length for extent in held)
        assert self.arena.bytes_free == sum(gap[0] for gap in self.gaps(set(self.live))) * UNIT


TestArena = ArenaMachine.TestCase
TestArena.settings = MACHINE
