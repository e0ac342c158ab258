"""Bytes are bytes: what `stats` says is the sum of what is held, and what the system sees."""

import contextlib
import itertools
import mmap
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachestore.client import Client, Lease, NewCheckpoint, StoreRefused
from cachestore.v1 import cachestore_pb2 as pb
from tests.support import entries
from tests.support.daemons import Cachestore, start_cachestore

CHECKPOINTED = bytes(range(64, 96))
NAMESPACES = (entries.NAMESPACE, bytes(32), CHECKPOINTED)
HOT = entries.tokens(400)


@pytest.fixture
def store(directory: Path) -> Iterator[Cachestore]:
    with start_cachestore(directory, budget="16MiB") as daemon:
        yield daemon


def some_sequence(chance: random.Random) -> bytes:
    """One of a few trunks, and often something else from some row on."""
    trunk = entries.tokens(chance.randrange(1, 900), first=10_000 * chance.randrange(6))
    return trunk + entries.tokens(chance.randrange(300), first=chance.randrange(2**31))


def operate(client: Client, chance: random.Random) -> None:
    """One random thing that a client may do."""
    namespace, sequence = chance.choice(NAMESPACES), some_sequence(chance)
    limit, checkpointed = len(sequence) // 4, namespace == CHECKPOINTED
    positions = sorted({chance.randint(1, limit) for _ in range(3)}) if checkpointed else None

    def lookup(announce: bool) -> Lease:
        lease = client.lookup(
            namespace,
            sequence,
            limit,
            announce,
            checkpointed=checkpointed,
            checkpoints=positions or (),
        )
        assert lease.rows <= limit
        return lease

    def reserve() -> int:
        new = [NewCheckpoint(position, 20_000) for position in positions or ()]
        return client.reserve(
            namespace, sequence, 0, 100, 1000, "", checkpointed=checkpointed, checkpoints=new
        ).id

    match chance.randrange(12):
        case 0:
            lookup(announce=False)  # never released
        case 1 | 2:
            lease = lookup(announce=True)
            client.renew([lease.id])
            client.release([lease.id])
        case 3:
            reserve()  # never committed
        case 4:
            client.abort(reserve())
        case 5:
            held = list(client.entries())
            if held:
                client.evict(record_id=chance.choice(held).span.record_id)
        case 6:
            held = list(client.entries())
            if held:
                client.pin(record_id := chance.choice(held).span.record_id)
                client.unpin(record_id)
        case _:
            entries.write(client, sequence, namespace, positions, chance.randrange(limit))


def check_sums(client: Client) -> pb.StatsResponse:
    """While nobody else calls."""
    stats, held = client.stats(), list(client.entries())
    rows = [entry for entry in held if not entry.checkpoint]
    checkpoints = [entry for entry in held if entry.checkpoint]
    assert (stats.records, stats.checkpoints) == (len(rows), len(checkpoints))
    assert stats.tokens == sum(entry.span.rows for entry in rows)
    assert stats.bytes_checkpoints == sum(entry.span.extent.length for entry in checkpoints)
    assert stats.sequences == sum(entry.sequences for entry in held)
    assert stats.bytes_used == sum(entry.span.extent.length for entry in held)
    padding = sum(entry.span.extent.length - entry.span.record_bytes for entry in held)
    assert stats.bytes_padding == padding
    assert stats.bytes_slabs <= stats.bytes_budget
    assert stats.bytes_slabs == (
        stats.bytes_used
        + stats.bytes_reserved
        + stats.bytes_quarantined
        + stats.bytes_retiring
        + stats.bytes_free
    )
    for namespace in stats.namespaces:
        of_it = [entry for entry in held if entry.namespace == namespace.namespace]
        assert namespace.bytes_used == sum(entry.span.extent.length for entry in of_it)
        assert namespace.tokens == sum(e.span.rows for e in of_it if not e.checkpoint)
        of_checkpoints = sum(e.span.extent.length for e in of_it if e.checkpoint)
        assert namespace.bytes_checkpoints == of_checkpoints
        assert namespace.checkpointed or not of_checkpoints
    places = sorted(
        (e.span.extent.slab_id, e.span.extent.offset, e.span.extent.length) for e in held
    )
    for (slab, offset, length), (next_slab, next_offset, _) in itertools.pairwise(places):
        assert slab != next_slab or offset + length <= next_offset
    return stats


@pytest.mark.parametrize("seed", range(3))
def test_stats_are_the_sum_of_what_is_held(store: Cachestore, seed: int) -> None:
    chance = random.Random(seed)
    with store.client(role="admin") as admin:
        for _ in range(6):
            with store.client() as one, store.client() as other:
                for _ in range(40):
                    with contextlib.suppress(StoreRefused):
                        operate(chance.choice((one, other)), chance)
                check_sums(admin)
        stats = check_sums(admin)
        assert min(stats.evictions, stats.checkpoints_evicted) > 0
        # All clients have gone: nothing is held for anybody.
        assert (stats.leases, stats.reservations, stats.announced) == (0, 0, 0)
        assert (stats.bytes_reserved, stats.bytes_quarantined) == (0, 0)
        assert not any(entry.claims for entry in admin.entries())
        dropped = admin.evict()
        assert (dropped.records, dropped.checkpoints) == (stats.records, stats.checkpoints)
        assert check_sums(admin).bytes_used == 0


def shared_memory_bytes(pid: int) -> int:
    """Memory behind the slabs that a process holds, as the system counts it."""
    found = {}
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if "mlx" in str(descriptor.readlink()):
                stat = descriptor.stat()
                found[stat.st_ino] = 512 * stat.st_blocks
    return sum(found.values())


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="only /proc tells what is resident")
@pytest.mark.parametrize("way", ["memfd", "posix"])
def test_the_system_sees_the_same_bytes(directory: Path, way: str) -> None:
    environment = {"MLX_CACHESTORE_SHM": way}
    with (
        start_cachestore(directory, budget="20MiB", environment=environment) as store,
        store.client() as client,
    ):
        for number in range(30):
            stats = client.stats()
            # From its first record on: pages are in place when a slab is made.
            difference = abs(shared_memory_bytes(store.pid) - stats.bytes_slabs)
            assert difference <= stats.slabs * mmap.PAGESIZE
            entries.write(client, entries.tokens(1000, first=10_000 * number))
        assert stats.bytes_slabs == stats.bytes_budget


def test_an_entry_larger_than_the_budget_evicts_nothing(store: Cachestore) -> None:
    with store.client() as client:
        entries.write(client, HOT)
        before = client.stats()
        with pytest.raises(StoreRefused, match="RESOURCE_EXHAUSTED"):
            entries.write(client, entries.tokens(20_000, first=10_000))
        after = check_sums(client)
        assert (after.evictions, after.bytes_used) == (0, before.bytes_used)
        assert after.bytes_reserved == 0
        assert client.lookup(entries.NAMESPACE, HOT, 400).rows == 400


def test_a_hot_prefix_survives_a_scan(store: Cachestore) -> None:
    with store.client() as client:
        entries.write(client, HOT)
        for number in range(1, 200):
            once = entries.tokens(400, first=10_000 * number)
            assert entries.write(client, once) == 400
            if number % 10 == 0:
                lease = client.lookup(entries.NAMESPACE, HOT, 400)
                assert lease.rows == 400
                assert entries.is_intact(client, lease)
                client.release([lease.id])
        assert client.stats().bytes_evicted > 3 * client.stats().bytes_budget
