"""Room: slabs, eviction, refusals; and what a request may hold."""

from dataclasses import replace
from typing import Any

import pytest

from cachestore.config import StoreConfig
from cachestore.stats import Statistics
from cachestore.store import NeedSlab, RefusalCode, Refused, Sizes, Store, Target
from tests.support.stores import NAMESPACE, OTHER_NAMESPACE, Bench, packed, tiny_config


def bench_of(slabs: int, slab_bytes: int = 1024) -> Bench:
    return Bench(Store(tiny_config(slabs, slab_bytes)))


def without_lookups(bench: Bench) -> Statistics:
    return replace(bench.store.statistics(bench.now), lookups=None)  # type: ignore[arg-type]


def refused(bench: Bench, ids: range, **request: Any) -> Refused:
    with pytest.raises(Refused) as refusal:
        bench.reserve(ids, **request)
    bench.store.check()
    return refusal.value


def test_asking_for_a_slab_leaves_no_trace() -> None:
    bench = bench_of(slabs=4)
    bench.write(range(4))
    target = Target(NAMESPACE, packed(range(40)), 0, 32, 56, "label")
    before = bench.store.statistics(0.0)
    for _ in range(2):
        with pytest.raises(NeedSlab) as need:
            bench.store.reserve(bench.session, target, 0.0)
        assert need.value.bytes == 1024
        bench.store.check()
        assert bench.store.statistics(0.0) == before
    assert bench.store.flush() == 1, "nothing stays pinned"


def test_the_budget_bounds_the_slabs_and_then_something_leaves() -> None:
    bench = bench_of(slabs=2)
    for first in range(0, 80, 4):
        bench.write(range(first, first + 4))
        bench.store.check()
    statistics = bench.store.statistics(0.0)
    assert (statistics.slabs, statistics.bytes_slabs) == (2, statistics.bytes_budget)
    assert (statistics.records, statistics.bytes_used, statistics.bytes_free) == (8, 2048, 0)
    assert (statistics.evictions, statistics.bytes_evicted) == (12, 12 * 256)
    assert [bench.peek(range(first, first + 4)) for first in (44, 48)] == [0, 4]


def test_an_entry_larger_than_the_budget_evicts_nothing() -> None:
    bench = bench_of(slabs=2)
    bench.write(range(32))
    refusal = refused(bench, range(100, 136))
    assert refusal.code is RefusalCode.RESOURCE_EXHAUSTED
    assert "--budget" in refusal.message
    statistics = bench.store.statistics(0.0)
    assert (statistics.records, statistics.evictions, statistics.writes.refused) == (8, 0, 1)


def test_an_entry_as_large_as_the_budget_takes_all_of_it() -> None:
    bench = bench_of(slabs=2)
    bench.write(range(8))
    assert bench.write(range(100, 132)) == 32
    assert bench.peek(range(8)) == 0
    bench.store.check()


def test_no_room_beside_what_is_leased_evicts_nothing() -> None:
    bench = bench_of(slabs=2)
    bench.write(range(20))
    bench.write(range(100, 112))
    lease = bench.lookup(range(20)).lease_id
    before = without_lookups(bench)
    refusal = refused(bench, range(200, 216))
    assert refusal.code is RefusalCode.RESOURCE_EXHAUSTED
    assert without_lookups(bench).records == before.records
    assert bench.write(range(300, 312)) == 12, "what is not leased makes room"
    bench.store.release(bench.session, [lease], 0.0)
    assert bench.write(range(200, 216)) == 16


def test_no_room_between_what_is_leased_evicts_nothing() -> None:
    bench = bench_of(slabs=1)
    for first in (0, 10, 20, 30):
        bench.write(range(first, first + 4))
    bench.lookup(range(4))
    bench.lookup(range(20, 24))
    # 512 bytes could be freed, but not side by side.
    assert refused(bench, range(50, 54), row_bytes=120).code is RefusalCode.RESOURCE_EXHAUSTED
    assert bench.store.statistics(0.0).records == 4


def test_an_entry_does_not_evict_what_it_extends() -> None:
    bench = bench_of(slabs=1)
    bench.write(range(12))
    bench.write(range(100, 104))
    assert bench.write(range(16)) == 4
    assert bench.peek(range(16)) == 16
    assert refused(bench, range(20)).code is RefusalCode.RESOURCE_EXHAUSTED
    assert bench.peek(range(16)) == 16


def test_without_memory_for_a_slab_something_leaves_instead() -> None:
    bench = bench_of(slabs=4)
    bench.write(range(16))  # one slab
    bench.memory_bytes = 1024
    assert bench.write([100]) == 1
    found = bench.store.statistics(0.0)
    assert (found.slabs, found.evictions, found.slab_failures) == (1, 1, 1)
    bench.memory_bytes = 4096
    bench.write([200])  # nobody asks for a slab again so soon
    found = bench.store.statistics(0.0)
    assert (found.slabs, found.evictions, found.slab_failures) == (1, 2, 1)
    bench.now = 30.0
    bench.write([300])
    found = bench.store.statistics(30.0)
    assert (found.slabs, found.evictions, found.slab_failures) == (2, 2, 1)


def test_without_memory_what_is_leased_stays_and_the_next_write_asks_again() -> None:
    bench = bench_of(slabs=4)
    bench.write(range(16))
    bench.lookup(range(16))
    bench.memory_bytes = 1024
    with pytest.raises(Refused, match="no memory"):
        bench.write([100])
    assert bench.store.statistics(0.0).evictions == 0
    bench.memory_bytes = 2048
    assert bench.write([100]) == 1
    bench.store.check()


def test_quarantined_bytes_are_not_given_to_anybody() -> None:
    bench = bench_of(slabs=1)
    lapsing = bench.reserve(range(8))
    bench.now = 30.0
    assert refused(bench, range(100, 112)).code is RefusalCode.RESOURCE_EXHAUSTED
    assert bench.write(range(100, 108)) == 8
    bench.store.abort(bench.session, lapsing.id, bench.now)
    assert bench.write(range(200, 208)) == 8
    assert bench.store.statistics(bench.now).evictions == 0


def test_a_last_slab_smaller_than_the_others_is_used_too() -> None:
    config = StoreConfig(budget_bytes=(16 << 20) + (1 << 20), slab_bytes_override=2 << 20)
    bench = Bench(Store(config))
    while bench.store.statistics(0.0).evictions == 0:
        first = 1000 * bench.store.statistics(0.0).records
        bench.write(range(first, first + 1000))
    assert [len(slab) >> 20 for slab in bench.slabs.values()] == [2] * 8 + [1]


def test_records_are_as_short_as_a_slab_demands() -> None:
    bench = bench_of(slabs=4)
    reservation = bench.reserve(range(8), row_bytes=400)
    assert [piece.rows for piece in reservation.pieces] == [2, 2, 2, 2]
    refusal = refused(bench, range(100, 101), row_bytes=1000)
    assert refusal.code is RefusalCode.RESOURCE_EXHAUSTED
    assert "row_bytes" in refusal.message


def test_a_writer_without_the_first_rows_needs_them_held() -> None:
    bench = bench_of(slabs=2)
    bench.write(range(5))
    assert bench.reserve(range(9), first_row=5).have == 5
    refusal = refused(bench, range(9), first_row=6)
    assert refusal.code is RefusalCode.FAILED_PRECONDITION
    assert "first_row" in refusal.message
    assert bench.store.statistics(0.0).writes.refused == 0, "it would have fit"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("namespace", b"short"),
        ("namespace", bytes(33)),
        ("tokens", b""),
        ("tokens", b"12345"),
        ("tokens", bytes(4 * 101)),
        ("first_row", -1),
        ("first_row", 5),
        ("record_overhead_bytes", -1),
        ("record_overhead_bytes", (1 << 20) + 1),
        ("row_bytes", 0),
        ("row_bytes", (1 << 30) + 1),
        ("label", "ä" * 129),
    ],
)
def test_a_bad_field_of_reserve_is_named(field: str, value: object) -> None:
    store = Store(replace(tiny_config(), max_tokens=100))
    session = store.open_session(counted=True)
    request: dict[str, Any] = {
        "namespace": NAMESPACE,
        "tokens": packed(range(4)),
        "first_row": 0,
        "record_overhead_bytes": 32,
        "row_bytes": 56,
        "label": "",
    }
    store.add_slab(1024)
    with pytest.raises(Refused, match=rf"^{field} ") as refusal:
        store.reserve(session, Target(**(request | {field: value})), 0.0)
    assert refusal.value.code is RefusalCode.INVALID_ARGUMENT
    assert store.reserve(session, Target(**request), 0.0).pieces


@pytest.mark.parametrize("limit", [-1, 5])
def test_a_bad_limit_of_lookup_is_named(limit: int) -> None:
    with pytest.raises(Refused, match=r"^limit ") as refusal:
        bench_of(slabs=1).lookup(range(4), limit=limit)
    assert refusal.value.code is RefusalCode.INVALID_ARGUMENT


@pytest.mark.parametrize("sizes", [[], [256], [256, 0], [257, 256], [256, 256, 256]])
def test_bad_record_bytes_leave_the_reservation_open(sizes: list[int]) -> None:
    bench = bench_of(slabs=1)
    reservation = bench.reserve(range(8))
    with pytest.raises(Refused, match=r"^record_bytes") as refusal:
        bench.store.commit(bench.session, reservation.id, Sizes(sizes), 0.0)
    assert refusal.value.code is RefusalCode.INVALID_ARGUMENT
    assert bench.commit(reservation) == 8


def test_lease_ids_are_limited_in_one_call() -> None:
    bench = bench_of(slabs=1)
    for call in (bench.store.renew, bench.store.release):
        with pytest.raises(Refused, match=r"^lease_ids "):
            call(bench.session, [1] * 4097, 0.0)
    assert bench.store.renew(bench.session, [1] * 4096, 0.0) == [False] * 4096


def test_leases_reservations_and_namespaces_are_limited() -> None:
    config = replace(
        tiny_config(), max_leases_per_session=2, max_reservations_per_session=3, max_namespaces=2
    )
    bench = Bench(Store(config))
    bench.write([1])
    leases = [bench.lookup([1]).lease_id for _ in range(2)]
    with pytest.raises(Refused, match="lease") as refusal:
        bench.lookup([1])
    assert refusal.value.code is RefusalCode.RESOURCE_EXHAUSTED
    bench.store.release(bench.session, leases[:1], 0.0)
    assert bench.lookup([1]).rows == 1
    bench.reserve([2], OTHER_NAMESPACE)
    with pytest.raises(Refused, match="namespace"):
        bench.reserve([2], bytes(32))
    bench.reserve([2], OTHER_NAMESPACE)
    bench.reserve([3])
    with pytest.raises(Refused, match="reservation"):
        bench.reserve([4])
    other = bench.store.open_session(counted=True)
    assert bench.reserve([4], session=other).pieces
    bench.store.check()
