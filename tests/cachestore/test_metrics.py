"""Metrics of a daemon are what its Stats say, under names that Prometheus likes."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from cachestore.client import StoreRefused
from cachestore.metrics import StoreMetrics
from cachestore.v1 import cachestore_pb2 as pb
from tests.support import entries
from tests.support.daemons import Cachestore, short_directory, start_cachestore
from tests.support.scrapes import NO_PROMTOOL, Scrape, complaints, scrape, url_in

STORE = "mlx_cachestore_store_"


@dataclass
class Watched:
    daemon: Cachestore
    url: str

    def scrape(self) -> Scrape:
        return scrape(self.url)


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    """A daemon that has been asked and written to, in every way that is counted."""
    with (
        short_directory() as directory,
        start_cachestore(directory, metrics="127.0.0.1:0") as daemon,
        daemon.client() as client,
    ):
        entries.write(client, entries.tokens(600))
        entries.write(client, entries.tokens(600))
        for count in (600, 300, 700):
            lease = client.lookup(entries.NAMESPACE, entries.tokens(count), count - 1)
            client.release([lease.id])
        client.lookup(entries.NAMESPACE, entries.tokens(50, first=9), 49)
        reservation = client.reserve(entries.NAMESPACE, entries.tokens(900), 0, 100, 1000, "test")
        client.abort(reservation.id)
        with pytest.raises(StoreRefused):
            client.reserve(entries.NAMESPACE, entries.tokens(900), 0, 100, 1 << 20, "test")
        client.lookup(entries.NAMESPACE, entries.tokens(600), 599)
        yield Watched(daemon, url_in(directory / "cachestore.log"))


def test_every_number_is_that_of_stats(watched: Watched) -> None:
    stats, found = watched.daemon.stats(), watched.scrape()
    states = ("used", "reserved", "quarantined", "retiring", "free")
    memory = {state: getattr(stats, f"bytes_{state}") for state in states}
    assert found.all(STORE + "memory_bytes") == memory
    assert sum(memory.values()) == stats.bytes_slabs
    assert found[STORE + "budget_bytes"] == stats.bytes_budget
    for name in ("slabs", "records", "sequences", "tokens", "checkpoints", "sessions", "leases"):
        assert found[STORE + name] == getattr(stats, name), name
    assert found[STORE + "reservations"] == stats.reservations
    assert found[STORE + "namespaces"] == len(stats.namespaces) == 1
    lookups = stats.lookups
    kinds = ("exact", "supersequence", "prefix", "lcp", "miss")
    assert found.all(STORE + "lookups_total") == {kind: getattr(lookups, kind) for kind in kinds}
    assert sum(getattr(lookups, kind) > 0 for kind in kinds) == 4
    assert found[STORE + "requested_tokens_total"] == lookups.tokens_requested
    assert found[STORE + "served_tokens_total"] == lookups.tokens_served > 0
    assert found[STORE + "lookup_seconds_count"] == sum(getattr(lookups, kind) for kind in kinds)
    assert 0 < found[STORE + "lookup_seconds_sum"] == lookups.seconds.sum
    outcomes = ("committed", "refused", "dropped")
    writes = {outcome: getattr(stats.writes, outcome) for outcome in outcomes}
    assert found.all(STORE + "writes_total") == writes
    assert min(writes.values()) > 0
    assert found[STORE + "up"] == 1
    assert found["process_resident_memory_bytes"] > 1 << 20


def test_the_classes_of_lookups_add_up(watched: Watched) -> None:
    found = watched.scrape()
    below = [*found.all(STORE + "lookup_seconds_bucket").values()]
    assert below == sorted(below)
    assert below[-1] == found[STORE + "lookup_seconds_count"]


@pytest.mark.skipif(bool(NO_PROMTOOL), reason=NO_PROMTOOL)
def test_promtool_has_nothing_to_say(watched: Watched) -> None:
    assert complaints(watched.scrape().text) == ""


@pytest.mark.skipif(bool(NO_PROMTOOL), reason=NO_PROMTOOL)
def test_promtool_would_have_something_to_say() -> None:
    assert "counter metrics should have" in complaints("# HELP a A.\n# TYPE a counter\na 1\n")


def test_clients_cannot_make_series(directory: Path) -> None:
    """Whatever names and tokens they send, the series are those of a daemon that does nothing."""
    with (
        start_cachestore(directory, metrics="127.0.0.1:0") as daemon,
        daemon.client() as client,
    ):
        url = url_in(directory / "cachestore.log")
        before = scrape(url)
        for number in range(20):
            namespace = bytes([number]) * 32
            reservation = client.reserve(
                namespace, entries.tokens(9), 0, 100, 10, f'm"{number}\n\\{{}}'
            )
            extent = client.extent(reservation.pieces[0])
            extent[:] = bytes(len(extent))
            client.commit(reservation.id, [190])
            client.lookup(namespace, entries.tokens(9 + number), 8)
            with pytest.raises(StoreRefused):
                client.lookup(namespace[:number], entries.tokens(9), 8)
        after = scrape(url)
    assert after[STORE + "namespaces"] == 20
    assert after.series == before.series


def test_scrapes_beside_calls_answer_each(watched: Watched) -> None:
    over = threading.Event()

    def call() -> int:
        calls = 0
        with watched.daemon.client() as client:
            while not over.is_set():
                lease = client.lookup(entries.NAMESPACE, entries.tokens(600), 599)
                client.release([lease.id])
                calls += 1
        return calls

    with ThreadPoolExecutor(5) as pool:
        calls = pool.submit(call)
        found = [each.result() for each in [pool.submit(watched.scrape) for _ in range(40)]]
        over.set()
        assert calls.result() > 0
    assert all(each[STORE + "up"] == 1 for each in found)


def test_a_loop_that_does_not_answer_keeps_no_scrape_waiting() -> None:
    metrics = StoreMetrics()
    assert value(metrics) == 0  # nothing has begun
    loop = asyncio.new_event_loop()
    metrics.begin(loop, pb.StatsResponse)
    began = time.monotonic()
    assert value(metrics) == 0  # the loop does not run
    assert time.monotonic() - began < 2
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    assert value(metrics) == 1
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    assert value(metrics) == 0


def test_a_store_that_contradicts_itself_is_not_up() -> None:
    metrics = StoreMetrics()
    loop = asyncio.new_event_loop()
    metrics.begin(loop, lambda: pb.StatsResponse(check_failures=1))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    assert value(metrics) == 0
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def value(metrics: StoreMetrics) -> float:
    """Of "up"."""
    return metrics.collect()[0].samples[0].value


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("0.0.0.0:0", "--metrics: 0.0.0.0 is not a loopback address"),
        ("everywhere", "--metrics: 'everywhere' is not HOST:PORT"),
    ],
)
def test_a_daemon_is_not_scraped_from_elsewhere(directory: Path, address: str, said: str) -> None:
    refused = serve(directory, address)
    assert (refused.returncode, said in refused.stderr) == (2, True)


def test_a_port_that_is_taken_ends_the_daemon_at_once(watched: Watched, directory: Path) -> None:
    address = watched.url.removeprefix("http://").removesuffix("/metrics")
    refused = serve(directory, address)
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith(f"error: --metrics {address}: cannot be")
    assert [*directory.iterdir()] == []


def serve(directory: Path, address: str) -> "subprocess.CompletedProcess[str]":
    """A daemon that refuses to start."""
    command = [sys.executable, "-m", "cachestore", "serve", "--metrics", address]
    return subprocess.run(
        [*command, "--socket", directory / "cachestore.sock"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
