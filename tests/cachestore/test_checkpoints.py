"""Where checkpoints are found, and which ones a conversation keeps: pure functions of a tree."""

from collections.abc import Sequence

import pytest

from cachestore.checkpoints import (
    BRANCH_IDLE_SECONDS,
    Group,
    beneath,
    bounded,
    deepest,
    surplus,
)
from cachestore.extent import Extent
from cachestore.node import Checkpoint, Span
from cachestore.tree import Tree, Walk, along
from tests.support.stores import NAMESPACE, packed
from tests.support.whole import whole

RECORD_TOKENS = 4


class Grown:
    """A checkpointed tree. Records of four rows; each checkpoint is more recent than the last."""

    def __init__(self) -> None:
        self.tree = Tree(NAMESPACE, checkpointed=True)
        self.last_id = 0

    def span(self, rows: int) -> Span:
        self.last_id += 1
        extent = Extent(1, 256 * self.last_id, 256, self.last_id)
        return Span(self.last_id, extent, record_bytes=200, first_row=0, rows=rows)

    def walk(self, ids: Sequence[int]) -> Walk:
        return self.tree.walk(packed(ids))

    def add(self, ids: Sequence[int], *positions: int) -> list[Checkpoint]:
        walk = self.walk(ids)
        end, offset = walk.end, walk.offset
        for start in range(walk.depth, len(ids), RECORD_TOKENS):
            run = ids[start : start + RECORD_TOKENS]
            end = self.tree.insert(end, offset, packed(run), self.span(len(run)))
            offset = end.rows
        walk = self.walk(ids)
        added = [self.tree.attach(*walk.place(at), self.span(1)) for at in positions]
        for checkpoint in added:
            checkpoint.last_used = checkpoint.id
        whole(self.tree.checks())
        return added


@pytest.fixture
def grown() -> Grown:
    return Grown()


def positions(checkpoints: Sequence[Checkpoint]) -> list[int]:
    return [checkpoint.position for checkpoint in checkpoints]


def found(walk: Walk, limit: int) -> int:
    checkpoint = walk.checkpoint(limit)
    return 0 if checkpoint is None else checkpoint.position


@pytest.mark.parametrize("at", range(1, 11))
def test_a_checkpoint_is_found_from_its_position_on(grown: Grown, at: int) -> None:
    (added,) = grown.add(range(10), at)
    assert (added.position, added.record.start + added.offset) == (at, at)
    walk = grown.walk(range(10))
    assert [found(walk, limit) for limit in range(11)] == [0] * at + [at] * (11 - at)
    # Tokens that part right before its position do not lead to it, those right behind do.
    assert grown.walk([*range(at - 1), 77]).checkpoint(at) is None
    assert grown.walk([*range(at), 77]).checkpoint(at + 1) is added


def test_the_deepest_one_is_found_within_what_agrees(grown: Grown) -> None:
    grown.add(range(12), 2, 3, 7, 8, 11)
    walk = grown.walk([*range(9), 77])
    assert positions(walk.checkpoints()) == [2, 3, 7, 8]
    assert [found(walk, limit) for limit in range(10)] == [0, 0, 2, 3, 3, 3, 3, 7, 8, 8]


def test_those_of_a_branch_are_not_on_the_other(grown: Grown) -> None:
    (shared, own) = grown.add([0, 1, 2, 3], 2, 4)
    (other,) = grown.add([0, 1, 2, 9], 4)
    walk = grown.walk([0, 1, 2, 9])
    assert walk.checkpoints() == [shared, other]
    assert grown.walk([0, 1, 2, 3]).checkpoints() == [shared, own]
    assert along(walk.path, 1) == [shared, other]
    assert along((), 0) == []


def test_place_is_the_last_row_before_the_position(grown: Grown) -> None:
    grown.add(range(8))
    grown.add([0, 1, 2, 3, 4, 5, 90, 91])
    walk = grown.walk([0, 1, 2, 3, 4, 5, 90, 91])
    first, second, branch = walk.path
    places = [walk.place(position) for position in range(1, 9)]
    assert places == [
        *((first, offset) for offset in (1, 2, 3, 4)),
        *((second, offset) for offset in (1, 2)),
        *((branch, offset) for offset in (1, 2)),
    ]
    for outside in (0, 9):
        with pytest.raises(AssertionError):
            walk.place(outside)


def test_no_two_are_at_one_position_and_none_is_where_rows_need_none(grown: Grown) -> None:
    (checkpoint,) = grown.add(range(4), 4)
    with pytest.raises(AssertionError):
        grown.tree.attach(checkpoint.record, 4, grown.span(1))
    with pytest.raises(AssertionError):
        grown.tree.attach(checkpoint.record, 5, grown.span(1))
    grown.tree.detach(checkpoint)
    assert grown.tree.checkpoints == 0
    plain = Tree(NAMESPACE)
    record = plain.insert(plain.walk(b"").end, 0, packed(range(4)), grown.span(4))
    with pytest.raises(AssertionError):
        plain.attach(record, 4, grown.span(1))


def test_a_record_with_a_checkpoint_is_not_removed(grown: Grown) -> None:
    (checkpoint,) = grown.add(range(4), 2)
    with pytest.raises(AssertionError):
        grown.tree.remove(checkpoint.record)
    checkpoint.pins = 1
    with pytest.raises(AssertionError):
        grown.tree.detach(checkpoint)
    checkpoint.pins = 0
    grown.tree.detach(checkpoint)
    assert grown.tree.remove(checkpoint.record) is None


def test_check_notices_a_lost_checkpoint(grown: Grown) -> None:
    (checkpoint,) = grown.add(range(4), 2)
    checkpoint.offset = 3
    with pytest.raises(AssertionError):
        whole(grown.tree.checks())
    checkpoint.offset = 2
    whole(grown.tree.checks())
    grown.tree.checkpoints = 2
    with pytest.raises(AssertionError):
        whole(grown.tree.checks())


def test_beneath_a_position_are_all_branches_that_leave_there_or_later(grown: Grown) -> None:
    trunk = grown.add(range(8), 2, 3, 5, 8)
    before = grown.add([0, 1, 80, 81], 4)
    there = grown.add([0, 1, 2, 90, 91], 4, 5)
    later = grown.add([0, 1, 2, 3, 4, 5, 95], 7)
    walk = grown.walk(range(8))
    assert set(beneath(*walk.place(3))) == {*trunk[2:], *there, *later}
    assert set(beneath(*walk.place(2))) == {*trunk[1:], *before, *there, *later}
    assert set(beneath(*walk.place(8))) == set()


def test_without_a_known_beginning_the_path_is_bounded_but_for_its_first(grown: Grown) -> None:
    first, *others = grown.add(range(12), 2, 5, 8, 12)
    grown.add([0, 1, 2, 90], 4)
    assert bounded(grown.walk(range(12)), 0) == [Group(others)]
    assert first not in others


def test_what_is_shared_and_what_is_its_own_are_bounded_apart(grown: Grown) -> None:
    path = grown.add(range(12), 2, 4, 6, 8, 12)
    abandoned = grown.add([*range(7), 90, 91], 8, 9)
    others = grown.add([0, 1, 2, 3, 80, 81, 82], 7)
    shared, own, branches = bounded(grown.walk(range(12)), 6)
    assert (shared, own) == (Group(path[1:3]), Group(path[3:]))
    assert (set(branches.checkpoints), branches.idle_seconds) == ({*abandoned}, BRANCH_IDLE_SECONDS)
    assert not set(branches.checkpoints) & set(others)


def test_a_conversation_may_begin_before_the_first_one(grown: Grown) -> None:
    path = grown.add(range(8), 6, 8)
    assert bounded(grown.walk(range(8)), 3)[:2] == [Group([]), Group(path)]


def test_the_least_recently_used_are_too_many(grown: Grown) -> None:
    one, two, three, four = grown.add(range(12), 2, 5, 8, 12)
    one.last_used = 100
    everything = Group([one, two, three, four])
    assert surplus(everything, 4, staying=(), now=0.0) == []
    assert surplus(everything, 3, staying=(), now=0.0) == [two]
    assert surplus(everything, 2, staying=(), now=0.0) == [two, three]
    assert surplus(everything, 2, staying=(two,), now=0.0) == [three, four]
    assert surplus(everything, 1, staying=everything.checkpoints, now=0.0) == []


def test_pinned_ones_do_not_push_out_others(grown: Grown) -> None:
    one, two, three, four = grown.add(range(12), 2, 5, 8, 12)
    one.pins = two.pins = 1
    everything = Group([one, two, three, four])
    assert surplus(everything, 2, staying=(), now=0.0) == []
    assert surplus(everything, 1, staying=(), now=0.0) == [three]
    assert surplus(everything, 1, staying=(three,), now=0.0) == [four]


def test_what_was_used_a_moment_ago_on_a_branch_stays_and_does_not_count(grown: Grown) -> None:
    checkpoints = grown.add(range(12), 2, 5, 8, 12)
    for at, checkpoint in enumerate(checkpoints):
        checkpoint.used_at = 10.0 * at
    branches = Group(checkpoints, idle_seconds=60.0)
    gone = [surplus(branches, 1, staying=(), now=now) for now in (59.0, 60.0, 70.0, 89.9, 90.0)]
    one, two, three, _ = checkpoints
    assert gone == [[], [], [one], [one, two], [one, two, three]]


@pytest.mark.parametrize(
    ("end", "expected"), [(0, 0), (2, 0), (3, 3), (6, 3), (7, 7), (9, 9), (100, 9)]
)
def test_the_deepest_position(end: int, expected: int) -> None:
    assert deepest((3, 7, 9), end) == expected
    assert deepest((), end) == 0
