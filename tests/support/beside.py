"""A real daemon that a good client uses, for tests of bad ones."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cachestore.client import Client
from tests.support import entries
from tests.support.daemons import Cachestore, short_directory, start_cachestore
from tests.support.slabs import held_slabs
from tests.support.waiting import until

SEQUENCE = entries.tokens(300)
MEMORY_GROWTH_BYTES_MAX = 8 << 20
SLOW_SECONDS = 2.0


def held(daemon: Cachestore) -> dict[str, int]:
    """All that the daemon holds for sessions, but for what is 0."""
    stats = daemon.stats()
    names = ["sessions", "leases", "reservations", "announced", "waiting"]
    names += ["bytes_reserved", "bytes_quarantined"]
    return {name: getattr(stats, name) for name in names if getattr(stats, name)}


def count(daemon: Cachestore, folder: str) -> int:
    """Its descriptors ("fd") or threads ("task"), where the system tells."""
    path = Path(f"/proc/{daemon.pid}/{folder}")
    return len(list(path.iterdir())) if path.exists() else 0


def connections(daemon: Cachestore) -> int:
    """Its descriptors but for those of slabs."""
    return count(daemon, "fd") - len(held_slabs(daemon.pid))


def memory_bytes(daemon: Cachestore) -> int:
    """Resident memory of its own, shared memory aside, where the system tells."""
    status = Path(f"/proc/{daemon.pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


@contextlib.contextmanager
def sound_store() -> Iterator[Cachestore]:
    """A daemon that holds SEQUENCE, and must be sound at the end."""
    with short_directory() as directory, start_cachestore(directory) as daemon:
        with daemon.client() as client:
            entries.write(client, SEQUENCE)
            for _ in range(200):  # so that it has the memory and the threads that calls take
                client.stats()
        yield daemon
        assert daemon.process.poll() is None
        assert "a call failed" not in daemon.log
        with daemon.client(role="admin") as client:
            problems = [text for step in client.verify() for text in step.problems]
        # The records of these tests are none of an engine's: only the bookkeeping counts.
        assert not [text for text in problems if "bookkeeping" in text]


@contextlib.contextmanager
def beside_a_good_client(running: Cachestore) -> Iterator[None]:
    """Who must be served all the while; nothing may be left of others at the end."""
    open_before, threads = connections(running), count(running, "task")
    memory = memory_bytes(running)
    with _used(running):
        yield
    until(lambda: not held(running), "nothing to be held for anybody")
    # Connections close a little later.
    until(lambda: connections(running) <= open_before + 1, "the descriptors to be closed")
    assert count(running, "task") <= threads + 1
    assert memory_bytes(running) <= memory + MEMORY_GROWTH_BYTES_MAX


@contextlib.contextmanager
def _used(daemon: Cachestore) -> Iterator[None]:
    """A good client looks up and reads until the end, and is served in time."""
    over = threading.Event()
    rounds = 0

    def use(client: Client) -> None:
        nonlocal rounds
        while not over.wait(0.01):
            lease = client.lookup(entries.NAMESPACE, SEQUENCE, 299)
            assert entries.is_intact(client, lease)
            client.release([lease.id])
            rounds += 1

    with daemon.client(timeout_seconds=SLOW_SECONDS) as good, ThreadPoolExecutor(1) as pool:
        use_of_it = pool.submit(use, good)
        try:
            yield
            seen = rounds
            until(lambda: use_of_it.done() or rounds > seen + 3, "the good client to be served")
        finally:
            over.set()
        use_of_it.result()
