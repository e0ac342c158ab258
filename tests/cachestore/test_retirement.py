"""Slabs that nobody needs any more go, but never under somebody's hands."""

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachestore.client import Client, StoreUnavailable
from cachestore.retirement import Retirement, Slab
from cachestore.store import Store
from tests.support import entries
from tests.support.daemons import Cachestore
from tests.support.stores import Bench, tiny_config
from tests.support.waiting import until

MANY = 20_000  # rows: 20 MB, in three slabs of 8 MiB


@pytest.fixture
def bench() -> Bench:
    """A store with three slabs, the first two of which are empty again."""
    bench = Bench(Store(tiny_config()))
    for first in (0, 100, 200):
        bench.write(range(first, first + 16))
    bench.lookup(range(200, 216))
    bench.store.flush()
    return bench


@pytest.fixture
def retirement(bench: Bench) -> Retirement:
    return Retirement(
        bench.store, {n: Slab(os.open("/dev/null", os.O_RDONLY), 1) for n in (1, 2, 3)}
    )


def bytes_retiring(bench: Bench) -> int:
    bench.store.check()
    return bench.store.statistics(0.0).bytes_retiring


def test_one_empty_slab_is_spared(bench: Bench, retirement: Retirement) -> None:
    retirement.retire()
    found = bench.store.statistics(0.0)
    assert (found.slabs, found.bytes_slabs, found.bytes_retiring) == (2, 2048, 0)
    assert retirement.give(1, 2) is None
    assert retirement.give(1, 1) is not None
    retirement.retire()
    assert bench.store.statistics(0.0).slabs == 2


@pytest.mark.parametrize(
    "end", [Retirement.session_ended, lambda retirement, session: retirement.unmapped(session, 2)]
)
def test_a_slab_counts_until_the_last_session_has_unmapped_it(
    bench: Bench, retirement: Retirement, end: Callable[[Retirement, int], None]
) -> None:
    for session in (7, 8):
        assert retirement.give(session, 2) is not None
    retirement.give(9, 1)
    retirement.retire()
    assert bytes_retiring(bench) == 1024
    assert [retirement.held_by(session) for session in (7, 8, 9)] == [[2], [2], []]
    assert retirement.give(9, 2) is None
    end(retirement, 7)
    end(retirement, 7)
    assert bytes_retiring(bench) == 1024
    end(retirement, 8)
    assert bytes_retiring(bench) == 0
    assert bench.store.statistics(0.0).bytes_slabs == 2048


def test_retiring_bytes_stay_inside_the_budget(bench: Bench, retirement: Retirement) -> None:
    retirement.give(7, 2)
    retirement.retire()
    for first in range(1000, 1100, 10):
        bench.write(range(first, first + 10))
    found = bench.store.statistics(0.0)
    assert (found.bytes_slabs, found.bytes_retiring) == (4096, 1024)
    assert found.evictions > 0
    bench.store.check()


def test_a_word_about_a_slab_that_was_never_given_changes_nothing(
    bench: Bench, retirement: Retirement
) -> None:
    retirement.give(7, 2)
    for slab_id in (1, 2, 99):
        retirement.unmapped(8, slab_id)
    retirement.retire()
    assert bytes_retiring(bench) == 1024


@pytest.fixture
def client(daemon: Cachestore) -> Iterator[Client]:
    with daemon.client() as session:
        yield session


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:mlx-cachestore")


def flush(daemon: Cachestore) -> None:
    with daemon.client(role="admin") as other:
        other.evict()


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc")
def test_a_flush_gives_memory_back_once_its_last_view_is_gone(
    daemon: Cachestore, client: Client
) -> None:
    before = mapped()
    entries.write(client, entries.tokens(MANY))
    lease = client.lookup(entries.NAMESPACE, entries.tokens(MANY), MANY)
    views = [client.record(span) for span in lease.spans]
    slabs = daemon.stats().slabs
    assert slabs == mapped() - before == 3
    client.release([lease.id])
    flush(daemon)
    found = daemon.stats()
    assert (found.slabs, found.bytes_retiring) == (3, 2 * 8 << 20)

    client.renew([])
    assert mapped() - before == 3
    assert bytes(views[-1][:100]) == entries.payload(MANY // 256 * 256, 1)[:100]
    assert daemon.stats().slabs == 3
    del views
    gc.collect()
    client.renew([])
    until(lambda: daemon.stats().slabs == 1, "the end of two slabs")
    found = daemon.stats()
    assert (found.bytes_slabs, found.bytes_retiring) == (8 << 20, 0)
    assert mapped() - before == 1

    # Ids are new, and what is left can be used.
    entries.write(client, entries.tokens(MANY))
    lease = client.lookup(entries.NAMESPACE, entries.tokens(MANY), MANY)
    assert entries.is_intact(client, lease)
    assert {span.slab_id for span in lease.spans} == {1, 4, 5}


def test_a_retiring_slab_ends_with_its_last_session(daemon: Cachestore) -> None:
    client = daemon.client()
    entries.write(client, entries.tokens(MANY))
    flush(daemon)
    assert daemon.stats().bytes_retiring == 2 * 8 << 20
    client.close()
    until(lambda: daemon.stats().bytes_retiring == 0, "the end of two slabs")
    assert daemon.stats().slabs == 1


def test_a_stale_span_of_a_slab_that_is_gone_is_a_miss(daemon: Cachestore, client: Client) -> None:
    entries.write(client, entries.tokens(MANY))
    lease = client.lookup(entries.NAMESPACE, entries.tokens(MANY), MANY)
    client.release([lease.id])
    flush(daemon)
    client.renew([])
    until(lambda: daemon.stats().slabs == 1, "the end of two slabs")
    stale = next(span for span in lease.spans if span.slab_id == 2)
    with pytest.raises(StoreUnavailable, match="there is no slab 2"):
        client.record(stale)
    assert client.alive
