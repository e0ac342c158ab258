import asyncio
import gc
import logging
import weakref
from collections.abc import Iterator

import pytest

from cachestore.check import LOOKS_PER_STEP
from cachestore.store import MatchKind, RefusalCode, Refused, Store
from cachestore.upkeep import CHECK_SECONDS, RETIRE_SECONDS, Upkeep, calm_collector
from tests.support.stores import Bench, tiny_config, write_many


class Day:
    """A store, its upkeep, and how often a check of it has begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bench = Bench(Store(tiny_config(slab_bytes=1 << 18)))
        self.calls = 0
        self.checks = 0
        self.retirements = 0
        self.upkeep = Upkeep(
            self.bench.store, lambda: self.bench.now, lambda: self.calls, self.retire
        )
        checks = self.bench.store.checks

        def counted() -> Iterator[int]:
            self.checks += 1
            return checks()

        monkeypatch.setattr(self.bench.store, "checks", counted)
        monkeypatch.setattr("cachestore.upkeep._PAUSE_SECONDS", 0.0)

    def retire(self) -> None:
        self.retirements += 1

    def pass_by(self, seconds: float, calls: int = 0) -> None:
        self.bench.now += seconds
        self.calls += calls
        self.upkeep.tick()
        asyncio.run(self.upkeep.check(lambda: False))


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch) -> Iterator[Day]:
    yield Day(monkeypatch)
    gc.unfreeze()


def test_a_tick_ends_what_has_lapsed(day: Day) -> None:
    day.bench.lookup(range(20), announce=True)
    day.pass_by(30.0, calls=1)
    assert day.bench.store._serving.leases == 0


def test_the_store_is_checked_when_idle_and_not_too_often(day: Day) -> None:
    day.bench.write(range(10))
    day.pass_by(CHECK_SECONDS, calls=5)
    assert day.checks == 0  # not idle
    day.pass_by(1.0)
    assert day.checks == 1
    day.bench.write(range(11))
    day.pass_by(1.0)
    assert day.checks == 1
    day.bench.write(range(12))
    day.pass_by(CHECK_SECONDS)
    assert day.checks == 2
    day.pass_by(CHECK_SECONDS, calls=1)
    day.pass_by(1.0)
    assert day.checks == 2  # nothing has changed since


def test_slabs_are_given_back_after_a_long_time_without_calls(day: Day) -> None:
    day.pass_by(RETIRE_SECONDS, calls=1)
    day.pass_by(RETIRE_SECONDS - 1)
    assert day.retirements == 0
    day.pass_by(1.0)
    assert day.retirements == 1
    day.pass_by(RETIRE_SECONDS, calls=1)
    assert day.retirements == 1


def test_a_large_store_is_checked_over_several_seconds(
    day: Day, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads in between do not matter, and after a change it begins anew."""
    steps = write_many(day.bench, records=1000) * 9 // LOOKS_PER_STEP
    assert steps > 1
    monkeypatch.setattr("cachestore.upkeep.STEPS_MAX", 1)
    day.pass_by(CHECK_SECONDS)
    day.bench.store.statistics(day.bench.now)
    assert day.bench.lookup([5], limit=0).rows == 0
    day.pass_by(1.0, calls=1)
    day.pass_by(1.0)
    assert day.checks == 1
    assert not day.upkeep._check.over
    day.bench.write(range(3))
    while not day.upkeep._check.over:
        day.pass_by(1.0)
    assert day.checks == 2
    assert day.bench.now > CHECK_SECONDS + steps


def test_a_call_ends_a_look_at_the_store_until_nobody_calls(day: Day) -> None:
    write_many(day.bench, records=1000)
    day.bench.now += CHECK_SECONDS
    day.upkeep.tick()

    async def called_meanwhile() -> None:
        check = asyncio.create_task(day.upkeep.check(lambda: False))
        await asyncio.sleep(0)
        day.calls += 1
        await check

    asyncio.run(called_meanwhile())
    assert day.checks == 1
    assert not day.upkeep._check.over
    day.pass_by(1.0)
    assert not day.upkeep._check.over
    day.pass_by(1.0)
    assert day.upkeep._check.over
    assert day.checks == 1


def test_a_store_that_contradicts_itself_serves_nothing(
    day: Day, caplog: pytest.LogCaptureFixture
) -> None:
    bench = day.bench
    day.pass_by(CHECK_SECONDS, calls=1)
    bench.write(range(10))
    lease = bench.lookup(range(10)).lease_id
    open_one = bench.reserve(range(20))
    bench.store._holdings.namespaces.popitem()[1].tree.tokens += 1
    with caplog.at_level(logging.ERROR):
        day.pass_by(1.0)
    assert "contradicts itself" in caplog.text
    assert "Traceback" in caplog.text
    assert not bench.store.sound

    found = bench.lookup(range(10), announce=True)
    assert (found.kind, found.lease_id) == (MatchKind.MISS, 0)
    assert bench.rows_to_come(range(10)) == 0
    assert bench.store.renew(bench.session, [lease], bench.now) == [False]
    for write in (lambda: bench.reserve([1]), lambda: bench.commit(open_one)):
        with pytest.raises(Refused, match="restart") as refusal:
            write()
        assert refusal.value.code is RefusalCode.FAILED_PRECONDITION
    assert bench.store.statistics(bench.now).check_failures == 1


def test_the_collector_leaves_alone_what_is_here_to_stay(day: Day) -> None:
    before = gc.get_threshold()
    try:
        calm_collector()
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold()[1] == gc.get_threshold()[2] == 1 << 30
        frozen = gc.get_freeze_count()
        held: list[list[int]] = [[] for _ in range(1000)]
        day.pass_by(1.0)
        assert gc.get_freeze_count() >= frozen + len(held)
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("young_collections", [0, 1, 11])
def test_garbage_is_collected_before_the_rest_is_set_aside(
    day: Day, young_collections: int
) -> None:
    before = gc.get_threshold()
    try:
        calm_collector()
        # Only a collection of the middle generation sets back how many young ones there were.
        for _ in range(young_collections):
            gc.collect(0)
        for _ in range(2):
            garbage = weakref.ref(Cycle())
            day.pass_by(1.0)
            assert garbage() is None
            assert gc.get_count()[1] <= 1
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
