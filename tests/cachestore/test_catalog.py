"""What a person sees of the store, keeps in it, and drops."""

from dataclasses import replace

import pytest

from cachestore.catalog import Catalog, Evicted
from cachestore.store import RefusalCode, Refused, Store
from tests.support.stores import NAMESPACE, OTHER_NAMESPACE, Bench, tiny_config


@pytest.fixture
def bench() -> Bench:
    return Bench(Store(tiny_config()))


def catalog(bench: Bench) -> Catalog:
    return bench.store.catalog(bench.now)


def test_entries_add_up_to_all_that_is_held(bench: Bench) -> None:
    bench.write(range(10))
    bench.write([*range(6), 77])
    bench.write([1], OTHER_NAMESPACE)
    entries = catalog(bench).entries(b"", 0, 100, 0.0)
    assert [(e.span.record_id, e.parent_id, e.first_token, e.span.rows) for e in entries] == [
        (1, 0, 0, 4),
        (2, 1, 4, 4),
        (3, 2, 8, 2),
        (4, 2, 6, 1),
        (5, 0, 0, 1),
    ]
    assert [e.sequences for e in entries] == [0, 0, 1, 1, 1]
    found = bench.store.statistics(0.0)
    assert sum(e.span.extent.length for e in entries) == found.bytes_used
    assert sum(e.span.rows for e in entries) == found.tokens
    of_one = catalog(bench).entries(OTHER_NAMESPACE, 0, 100, 0.0)
    assert [e.span.record_id for e in of_one] == [5]
    page = catalog(bench).entries(b"", 2, 2, 0.0)
    assert [e.span.record_id for e in page] == [3, 4]


def test_hits_and_age_are_those_of_what_was_served(bench: Bench) -> None:
    bench.write(range(10))
    bench.now = 5.0
    bench.lookup(range(10), limit=6)
    bench.now = 7.0
    bench.lookup(range(3))
    bench.now = 8.0
    entries = catalog(bench).entries(NAMESPACE, 0, 100, 8.0)
    assert [(e.hits, e.age_seconds, e.claims) for e in entries] == [
        (2, 1.0, 2),
        (1, 3.0, 1),
        (0, 3.0, 0),  # recent, because eviction goes by whole paths
    ]


def test_evicting_a_record_takes_all_behind_it_and_nothing_before(bench: Bench) -> None:
    bench.write(range(10))
    bench.write([*range(6), 77])
    bench.write([*range(3), 88])
    held = catalog(bench)
    assert held.evict(held.behind(2)) == Evicted(records=3, checkpoints=0, bytes=3 * 256, kept=0)
    assert bench.peek(range(10)) == 4
    assert bench.peek([*range(3), 88]) == 4
    bench.store.check()


def test_what_is_in_use_or_before_it_stays(bench: Bench) -> None:
    bench.write(range(10))
    bench.lookup(range(6))
    held = catalog(bench)
    assert held.evict(held.behind(1)) == Evicted(records=1, checkpoints=0, bytes=256, kept=2)
    assert held.evict([1, 99]) == Evicted(records=0, checkpoints=0, bytes=0, kept=1)
    bench.store.check()


def test_a_namespace_goes_alone(bench: Bench) -> None:
    bench.write(range(10))
    bench.write(range(10), OTHER_NAMESPACE)
    held = catalog(bench)
    assert held.evict(held.everything(OTHER_NAMESPACE)).records == 3
    assert [n.namespace for n in bench.store.statistics(0.0).namespaces] == [NAMESPACE]


def test_a_pinned_path_stays_until_it_is_unpinned(bench: Bench) -> None:
    bench.write(range(10))
    kept = catalog(bench).pin(2)
    assert [record.id for record in kept.path] == [1, 2]
    assert catalog(bench).pin(2) == kept
    assert bench.store.statistics(0.0).pinned == 1
    for first in range(100, 200, 10):  # more than the budget holds
        bench.write(range(first, first + 10))
    assert bench.store.statistics(0.0).evictions > 0
    assert bench.peek(range(10)) == 8
    assert [e.pinned for e in catalog(bench).entries(b"", 0, 2, 0.0)] == [False, True]
    bench.store.flush()
    bench.store.check()
    catalog(bench).unpin(2)
    bench.store.check()
    assert bench.store.flush() == 2


def test_what_is_not_there_is_not_found(bench: Bench) -> None:
    held = catalog(bench)
    bench.write([1])
    for call in (lambda: held.pin(2), lambda: held.unpin(1), lambda: held.behind(2)):
        with pytest.raises(Refused, match=r"^record_id ") as refusal:
            call()
        assert refusal.value.code is RefusalCode.NOT_FOUND


def test_pins_are_limited() -> None:
    bench = Bench(Store(replace(tiny_config(), max_pinned=1)))
    bench.write(range(10))
    catalog(bench).pin(1)
    with pytest.raises(Refused, match="record_id"):
        catalog(bench).pin(2)
    catalog(bench).unpin(1)
    catalog(bench).pin(2)
