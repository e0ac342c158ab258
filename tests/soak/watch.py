"""What all daemons hold over time, and what they must not hold when nobody asks for anything."""

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from cachestore.client import StoreUnavailable
from cachestore.v1 import cachestore_pb2 as store_pb
from engine.remote import connect
from engine.v1 import engine_pb2 as pb
from tests.soak.clients import World, check_records, check_stats
from tests.soak.places import REST_SECONDS, Place, Usage, usage
from tests.support.engines import EngineDaemon
from tests.support.slabs import held_slabs
from tests.support.waiting import until

SAMPLE_SECONDS = 0.5
SETTLE_SECONDS = 40.0

# A process is judged once it has been seen at rest this often; the first third warms it up, and
# the medians of the second and the last are compared.
JUDGED_SAMPLES_MIN = 9
GROWTH_BYTES_MAX = 1 << 20
# What gRPC opens and closes as it likes.
DESCRIPTORS_GROWTH_MAX = 2
THREADS_GROWTH_MAX = 4


@dataclass(frozen=True, slots=True)
class Sample:
    seconds: float
    operations: int
    place: str
    life: int
    at_rest: bool
    usage: Usage


@dataclass(frozen=True, slots=True)
class StoreSample:
    seconds: float
    life: int
    stats: store_pb.StatsResponse


@dataclass
class Watch:
    world: World
    # How many operations have been begun.
    progress: Callable[[], int]
    samples: list[Sample] = field(default_factory=list)
    store_samples: list[StoreSample] = field(default_factory=list)
    # Inodes of every slab that the store has been seen to hold.
    slabs: set[int] = field(default_factory=set)
    began: float = field(default_factory=time.monotonic)

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.began

    @contextmanager
    def running(self) -> Iterator[None]:
        """Sample now and then, while the clients work."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(SAMPLE_SECONDS):
                self.sample(at_rest=False)

        with ThreadPoolExecutor(1) as pool:
            watching = pool.submit(watch)
            try:
                yield
            finally:
                ended.set()
            watching.result()

    def sample(self, at_rest: bool) -> None:
        now = self.now
        for place in (self.world.store, *self.world.engines):
            life = place.life
            found = usage(place.daemon.process.pid)
            if found is not None and not place.excuses(life):
                self.samples.append(Sample(now, self.progress(), place.name, life, at_rest, found))
        store = self.world.store
        life = store.life
        try:
            stats = store.daemon.stats()
        except StoreUnavailable:
            assert store.excuses(life)
            return
        self.store_samples.append(StoreSample(now, life, stats))
        self.slabs |= held_slabs(store.daemon.pid)

    def settle(self) -> None:
        """At rest: nothing is claimed, and everything adds up."""
        for engine in self.world.engines:
            _wait_for_rest(engine)
        store = self.world.store.daemon
        with store.client(role="admin", timeout_seconds=30) as client:
            while self.world.pinned:
                life, record_id = self.world.pinned.popleft()
                if life == self.world.store.life:
                    client.unpin(record_id)
            until(
                lambda: _claims(client.stats()) == _NO_CLAIMS, "every claim to end", SETTLE_SECONDS
            )
            check_stats(client)
            check_records(client)
            stats = client.stats()
            entries = list(client.entries())
        assert sum(entry.span.extent.length for entry in entries) == stats.bytes_used
        assert sum(entry.span.rows for entry in entries) == stats.tokens
        assert sum(entry.sequences for entry in entries) == stats.sequences
        assert len(entries) == stats.records
        for engine in self.world.engines:
            _wait_for_memory(engine)
        self.sample(at_rest=True)

    def growths(self) -> list["Growth"]:
        """Of every process that lived long enough to be judged."""
        lives: dict[tuple[str, int], list[Sample]] = defaultdict(list)
        for sample in self.samples:
            if sample.at_rest:
                lives[sample.place, sample.life].append(sample)
        return [
            Growth.of(samples) for samples in lives.values() if len(samples) >= JUDGED_SAMPLES_MIN
        ]


@dataclass(frozen=True, slots=True)
class Growth:
    """Of one process at rest: medians of the second and of the last third of its life."""

    place: str
    operations: int
    memory_bytes: tuple[int, int]
    descriptors: tuple[int, int]
    threads: tuple[int, int]

    @classmethod
    def of(cls, samples: list[Sample]) -> "Growth":
        third = len(samples) // 3
        before, after = samples[third : 2 * third], samples[-third:]

        def medians(value: Callable[[Usage], int]) -> tuple[int, int]:
            return (
                statistics.median_low(value(sample.usage) for sample in before),
                statistics.median_low(value(sample.usage) for sample in after),
            )

        return cls(
            samples[0].place,
            samples[-1].operations - samples[0].operations,
            medians(lambda usage: usage.memory_bytes),
            medians(lambda usage: usage.descriptors),
            medians(lambda usage: usage.threads),
        )

    def check(self) -> None:
        for (before, after), most in (
            (self.memory_bytes, GROWTH_BYTES_MAX),
            (self.descriptors, DESCRIPTORS_GROWTH_MAX),
            (self.threads, THREADS_GROWTH_MAX),
        ):
            assert after - before <= most, self


def _wait_for_rest(engine: Place[EngineDaemon]) -> None:
    with connect(engine.daemon.listen) as stub:

        def resting() -> pb.StatsResponse | None:
            stats = stub.Stats(pb.StatsRequest())
            busy = stats.queued or stats.prefilling or stats.decoding
            return stats if stats.cachestore_connected and not busy else None

        stats = until(resting, f"{engine.name} to rest", SETTLE_SECONDS)
    assert stats.failed == 0, f"{engine.name} failed {stats.failed} requests"


def _wait_for_memory(engine: Place[EngineDaemon]) -> None:
    """Until it has given back what it kept of freed arrays: none of it can be by chance, too."""
    time.sleep(2 * REST_SECONDS)
    with connect(engine.daemon.listen) as stub:
        until(
            lambda: stub.Stats(pb.StatsRequest()).mlx_cache_bytes == 0,
            f"{engine.name} to give memory back",
            SETTLE_SECONDS,
        )


# The sessions of the engines, and nothing else.
_NO_CLAIMS = (2, 0, 0, 0, 0, 0, 0, 0)


def _claims(stats: store_pb.StatsResponse) -> tuple[int, ...]:
    return (
        *(stats.sessions, stats.leases, stats.reservations, stats.waiting, stats.announced),
        *(stats.bytes_reserved, stats.bytes_quarantined, stats.pinned),
    )
