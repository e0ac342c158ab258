"""What a session reads, holds and writes. Room and refusals are in test_store_limits.py."""

import itertools
from collections.abc import Callable

import pytest

from cachestore.store import MatchKind, RefusalCode, Refused, Reservation, Store, Target
from tests.support.stores import (
    NAMESPACE,
    OTHER_NAMESPACE,
    Bench,
    packed,
    record_sizes,
    tiny_config,
)


@pytest.fixture
def bench() -> Bench:
    return Bench(Store(tiny_config(), new_id=itertools.count(1).__next__))


def test_what_was_committed_is_found_row_by_row(bench: Bench) -> None:
    reservation = bench.reserve(range(10))
    assert reservation.have == 0
    assert [(p.first_token, p.rows) for p in reservation.pieces] == [(0, 4), (4, 4), (8, 2)]
    assert bench.commit(reservation) == 10
    match = bench.lookup(range(10))
    assert (match.kind, match.rows) == (MatchKind.EXACT, 10)
    assert [span.extent for span in match.spans] == [p.extent for p in reservation.pieces]
    assert [span.record_bytes for span in match.spans] == record_sizes(reservation.pieces)
    assert [(span.first_row, span.rows) for span in match.spans] == [(0, 4), (0, 4), (0, 2)]
    bench.store.check()


def test_a_long_sequence_takes_several_reservations(bench: Bench) -> None:
    first = bench.reserve(range(30))
    assert [(p.first_token, p.rows) for p in first.pieces] == [(0, 4), (4, 4), (8, 4), (12, 4)]
    assert (first.end, bench.commit(first)) == (16, 16)
    match = bench.lookup(range(30))
    # No sequence ends there.
    assert (match.kind, match.rows) == (MatchKind.LCP, 16)
    assert bench.store.statistics(0.0).sequences == 0
    rest = bench.reserve(range(30))
    assert (rest.have, rest.end, bench.commit(rest)) == (16, 30, 14)
    assert bench.lookup(range(30)).kind == MatchKind.EXACT


def test_nothing_is_found_before_the_commit(bench: Bench) -> None:
    bench.reserve(range(10))
    assert bench.lookup(range(10)).kind == MatchKind.MISS


def test_the_kind_is_judged_on_the_whole_request_whatever_the_limit(bench: Bench) -> None:
    bench.write(range(10))
    match = bench.lookup(range(10), limit=9)
    assert (match.kind, match.rows) == (MatchKind.EXACT, 9)
    assert bench.lookup([*range(10), 77], limit=3).kind == MatchKind.PREFIX
    assert bench.lookup(range(7), limit=6).kind == MatchKind.SUPERSEQUENCE


def test_no_row_served_is_a_miss_without_a_lease(bench: Bench) -> None:
    bench.write(range(10))
    match = bench.lookup(range(10), limit=0)
    assert (match.kind, match.rows, match.spans, match.lease_id) == (MatchKind.MISS, 0, (), 0)
    assert bench.lookup(range(10), namespace=OTHER_NAMESPACE).kind == MatchKind.MISS
    assert bench.store.statistics(0.0).leases == 0


def test_the_next_turn_stores_only_its_own_rows(bench: Bench) -> None:
    bench.write(range(6))
    reservation = bench.reserve(range(11))
    assert reservation.have == 6
    assert [(p.first_token, p.rows) for p in reservation.pieces] == [(6, 4), (10, 1)]
    assert bench.commit(reservation) == 5
    assert bench.store.statistics(0.0).tokens == 11


def test_a_write_of_what_is_held_marks_only_where_it_ends(bench: Bench) -> None:
    bench.write(range(10))
    reservation = bench.reserve(range(7))
    assert (reservation.have, reservation.pieces) == (7, ())
    assert bench.commit(reservation) == 0
    assert bench.lookup(range(7)).kind == MatchKind.EXACT
    assert bench.store.statistics(0.0).sequences == 2
    bench.store.check()


@pytest.mark.parametrize("shared", range(11))
def test_two_writers_of_overlapping_rows_do_not_wait_for_each_other(shared: int) -> None:
    bench = Bench(Store(tiny_config(slabs=8)))
    first = list(range(10))
    second = first[:shared] + list(range(100, 114 - shared))
    early, late = bench.reserve(first), bench.reserve(second)
    assert bench.commit(early) == 10
    assert bench.commit(late) == 14 - shared
    match = bench.lookup(second)
    assert (match.kind, match.rows) == (MatchKind.EXACT, 14)
    # Rows [0, shared) are the first writer's; the second one's begin inside a record of its own.
    rows = [(s.extent, s.first_row + i) for s in match.spans for i in range(s.rows)]
    for position, (extent, row) in enumerate(rows):
        pieces = (early if position < shared else late).pieces
        owner = next(p for p in pieces if p.first_token <= position < p.first_token + p.rows)
        assert (extent, row) == (owner.extent, position - owner.first_token)
    writes = bench.store.statistics(0.0).writes
    assert (writes.rows_inserted, writes.rows_duplicate) == (24 - shared, shared)
    bench.store.check()


def test_extents_that_turn_out_duplicate_are_free_again(bench: Bench) -> None:
    early, late = bench.reserve(range(8)), bench.reserve(range(8))
    bench.commit(early)
    used = bench.store.statistics(0.0).bytes_used
    assert bench.commit(late) == 0
    statistics = bench.store.statistics(0.0)
    assert (statistics.bytes_used, statistics.bytes_reserved) == (used, 0)
    assert statistics.records == 2


def test_bytes_that_serve_nobody_are_counted(bench: Bench) -> None:
    slow = bench.reserve(range(7))  # records of 4 and 3 rows, in 256 bytes each
    bench.write(range(5))
    assert bench.store.statistics(0.0).bytes_padding == 3 * 56
    bench.commit(slow)  # of rows 4 to 6 the first one is held already
    found = bench.store.statistics(0.0)
    assert found.bytes_padding == 3 * 56 + 56
    assert found.bytes_stranded == (32 + 3 * 56) // 3
    bench.store.flush()
    found = bench.store.statistics(0.0)
    assert (found.bytes_padding, found.bytes_stranded) == (0, 0)


def test_a_lease_ends_at_its_deadline_unless_renewed(bench: Bench) -> None:
    bench.write(range(4))
    lease = bench.lookup(range(4)).lease_id
    assert bench.store.renew(bench.session, [lease, 999], 29.0) == [True, False]
    assert bench.store.renew(bench.session, [lease], 58.9) == [True]
    assert bench.store.renew(bench.session, [lease], 88.9) == [False]
    assert bench.store.statistics(88.9).leases == 0
    bench.store.check()


def test_a_leased_record_outlives_a_flush_and_a_full_store(bench: Bench) -> None:
    bench.write(range(8))
    match = bench.lookup(range(8), limit=3)
    # Only the record that serves rows is leased; the one behind it may go.
    assert bench.store.flush() == 1
    assert bench.peek(range(8)) == 4
    for first in range(100, 140):
        bench.write([first])
    assert bench.peek(range(8)) == 4
    bench.store.release(bench.session, [match.lease_id, 999], bench.now)
    assert bench.store.flush() > 0
    assert bench.peek(range(8)) == 0
    bench.store.check()


def test_sessions_do_not_see_each_other(bench: Bench) -> None:
    other = bench.store.open_session(counted=True)
    bench.write(range(4))
    lease, reservation = bench.lookup(range(4)).lease_id, bench.reserve(range(20))
    assert bench.store.renew(other, [lease], 0.0) == [False]
    bench.store.release(other, [lease], 0.0)
    bench.store.abort(other, reservation.id, 0.0)
    with pytest.raises(Refused, match="reservation_id") as refusal:
        bench.commit(reservation, session=other)
    assert refusal.value.code is RefusalCode.FAILED_PRECONDITION
    statistics = bench.store.statistics(0.0)
    assert (statistics.leases, statistics.reservations) == (1, 1)


def test_the_end_of_a_session_ends_all_that_it_held(bench: Bench) -> None:
    other = bench.store.open_session(counted=False)
    bench.write(range(4))
    bench.reserve(range(100, 104), session=other)
    bench.now = 30.0
    bench.reserve(range(200, 204), session=other)
    bench.lookup(range(4), session=other)
    before = bench.store.statistics(bench.now)
    assert (before.bytes_quarantined, before.bytes_reserved, before.leases) == (256, 256, 1)
    assert before.sessions == 1, "a session that is not counted does not show"
    bench.store.close_session(other, bench.now)
    after = bench.store.statistics(bench.now)
    assert (after.bytes_quarantined, after.bytes_reserved, after.leases) == (0, 0, 0)
    assert after.writes.dropped == 2
    assert bench.store.flush() == 1, "nothing stays pinned"
    bench.store.check()


def test_aborted_extents_are_free_at_once(bench: Bench) -> None:
    reservation = bench.reserve(range(8))
    bench.store.abort(bench.session, reservation.id, bench.now)
    bench.store.abort(bench.session, reservation.id, bench.now)
    statistics = bench.store.statistics(bench.now)
    assert statistics.bytes_free == statistics.bytes_slabs > 0
    assert statistics.writes.dropped == 1


def commit(bench: Bench, reservation: Reservation) -> None:
    with pytest.raises(Refused, match="lapsed"):
        bench.commit(reservation)


def abort(bench: Bench, reservation: Reservation) -> None:
    bench.store.abort(bench.session, reservation.id, bench.now)


@pytest.mark.parametrize("word_of_the_writer", [commit, abort])
def test_a_lapsed_write_is_quarantined_until_its_writer_has_stopped(
    bench: Bench, word_of_the_writer: Callable[[Bench, Reservation], None]
) -> None:
    reservation = bench.reserve(range(8))
    bench.now = 29.9
    assert bench.store.statistics(bench.now).bytes_reserved == 512
    bench.now = 30.0
    lapsed = bench.store.statistics(bench.now)
    assert (lapsed.bytes_reserved, lapsed.bytes_quarantined, lapsed.reservations) == (0, 512, 0)
    bench.store.check()
    word_of_the_writer(bench, reservation)
    ended = bench.store.statistics(bench.now)
    assert (ended.bytes_quarantined, ended.bytes_free) == (0, ended.bytes_slabs)
    assert ended.writes.dropped == 1, "counted once, when it lapsed"
    assert bench.lookup(range(8)).kind == MatchKind.MISS
    bench.store.check()


def test_a_reservation_pins_what_it_extends(bench: Bench) -> None:
    bench.write(range(4))
    reservation = bench.reserve(range(8))
    assert bench.store.flush() == 0
    assert bench.commit(reservation) == 4
    assert bench.peek(range(8)) == 8
    assert bench.store.flush() == 2


def test_namespaces_are_apart_and_vanish_with_their_last_record(bench: Bench) -> None:
    bench.write(range(6))
    bench.write(range(5), OTHER_NAMESPACE)
    first, second = bench.store.statistics(0.0).namespaces
    assert (first.namespace, first.label) == (NAMESPACE, "a model")
    assert (first.tokens, first.records, first.sequences, first.bytes_used) == (6, 2, 1, 512)
    assert (second.namespace, second.tokens) == (OTHER_NAMESPACE, 5)
    bench.lookup(range(5), namespace=OTHER_NAMESPACE)
    bench.store.flush()
    assert [n.namespace for n in bench.store.statistics(0.0).namespaces] == [OTHER_NAMESPACE]


def test_the_label_is_kept_from_the_first_write(bench: Bench) -> None:
    for label, ids in (("first", [1]), ("second", [2])):
        bench.reserve(ids, namespace=OTHER_NAMESPACE)  # makes sure of a slab
        target = Target(NAMESPACE, packed(ids), 0, 32, 56, label)
        reservation = bench.store.reserve(bench.session, target, bench.now)
        bench.commit(reservation)
    assert [n.label for n in bench.store.statistics(0.0).namespaces] == ["first"]


def test_lookups_are_counted_by_kind_and_in_tokens(bench: Bench) -> None:
    bench.write([1, 2, 3, 4])
    for asked in ([1, 2, 3, 4], [1, 2], [1, 2, 3, 4, 5], [1, 9], [9]):
        bench.lookup(asked)
    lookups = bench.store.statistics(0.0).lookups
    assert (lookups.exact, lookups.supersequence, lookups.prefix) == (1, 1, 1)
    assert (lookups.lcp, lookups.miss) == (1, 1)
    assert (lookups.tokens_requested, lookups.tokens_served) == (14, 4 + 2 + 4 + 1)
