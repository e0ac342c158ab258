"""Four clients, two engines and one store: mixed operations while the daemons die."""

import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.soak import operations
from tests.soak.clients import SoakClient, World
from tests.soak.operations import Kind, Restart
from tests.soak.places import Place
from tests.soak.watch import Growth, Watch
from tests.support.daemons import short_directory, start_cachestore
from tests.support.engines import EngineDaemon, start_engine
from tests.support.fingerprints import Fingerprints
from tests.support.slabs import slabs_of_all_processes
from tests.support.waiting import until

CLIENTS = 4
# The least that a store takes: 8,000 rows of this model, fewer than the prompts have.
BUDGET = "16MiB"
ROUND_OPERATIONS_MAX = 400
_ENTRY = re.compile(r"^(?=\d{4}-\d\d-\d\d )", re.MULTILINE)
_ERROR = re.compile(r"\S+ \S+ (?:ERROR|CRITICAL) ")
# gRPC itself logs this error when a client has gone before its answer; that is no news here.
_CLIENT_GONE = re.compile(r"\S+ \S+ ERROR grpc\.\S+: .*ExecuteBatchError")
# What is written without a date, behind some entry.
_UNDATED = re.compile(r"^(?:Exception |Fatal )", re.MULTILINE)

# glibc keeps much of what is freed. When told to keep little, what a process holds is what it uses.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}

# `engine` that knows the model of tests/support/fingerprints.py.
ENGINE = [sys.executable, "-m", "tests.soak.engine"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run that found nothing wrong has seen."""

    outcomes: Counter[tuple[Kind, str]]
    tokens_checked: int
    restarts: list[tuple[float, Restart]]
    growths: list[Growth]
    watch: Watch


def run(count: int, seed: int) -> Outcome:
    """Raises AssertionError at the first thing that is not as it should be."""
    with short_directory() as directory:
        try:
            with _world(directory, count, seed) as world:
                outcome = _Soak(world, count).run()
            check_ends(directory, outcome.watch.slabs)
        except BaseException as error:
            for log in sorted(directory.glob("*.log")):
                error.add_note(f"{log.name}:\n{log.read_text()[-3000:]}")
            raise
    return outcome


def check_ends(directory: Path, slabs: set[int]) -> None:
    """Once all daemons have ended: no shared memory, no sockets, and nothing odd in a log."""
    until(lambda: not slabs & slabs_of_all_processes(), "all slabs to go")
    left = [path.name for path in directory.iterdir() if path.suffix not in ("", ".log")]
    assert not left, left
    for log in directory.glob("*.log"):
        odd = odd_entries(log.read_text())
        assert not odd, "".join((log.name, ":\n", *odd))


def odd_entries(log: str) -> list[str]:
    """What must not be in a log: errors, and tracebacks of whatever origin."""
    return [
        entry
        for entry in _ENTRY.split(log)
        if _UNDATED.search(entry)
        or (not _CLIENT_GONE.match(entry) and (_ERROR.match(entry) or "Traceback" in entry))
    ]


@contextmanager
def _world(directory: Path, count: int, seed: int) -> Iterator[World]:
    fingerprints = Fingerprints(seed)
    model = fingerprints.save(directory / "model")
    where = f"unix:{directory / 'cachestore.sock'}"

    with ExitStack() as stack:
        store = Place("store", lambda: start_cachestore(directory, budget=BUDGET))
        stack.callback(store.close)

        def engine(name: str) -> Place[EngineDaemon]:
            flags = ("--cachestore", where, "--cache-codec", "none")
            place = Place(
                name,
                lambda: start_engine(
                    directory, model, *flags, name=name, program=ENGINE, environment=ENVIRONMENT
                ),
            )
            stack.callback(place.close)
            return place

        engines = (engine("one"), engine("two"))
        yield World(seed, fingerprints, store, engines, operations.restarts(seed, count))
        for place in (*engines, store):
            place.end(signal.SIGTERM)


class _Soak:
    def __init__(self, world: World, count: int) -> None:
        self._world = world
        self._count = count
        self._clients = [SoakClient(world) for _ in range(CLIENTS)]
        self._begun = 0
        self._failed = threading.Event()
        self._restarts: list[tuple[float, Restart]] = []
        self._watch = Watch(world, lambda: self._begun)

    def run(self) -> Outcome:
        rounds = max(3, -(-self._count // ROUND_OPERATIONS_MAX))
        self._watch.settle()
        with ThreadPoolExecutor(CLIENTS) as pool:
            for number in range(rounds):
                # One for all clients: each takes the next one.
                indices = iter(range(self._begun, self._count * (number + 1) // rounds))
                with self._watch.running():
                    ends = [pool.submit(self._work, client, indices) for client in self._clients]
                    for end in ends:
                        end.result()
                self._watch.settle()
        growths = self._watch.growths()
        for growth in growths:
            growth.check()
        return Outcome(
            sum((client.outcomes for client in self._clients), Counter()),
            sum(client.tokens_checked for client in self._clients),
            self._restarts,
            growths,
            self._watch,
        )

    def _work(self, client: SoakClient, indices: Iterator[int]) -> None:
        for index in indices:
            if self._failed.is_set():
                return
            self._begun = index + 1
            operation = operations.operation(self._world.seed, index, self._world.restarts)
            if operation.kind is Kind.RESTART:
                self._restarts.append((self._watch.now, self._world.restarts[index]))
            try:
                client.perform(operation)
            except BaseException as error:
                self._failed.set()
                error.add_note(f"operation {index}: {operation.kind.value}")
                raise
