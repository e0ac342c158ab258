"""Checkpoints in the store: what is served, written together, evicted, bounded and refused."""

from typing import Any

import pytest

from cachestore.store import (
    Match,
    MatchKind,
    NeedSlab,
    NewCheckpoint,
    Query,
    RefusalCode,
    Refused,
    Sizes,
    Store,
    Target,
)
from tests.support.stores import NAMESPACE, OTHER_NAMESPACE, Bench, packed, tiny_config

# Rows take 256 bytes for four of them, checkpoints 512.
ROOMY = tiny_config(slabs=8, slab_bytes=4096)


@pytest.fixture
def bench() -> Bench:
    return Bench(Store(ROOMY))


def end(bench: Bench, match: Match) -> None:
    bench.store.release(bench.session, [match.lease_id], bench.now)


def test_rows_are_served_up_to_the_deepest_checkpoint(bench: Bench) -> None:
    bench.write(range(10), checkpoints=[3, 7])
    match = bench.lookup(range(12), limit=11, checkpoints=[])
    assert (match.kind, match.rows) == (MatchKind.PREFIX, 7)
    assert [span.rows for span in match.spans] == [4, 3]
    assert match.checkpoint is not None
    assert match.checkpoint.record_bytes == 300
    assert bench.lookup(range(10), limit=6, checkpoints=[]).rows == 3
    assert bench.lookup([*range(7), 99], checkpoints=[]).rows == 7
    assert bench.lookup([*range(6), 99], checkpoints=[]).rows == 3
    bench.store.check()


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_rows_without_a_checkpoint_are_a_miss(bench: Bench, limit: int) -> None:
    bench.write(range(10), checkpoints=[3])
    match = bench.lookup(range(10), limit, checkpoints=[])
    assert (match.kind, match.rows, match.spans) == (MatchKind.MISS, 0, ())
    assert (match.checkpoint, match.lease_id) == (None, 0)
    assert bench.store.statistics(0.0).lookups.tokens_served == 0


def test_nothing_is_there_before_the_commit_and_all_of_it_after(bench: Bench) -> None:
    reservation = bench.reserve(range(10), checkpoints=[4, 10])
    assert [staged.position for staged in reservation.checkpoints] == [4, 10]
    assert bench.peek(range(10), checkpoints=[]) == 0
    inserted = bench.commit_all(reservation)
    assert (inserted.rows, inserted.checkpoints) == (10, 2)
    assert bench.peek(range(10), checkpoints=[]) == 10
    found = bench.store.statistics(0.0)
    (namespace,) = found.namespaces
    assert (namespace.checkpointed, namespace.checkpoints) == (True, 2)
    assert (found.checkpoints, found.bytes_checkpoints, found.bytes_used) == (2, 1024, 1792)
    assert found.writes.checkpoints_inserted == 2


def test_an_aborted_write_leaves_neither(bench: Bench) -> None:
    reservation = bench.reserve(range(10), checkpoints=[4, 10])
    bench.store.abort(bench.session, reservation.id, bench.now)
    found = bench.store.statistics(0.0)
    assert (found.bytes_used, found.bytes_reserved, found.checkpoints) == (0, 0, 0)
    bench.store.check()


def test_a_lapsed_write_sets_its_checkpoints_aside_too(bench: Bench) -> None:
    reservation = bench.reserve(range(4), checkpoints=[4])
    bench.now = 30.0
    found = bench.store.statistics(bench.now)
    assert (found.bytes_reserved, found.bytes_quarantined) == (0, 256 + 512)
    bench.store.check()
    with pytest.raises(Refused, match="lapsed"):
        bench.commit(reservation)
    found = bench.store.statistics(bench.now)
    assert (found.bytes_quarantined, found.bytes_free) == (0, found.bytes_slabs)


def test_only_what_is_missing_is_staged(bench: Bench) -> None:
    bench.write(range(10), checkpoints=[4, 8])
    again = bench.reserve(range(10), checkpoints=[2, 4, 8, 10])
    assert (again.have, again.pieces) == (10, ())
    assert [staged.position for staged in again.checkpoints] == [2, 10]
    assert bench.commit_all(again).checkpoints == 2
    assert bench.peek(range(10), checkpoints=[]) == 10
    longer = bench.reserve(range(12), checkpoints=[10, 11])
    assert [staged.position for staged in longer.checkpoints] == [11]


def test_a_long_write_takes_its_checkpoints_along_piece_by_piece(bench: Bench) -> None:
    positions = [3, 15, 16, 17, 30]
    first = bench.reserve(range(30), checkpoints=positions)
    assert first.end == 16
    assert [staged.position for staged in first.checkpoints] == [3, 15, 16]
    bench.commit(first)
    rest = bench.reserve(range(30), checkpoints=positions)
    assert [staged.position for staged in rest.checkpoints] == [17, 30]
    bench.commit(rest)
    assert [bench.peek(range(n), checkpoints=[]) for n in (14, 17, 30)] == [3, 17, 30]


def test_a_checkpoint_that_another_writer_committed_meanwhile_is_freed(bench: Bench) -> None:
    early = bench.reserve(range(6), checkpoints=[4, 6])
    late = bench.reserve([*range(5), 77], checkpoints=[4, 6])
    assert bench.commit_all(early).checkpoints == 2
    inserted = bench.commit_all(late)
    assert (inserted.rows, inserted.checkpoints) == (1, 1)
    found = bench.store.statistics(0.0)
    assert (found.checkpoints, found.writes.checkpoints_duplicate) == (3, 1)
    assert found.bytes_reserved == 0
    assert bench.peek([*range(5), 77], checkpoints=[]) == 6
    bench.store.check()


def test_a_served_checkpoint_stays_as_long_as_its_lease(bench: Bench) -> None:
    bench.write(range(10), checkpoints=[4, 10])
    match = bench.lookup(range(10), limit=4, checkpoints=[])
    catalog = bench.store.catalog(0.0)
    gone = catalog.evict(catalog.everything())
    # The one at 10 goes, and with it the rows that only it made useful.
    assert (gone.records, gone.checkpoints, gone.kept) == (2, 1, 2)
    assert bench.peek(range(10), checkpoints=[]) == 4
    end(bench, match)
    assert bench.store.flush() == 1
    assert bench.store.statistics(0.0).bytes_used == 0


def test_a_pinned_record_keeps_the_checkpoints_on_its_way(bench: Bench) -> None:
    bench.write(range(8), checkpoints=[2, 6])
    bench.write([*range(3), 90], checkpoints=[4])
    record_id = bench.lookup(range(8), checkpoints=[]).spans[1].record_id
    bench.store.close_session(bench.session, 0.0)
    bench.session = bench.store.open_session(counted=True)
    catalog = bench.store.catalog(0.0)
    kept = catalog.pin(record_id)
    assert [checkpoint.position for checkpoint in kept.checkpoints] == [2, 6]
    bench.store.flush()
    assert bench.peek(range(8), checkpoints=[]) == 6
    assert bench.peek([*range(3), 90], checkpoints=[]) == 2
    bench.store.check()
    catalog.unpin(record_id)
    assert bench.store.flush() == 2
    assert bench.store.statistics(0.0).checkpoints == 0


def test_entries_show_checkpoints_as_records_of_their_last_row(bench: Bench) -> None:
    bench.write(range(6), checkpoints=[3, 6])
    catalog = bench.store.catalog(2.0)
    entries = catalog.entries(NAMESPACE, 0, 100, 2.0)
    found = [(e.span.record_id, e.parent_id, e.first_token, e.checkpoint) for e in entries]
    assert found == [(1, 0, 0, 0), (2, 1, 4, 0), (3, 1, 2, 3), (4, 2, 5, 6)]
    assert sum(e.span.extent.length for e in entries) == bench.store.statistics(0.0).bytes_used
    gone = catalog.evict(catalog.behind(4))
    # The row behind position 4 is of no use to anybody then.
    assert (gone.records, gone.checkpoints, gone.bytes) == (1, 1, 768)
    assert bench.peek(range(6), checkpoints=[]) == 3
    assert catalog.evict(catalog.behind(1)).checkpoints == 1
    assert bench.store.statistics(0.0).bytes_used == 0


def test_moved_checkpoints_are_found_where_they_are_now() -> None:
    bench = Bench(Store(tiny_config(slabs=1, slab_bytes=4 * (2 * 512 + 256 + 256))))
    for first in range(4):
        bench.write([first, 9], checkpoints=[1, 2])
        for limit in (1, 2):
            match = bench.lookup([first, 9], limit, checkpoints=[])
            assert match.checkpoint is not None
            bench.memory(match.checkpoint.extent)[:] = bytes([10 * first + limit]) * 512
            end(bench, match)
        bench.write([first], OTHER_NAMESPACE)
    catalog = bench.store.catalog(0.0)
    # Four holes that are too small for a checkpoint.
    assert catalog.evict(catalog.everything(OTHER_NAMESPACE)).records == 4
    while bench.store.compact(bench.move):
        bench.store.check()
    assert bench.store.statistics(0.0).bytes_moved > 2 * 512
    for first in range(4):
        for limit in (1, 2):
            match = bench.lookup([first, 9], limit, checkpoints=[])
            assert match.checkpoint is not None
            expected = bytes([10 * first + limit]) * 512
            assert bytes(bench.memory(match.checkpoint.extent)) == expected


def target(**changes: Any) -> Target:
    fields: dict[str, Any] = {"checkpointed": True, **changes}
    return Target(NAMESPACE, packed(range(4)), 0, 32, 56, "", **fields)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        *(
            ("checkpoints", {"checkpoints": tuple(NewCheckpoint(at, 1) for at in positions)})
            for positions in ([0], [5], [2, 1], [2, 2], [1, 2, 3, 2**31])
        ),
        ("checkpoints", {"checkpoints": (NewCheckpoint(1, 0),)}),
        ("checkpoints", {"checkpoints": (NewCheckpoint(1, 1),), "checkpointed": False}),
        ("conversation_start", {"conversation_start": 5}),
        ("conversation_start", {"conversation_start": -1}),
    ],
)
def test_a_bad_field_of_reserve_is_named(bench: Bench, field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(Refused, match=rf"^{field}") as refusal:
        bench.store.reserve(bench.session, target(**changes), 0.0)
    assert refusal.value.code is RefusalCode.INVALID_ARGUMENT
    bench.store.check()


def test_more_than_64_at_once_are_refused(bench: Bench) -> None:
    for count, accepted in ((64, True), (65, False)):
        positions = tuple(range(1, count + 1))
        query = Query(NAMESPACE, packed(range(100)), 99, True, True, positions)
        if accepted:
            assert bench.store.lookup(bench.session, query, 0.0).lease_id
        else:
            with pytest.raises(Refused, match=r"^checkpoints has 65"):
                bench.store.lookup(bench.session, query, 0.0)


def test_a_checkpoint_larger_than_a_slab_gets_a_larger_one(bench: Bench) -> None:
    asked = target(checkpoints=(NewCheckpoint(4, 4097),))
    with pytest.raises(NeedSlab) as need:
        bench.store.reserve(bench.session, asked, 0.0)
    assert need.value.bytes == 2 * 4096
    bench.store.add_slab(need.value.bytes)
    (staged,) = bench.store.reserve(bench.session, asked, 0.0).checkpoints
    assert staged.extent.length == 4096 + 256
    bench.store.check()


def test_a_checkpoint_larger_than_the_slabs_of_a_full_store_evicts_nothing(bench: Bench) -> None:
    bench.write(range(8 * 4 * 16), OTHER_NAMESPACE)
    assert bench.store.statistics(0.0).bytes_free == 0
    with pytest.raises(Refused) as refusal:
        bench.store.reserve(bench.session, target(checkpoints=(NewCheckpoint(4, 4097),)), 0.0)
    assert refusal.value.code is RefusalCode.RESOURCE_EXHAUSTED
    assert bench.store.statistics(0.0).evictions == 0
    bench.store.check()


def test_a_checkpoint_larger_than_the_budget_is_refused(bench: Bench) -> None:
    with pytest.raises(Refused, match="--budget") as refusal:
        bench.store.reserve(bench.session, target(checkpoints=(NewCheckpoint(4, 2**63),)), 0.0)
    assert refusal.value.code is RefusalCode.RESOURCE_EXHAUSTED
    assert bench.store.statistics(0.0).writes.refused == 1
    bench.store.check()


def test_checkpoints_count_for_what_fits_the_budget() -> None:
    bench = Bench(Store(tiny_config(slabs=1, slab_bytes=1024)))
    bench.write([7])
    with pytest.raises(Refused, match="--budget"):
        bench.reserve(range(8), OTHER_NAMESPACE, checkpoints=[4, 8])
    assert bench.store.statistics(0.0).evictions == 0
    assert bench.write(range(8), OTHER_NAMESPACE, checkpoints=[8]) == 8


@pytest.mark.parametrize("sizes", [[], [512], [512, 0], [513, 512], [1, 1, 1]])
def test_bad_checkpoint_bytes_leave_the_reservation_open(bench: Bench, sizes: list[int]) -> None:
    reservation = bench.reserve(range(4), checkpoints=[2, 4])
    with pytest.raises(Refused, match=r"^checkpoint_bytes") as refusal:
        bench.store.commit(bench.session, reservation.id, Sizes([256], sizes), 0.0)
    assert refusal.value.code is RefusalCode.INVALID_ARGUMENT
    assert bench.commit(reservation) == 4


def test_the_kind_of_a_namespace_is_fixed_while_anything_is_held_or_staged(bench: Bench) -> None:
    staged = bench.reserve(range(4), checkpoints=[4])
    with pytest.raises(Refused, match=r"^checkpointed is False") as refusal:
        bench.reserve(range(100, 104))
    assert refusal.value.code is RefusalCode.FAILED_PRECONDITION
    bench.commit(staged)
    for call in (lambda: bench.reserve([9]), lambda: bench.lookup([9]), lambda: bench.peek([9])):
        with pytest.raises(Refused, match=r"^checkpointed is False"):
            call()
    assert bench.store.statistics(0.0).writes.refused == 0, "it would have fit"
    bench.write([9], OTHER_NAMESPACE)
    with pytest.raises(Refused, match=r"^checkpointed is True"):
        bench.lookup([9], namespace=OTHER_NAMESPACE, checkpoints=[])
    bench.store.flush()
    assert bench.write(range(4)) == 4, "what is gone is forgotten"
