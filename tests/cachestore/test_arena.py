import itertools

import pytest

from cachestore.arena import Arena, State, aligned
from cachestore.extent import Extent
from tests.support.whole import whole


def arena_of(*slab_bytes: int) -> Arena:
    arena = Arena()
    for size in slab_bytes:
        arena.add_slab(size)
    return arena


def allocated(arena: Arena, length: int) -> Extent:
    extent = arena.allocate(length)
    assert extent is not None
    whole(arena.checks())
    return extent


@pytest.mark.parametrize(("length", "result"), [(1, 256), (256, 256), (257, 512), (1000, 1024)])
def test_lengths_are_rounded_up_to_the_alignment(length: int, result: int) -> None:
    assert aligned(length) == result


def test_extents_tile_the_slab_and_the_bytes_add_up() -> None:
    arena = arena_of(1024)
    first, second = allocated(arena, 256), allocated(arena, 512)
    assert (first.offset, second.offset) == (0, 256)
    assert arena.allocate(512) is None
    assert arena.bytes_in(State.RESERVED) == 768
    assert arena.bytes_free == 256
    arena.turn(first, State.USED)
    arena.turn(second, State.QUARANTINED)
    whole(arena.checks())
    assert [arena.bytes_in(state) for state in State] == [0, 256, 512]
    assert arena.held(State.USED) == {first}
    assert arena.bytes_slabs == 1024


def test_the_smallest_hole_that_fits_is_taken() -> None:
    arena = arena_of(4096)
    sizes = [1024, 256, 512, 256, 768, 256]
    extents = [allocated(arena, size) for size in sizes]
    for large in extents[::2]:
        arena.free(large)
    assert allocated(arena, 512).offset == extents[2].offset
    assert allocated(arena, 512).offset == extents[4].offset
    assert allocated(arena, 1024).offset in (extents[0].offset, 3072)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_freed_neighbours_become_one_hole_in_any_order(order: tuple[int, ...]) -> None:
    arena = arena_of(1024)
    extents = [allocated(arena, 256) for _ in range(4)]
    for index in order:
        arena.free(extents[index])
        whole(arena.checks())
    assert allocated(arena, 1024).offset == 0


def test_holes_of_two_slabs_are_never_joined() -> None:
    arena = arena_of(512, 512)
    extents = [allocated(arena, 512), allocated(arena, 512)]
    for extent in extents:
        arena.free(extent)
    assert arena.allocate(1024) is None
    assert arena.bytes_free == 1024


def test_slab_ids_and_generations_are_never_used_twice() -> None:
    arena = Arena()
    assert arena.add_slab(256) != arena.add_slab(256)
    seen = set()
    for _ in range(10):
        extent = allocated(arena, 256)
        seen.add(extent.generation)
        arena.free(extent)
    assert len(seen) == 10


def test_freeing_twice_is_an_assertion_failure() -> None:
    arena = arena_of(256)
    extent = allocated(arena, 256)
    arena.free(extent)
    with pytest.raises(AssertionError, match="freed twice"):
        arena.free(extent)
    again = allocated(arena, 256)
    with pytest.raises(AssertionError, match="freed twice"):
        arena.free(extent)
    arena.free(again)
    whole(arena.checks())


def test_a_foreign_extent_is_an_assertion_failure() -> None:
    arena = arena_of(512)
    allocated(arena, 256)
    with pytest.raises(AssertionError, match="foreign"):
        arena.free(Extent(slab_id=1, offset=0, length=512, generation=1))
    with pytest.raises(AssertionError, match="foreign"):
        arena.turn(Extent(slab_id=2, offset=0, length=256, generation=1), State.USED)


def test_states_have_one_direction() -> None:
    arena = arena_of(512)
    used, quarantined = allocated(arena, 256), allocated(arena, 256)
    arena.turn(used, State.USED)
    arena.turn(quarantined, State.QUARANTINED)
    for extent, state in itertools.product((used, quarantined), State):
        with pytest.raises(AssertionError):
            arena.turn(extent, state)
    whole(arena.checks())


@pytest.mark.parametrize("length", [0, -256, 100])
def test_only_aligned_lengths_are_allocated(length: int) -> None:
    with pytest.raises(AssertionError):
        arena_of(1024).allocate(length)


def test_what_could_be_held_depends_on_what_stays() -> None:
    arena = arena_of(1024)
    extents = [allocated(arena, 256) for _ in range(4)]
    for extent in extents:
        arena.turn(extent, State.USED)
    assert arena.could_hold([1024], staying=[])
    assert arena.could_hold([512, 256], staying=[extents[2]])
    assert not arena.could_hold([512, 512], staying=[extents[2]])
    # Half of the bytes are free then, but they do not lie together.
    assert not arena.could_hold([512], staying=[extents[0], extents[2]])
    assert arena.could_hold([256, 256], staying=[extents[0], extents[2]])


def test_what_is_being_written_always_stays() -> None:
    arena = arena_of(512)
    reserved, lapsed = allocated(arena, 256), allocated(arena, 256)
    arena.turn(lapsed, State.QUARANTINED)
    assert not arena.could_hold([256], staying=[])
    arena.free(reserved)
    assert arena.could_hold([256], staying=[])


def test_a_shorter_last_extent_fits_into_a_remainder() -> None:
    arena = arena_of(1280)
    assert arena.could_hold([512, 512, 256], staying=[])
    assert not arena.could_hold([512, 512, 512], staying=[])


def test_check_notices_lost_bytes() -> None:
    arena = arena_of(512)
    extent = allocated(arena, 256)
    arena.turn(extent, State.USED)
    arena.bytes_slabs -= 256
    with pytest.raises(AssertionError):
        whole(arena.checks())
