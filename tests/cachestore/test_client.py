import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from cachestore.client import (
    Client,
    Extent,
    LaunchError,
    MatchKind,
    Piece,
    StoreRefused,
    StoreUnavailable,
    spawn,
)
from cachestore.v1 import cachestore_pb2 as pb
from tests.support import entries
from tests.support.daemons import Cachestore, start_cachestore
from tests.support.waiting import until

ROWS = 600


@pytest.fixture
def client(daemon: Cachestore) -> Iterator[Client]:
    with daemon.client() as session:
        yield session


def mappings() -> int:
    """How many slabs this process maps."""
    return Path("/proc/self/maps").read_text().count("memfd:mlx-cachestore")


def test_what_was_written_is_found(client: Client) -> None:
    sequence = entries.tokens(ROWS)
    miss = client.lookup(entries.NAMESPACE, sequence, ROWS - 1)
    assert (miss.kind, miss.id, miss.rows, miss.spans) == (MatchKind.MISS, 0, 0, ())
    assert client.slab_bytes_mapped == 0

    assert entries.write(client, sequence) == ROWS
    lease = client.lookup(entries.NAMESPACE, sequence, ROWS - 1)
    assert (lease.kind, lease.rows) == (MatchKind.EXACT, ROWS - 1)
    assert entries.is_intact(client, lease)
    assert client.slab_bytes_mapped > 0
    assert client.renew([lease.id, lease.id + 1]) == [True, False]
    client.release([lease.id])
    assert client.renew([lease.id]) == [False]
    assert client.health()


def test_an_aborted_write_leaves_nothing(client: Client) -> None:
    reservation = client.reserve(entries.NAMESPACE, entries.tokens(10), 0, 0, 100, "")
    assert client.stats().bytes_reserved > 0
    client.abort(reservation.id)
    assert client.stats().bytes_reserved == 0
    with pytest.raises(StoreRefused, match="reservation_id") as refused:
        client.commit(reservation.id, [1])
    assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION


def test_a_record_cannot_be_written(client: Client) -> None:
    entries.write(client, entries.tokens(10))
    lease = client.lookup(entries.NAMESPACE, entries.tokens(10), 10)
    with pytest.raises(TypeError):
        client.record(lease.spans[0])[0] = 0


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda c: c.lookup(b"short", entries.tokens(1), 0), "namespace"),
        (lambda c: c.lookup(entries.NAMESPACE, b"", 0), "tokens"),
        (lambda c: c.lookup(entries.NAMESPACE, b"abc", 0), "tokens"),
        (lambda c: c.lookup(entries.NAMESPACE, entries.tokens(1), 2), "limit"),
        (lambda c: c.renew(range(1, 4098)), "lease_ids"),
        (lambda c: c.reserve(entries.NAMESPACE, entries.tokens(1), 2, 0, 1, ""), "first_row"),
        (lambda c: c.reserve(entries.NAMESPACE, entries.tokens(1), 0, 0, 0, ""), "row_bytes"),
        (lambda c: c.reserve(entries.NAMESPACE, entries.tokens(1), 0, 0, 1, "x" * 257), "label"),
    ],
)
def test_bad_arguments_are_refused_by_name(
    client: Client, call: Callable[[Client], object], field: str
) -> None:
    with pytest.raises(StoreRefused, match=field) as refused:
        call(client)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "Traceback" not in refused.value.message


def test_many_threads_share_a_client(daemon: Cachestore, client: Client) -> None:
    def work(thread: int) -> bool:
        sequence = entries.tokens(300, first=1000 * thread)
        for _ in range(5):
            entries.write(client, sequence)
            lease = client.lookup(entries.NAMESPACE, sequence, 300)
            if lease.rows != 300 or not entries.is_intact(client, lease) or not client.alive:
                return False
            client.release([lease.id])
        return True

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(8)))
    found = daemon.stats()
    assert (found.tokens, found.leases, found.reservations) == (2400, 0, 0)


def test_memory_outlives_the_daemon_and_the_client(daemon: Cachestore) -> None:
    client = daemon.client()
    entries.write(client, entries.tokens(ROWS))
    lease = client.lookup(entries.NAMESPACE, entries.tokens(ROWS), ROWS)
    views = [client.record(span) for span in lease.spans]
    assert client.alive

    daemon.kill()
    until(lambda: not client.alive, "the end of the session")
    assert entries.is_intact(client, lease)
    for call in (client.stats, lambda: client.release([lease.id])):
        with pytest.raises(StoreUnavailable):
            call()
    assert not client.health()

    client.close()
    client.close()
    assert bytes(views[0]) == entries.payload(0, 256)
    with pytest.raises(StoreUnavailable, match="closed"):
        client.record(lease.spans[0])
    with pytest.raises(StoreUnavailable, match="closed"):
        client.stats()
    assert client.slab_bytes_mapped == 0


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc")
def test_a_slab_is_unmapped_with_its_last_view(daemon: Cachestore) -> None:
    client = daemon.client()
    entries.write(client, entries.tokens(10))
    lease = client.lookup(entries.NAMESPACE, entries.tokens(10), 10)
    view = client.record(lease.spans[0])
    before = mappings()
    client.close()
    assert mappings() == before
    del view
    gc.collect()
    assert mappings() < before


def test_a_restarted_daemon_needs_a_new_client(directory: Path) -> None:
    with start_cachestore(directory) as first:
        old = first.client()
        first.kill()
        with start_cachestore(directory) as second:
            with pytest.raises(StoreUnavailable):
                old.stats()
            assert not old.alive
            with second.client() as new:
                assert new.stats().pid == second.pid
        old.close()


def test_a_daemon_that_hangs_is_unavailable_in_time(daemon: Cachestore) -> None:
    with daemon.client(timeout_seconds=0.2) as client:
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            start = time.monotonic()
            with pytest.raises(StoreUnavailable, match="DEADLINE"):
                client.lookup(entries.NAMESPACE, entries.tokens(1), 1)
            with pytest.raises(StoreUnavailable, match="timed out"):
                daemon.client(timeout_seconds=0.2)
            assert time.monotonic() - start < 5
            assert client.alive  # as far as one can see
            # The daemon may come to hold what nobody can name: this session has to end.
            with pytest.raises(StoreUnavailable, match="DEADLINE"):
                client.reserve(entries.NAMESPACE, entries.tokens(1), 0, 0, 1, "")
            assert not client.alive
        finally:
            os.kill(daemon.pid, signal.SIGCONT)


def test_a_lookup_that_may_wait_long_does_not_wait_for_a_daemon_that_hangs(
    daemon: Cachestore,
) -> None:
    sequence = entries.tokens(600)
    with daemon.client() as leader, daemon.client(timeout_seconds=0.4) as client:
        leader.lookup(entries.NAMESPACE, sequence, 599, announce=True)
        with ThreadPoolExecutor(1) as pool:
            begun = time.monotonic()
            lookup = pool.submit(
                client.lookup, entries.NAMESPACE, sequence, 599, announce=True, wait_seconds=100
            )
            # Much longer than its timeout, for the daemon answers others.
            until(lambda: time.monotonic() - begun > 1.5, "some time to pass")
            assert daemon.stats().waiting == 1
            os.kill(daemon.pid, signal.SIGSTOP)
            try:
                with pytest.raises(StoreUnavailable, match="DEADLINE"):
                    lookup.result(timeout=10)
            finally:
                os.kill(daemon.pid, signal.SIGCONT)
        until(lambda: daemon.stats().waiting == 0, "the wait to be over")


def test_nothing_there_is_unavailable(directory: Path) -> None:
    with pytest.raises(StoreUnavailable, match="No such file"):
        Client.connect(directory / "none.sock")


def test_an_impossible_answer_is_unavailable(client: Client) -> None:
    lies = SimpleNamespace(
        Lookup=lambda *_, **__: pb.LookupResponse(kind=pb.MATCH_KIND_EXACT, rows=3),
        Reserve=lambda *_, **__: pb.ReserveResponse(reservation_id=1),
        Renew=lambda *_, **__: pb.RenewResponse(valid=[True]),
    )
    client._stub = lies  # type: ignore[assignment]
    with pytest.raises(StoreUnavailable, match="nonsense"):
        client.lookup(entries.NAMESPACE, entries.tokens(3), 3)
    with pytest.raises(StoreUnavailable, match="nonsense"):
        client.reserve(entries.NAMESPACE, entries.tokens(3), 0, 0, 1, "")
    with pytest.raises(StoreUnavailable, match="1 answers for 2"):
        client.renew([1, 2])


def test_an_extent_outside_of_its_slab_is_unavailable(client: Client) -> None:
    entries.write(client, entries.tokens(10))
    end = client.slab_bytes_mapped
    with pytest.raises(StoreUnavailable, match="outside of slab 1"):
        client.extent(Piece(Extent(1, end - 256, 512, generation=1), first_token=0, rows=1))
    with pytest.raises(StoreUnavailable, match="there is no slab 77"):
        client.extent(Piece(Extent(77, 0, 256, generation=1), first_token=0, rows=1))
    assert client.alive


def test_spawn_starts_a_daemon_that_outlives_us_once(directory: Path) -> None:
    path, log = directory / "c.sock", directory / "logs" / "c.log"
    with ThreadPoolExecutor(3) as starters:
        list(starters.map(lambda _: spawn(path, "16MiB", 600, log), range(3)))
    with Client.connect(path, role="admin") as client:
        pid = client.stats().pid
        try:
            assert client.stats().bytes_budget == 16 << 20
            assert os.getsid(pid) == pid
            assert log.read_text().count("ready at") == 1
            spawn(path, None, 600, log)
            assert client.stats().pid == pid
        finally:
            os.kill(pid, signal.SIGTERM)
        until(lambda: not client.alive, "the end of the daemon")
    until(lambda: not (directory / "c.sock.lock").exists(), "the release of the lock")


def test_spawn_reports_the_end_of_the_log(directory: Path) -> None:
    (directory / "c.crash.log").write_text("an older story\n")
    with pytest.raises(LaunchError, match="ended with 2: error: --budget") as failure:
        spawn(directory / "c.sock", "3", 600, directory / "c.log")
    assert "older" not in str(failure.value)
