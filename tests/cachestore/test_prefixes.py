"""Which prefixes serve most, and sequences that are kept whole."""

from collections.abc import Sequence

import pytest

from cachestore.catalog import busiest
from cachestore.client import StoreRefused
from cachestore.node import Checkpoint
from cachestore.store import RefusalCode, Refused, Store
from tests.support import entries
from tests.support.daemons import Cachestore
from tests.support.stores import NAMESPACE, OTHER_NAMESPACE, Bench, packed, tiny_config

LEFT, RIGHT = [*range(8)], [*range(4), *range(100, 104)]


@pytest.fixture
def bench() -> Bench:
    return Bench(Store(tiny_config(slabs=16)))


def asked(bench: Bench, ids: Sequence[int], times: int) -> None:
    for _ in range(times):
        assert bench.peek(ids) == len(ids)


def test_a_prefix_ends_where_fewer_go_on(bench: Bench) -> None:
    bench.write(LEFT)
    bench.write(RIGHT)
    assert busiest(bench.store.catalog(0).records(), 9) == []
    asked(bench, LEFT, 3)
    asked(bench, RIGHT, 2)
    records = bench.store.catalog(0).records()
    found = [(record.start + record.rows, record.hits) for record in busiest(records, 9)]
    assert found == [(8, 3), (4, 5), (8, 2)]


def test_prefixes_that_no_branch_leaves_are_one(bench: Bench) -> None:
    bench.write([*range(16)])
    asked(bench, [*range(16)], 2)
    (found,) = busiest(bench.store.catalog(0).records(), 9)
    assert found.start + found.rows == 16


def test_ranking_in_pieces_is_ranking_at_once(bench: Bench) -> None:
    for first in range(0, 120, 10):
        ids = [*range(first, first + 5)]
        bench.write(ids)
        asked(bench, ids, times=1 + first * 7 % 120)  # so that no two are worth the same
    records = bench.store.catalog(0).records()
    best = busiest(records[:7], 3)
    best = busiest([*best, *records[7:15]], 3)
    best = busiest([*best, *records[15:]], 3)
    assert best == busiest(records, 3)
    assert len(best) == 3


def test_the_daemon_lists_them(cachestore: Cachestore) -> None:
    with cachestore.client() as client:
        assert client.prefixes(5) == []
        entries.write(client, entries.tokens(600))
        entries.write(client, entries.tokens(10, first=7000))
        for _ in range(2):
            client.lookup(entries.NAMESPACE, entries.tokens(600), 599)
        client.lookup(entries.NAMESPACE, entries.tokens(10, first=7000), 10)
        first, second = client.prefixes(5)
        assert (first.first_token + first.span.rows, first.hits) == (600, 2)
        assert (second.first_token + second.span.rows, second.hits) == (10, 1)
        assert [entry.span.record_id for entry in client.prefixes(1)] == [first.span.record_id]
        with pytest.raises(StoreRefused, match="limit is 0"):
            client.prefixes(0)


def test_a_sequence_ends_in_the_record_with_its_last_row(bench: Bench) -> None:
    bench.write([*range(10)])
    catalog = bench.store.catalog(0)
    assert [catalog.end_of(NAMESPACE, packed(range(n))).id for n in (1, 4, 5, 10)] == [1, 1, 2, 3]
    for namespace, ids in ((NAMESPACE, range(11)), (OTHER_NAMESPACE, range(2)), (NAMESPACE, [9])):
        with pytest.raises(Refused, match="could be served") as refused:
            catalog.end_of(namespace, packed([*ids]))
        assert refused.value.code is RefusalCode.NOT_FOUND
    with pytest.raises(Refused, match="at least one token"):
        catalog.end_of(NAMESPACE, b"")


def test_where_rows_need_checkpoints_a_sequence_ends_with_one(bench: Bench) -> None:
    bench.write([*range(10)], checkpoints=[4, 10])
    catalog = bench.store.catalog(0)
    found = catalog.end_of(NAMESPACE, packed(range(10)))
    assert isinstance(found, Checkpoint)
    assert found.position == 10
    with pytest.raises(Refused, match="of 9 a lookup could be served 4"):
        catalog.end_of(NAMESPACE, packed(range(9)))


@pytest.mark.parametrize("pinned", [True, False])
def test_only_a_pinned_sequence_stays_whatever_comes(bench: Bench, pinned: bool) -> None:
    bench.write([*range(10)], checkpoints=[4, 10])
    catalog = bench.store.catalog(0)
    if pinned:
        kept = catalog.pin(catalog.end_of(NAMESPACE, packed(range(10))).id)
        assert [each.position for each in kept.checkpoints] == [4, 10]
    for first in range(100, 2000, 10):
        bench.write([*range(first, first + 8)], OTHER_NAMESPACE)
    assert bench.store.statistics(0).evictions > 0
    assert bench.peek([*range(10)], checkpoints=[]) == (10 if pinned else 0)
    bench.store.check()


def test_the_daemon_pins_a_sequence(cachestore: Cachestore) -> None:
    with cachestore.client() as client:
        entries.write(client, entries.tokens(600))
        answer = client.pin_sequence(entries.NAMESPACE, entries.tokens(600))
        assert (answer.records, answer.checkpoints, answer.record_id) == (3, 0, 3)
        assert answer.bytes == client.stats().bytes_used
        assert client.stats().pinned == 1
        assert client.pin_sequence(entries.NAMESPACE, entries.tokens(600)) == answer
        client.unpin(answer.record_id)
        with pytest.raises(StoreRefused, match="of 601 a lookup could be served 600"):
            client.pin_sequence(entries.NAMESPACE, entries.tokens(601))
        assert client.stats().pinned == 0
