"""Daemons that are ended under load, again and again: with SIGTERM all is in order afterwards, and
after SIGKILL the next one takes the same sockets at once."""

import contextlib
import itertools
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc
import pytest

from cachestore import endpoint
from cachestore.client import StoreRefused, StoreUnavailable
from engine.remote import connect
from engine.v1 import engine_pb2 as pb
from tests.support import entries
from tests.support.daemons import Cachestore, start_cachestore
from tests.support.engines import EngineDaemon, ids, start_engine
from tests.support.models import save_tiny_model
from tests.support.rounds import ROUNDS
from tests.support.slabs import held_slabs, slabs_of_all_processes
from tests.support.waiting import until

# A machine that does much else may need a minute for a round.
pytestmark = pytest.mark.timeout(300 + 60 * ROUNDS)

STREAMS = 8
WRITERS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "model")


def assert_gone(directory: Path, pid: int, slabs: set[int]) -> None:
    """No child, socket, lock or shared memory is left of a process that ended in order."""
    assert [path.name for path in directory.glob("*.sock*")] == []
    assert not list(Path("/dev/shm").glob("mlxcs*"))
    if Path("/proc").exists():
        assert not slabs & slabs_of_all_processes()
        assert children(pid) == []


def children(pid: int) -> list[int]:
    """Processes that say that `pid` is their parent, or that their group is its."""
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,pgid="], capture_output=True, text=True, check=True
    ).stdout.split("\n")
    rows = [[int(word) for word in line.split()] for line in listed if line]
    return [row[0] for row in rows if pid in row[1:]]


# --- the engine -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a client saw of one request, and what it had asked for."""

    asked: int
    tokens: int
    code: grpc.StatusCode

    def check(self) -> None:
        """All of its tokens, or a status."""
        if self.code is grpc.StatusCode.OK:
            assert self.tokens == self.asked
        else:
            assert self.code is grpc.StatusCode.UNAVAILABLE
            # The last token may come before the end of the reply does.
            assert self.tokens <= self.asked


def request(number: int) -> pb.GenerateRequest:
    """Prompts long and short, that share beginnings, and replies of every length."""
    chosen = random.Random(number)
    prompt = [(7 * n + number % 3) % 256 for n in range(chosen.choice((3, 100, 900)))]
    length = chosen.choice((1, 30, 300, 1000))
    return pb.GenerateRequest(
        prompt=ids([*prompt, number % 256]), max_tokens=length, ignore_eos=True
    )


def ask(engine: EngineDaemon, number: int, begun: threading.Semaphore) -> Outcome:
    message, tokens = request(number), 0
    with connect(engine.listen) as stub:
        try:
            for reply in stub.Generate(message, timeout=60):
                begun.release()
                tokens += len(reply.delta.token_ids)
            return Outcome(message.max_tokens, tokens, grpc.StatusCode.OK)
        except grpc.RpcError as error:
            return Outcome(message.max_tokens, tokens, cast(grpc.Call, error).code())


@contextlib.contextmanager
def clients(engine: EngineDaemon, seed: int) -> Iterator[list[Outcome]]:
    """So many clients, each with one request after the other until the engine is away; entered
    once tokens flow, and left when all have ended. Yields the outcomes so far."""
    outcomes: list[Outcome] = []
    numbers, begun = itertools.count(1000 * seed), threading.Semaphore(0)

    def work() -> None:
        while True:
            outcomes.append(ask(engine, next(numbers), begun))
            if outcomes[-1].code is not grpc.StatusCode.OK:
                return

    with ThreadPoolExecutor(STREAMS) as pool:
        working: list[Future[None]] = [pool.submit(work) for _ in range(STREAMS)]
        for _ in range(random.Random(seed).randrange(1, 200)):
            assert begun.acquire(timeout=60)
        yield outcomes
        done, late = wait(working, 30)
        assert not late, "a stream without an end"
        for each in done:
            each.result()


def assert_nothing_claimed(store: Cachestore) -> None:
    until(lambda: store.stats().sessions == 0, "the session to end", seconds=2)
    stats = store.stats()
    assert (stats.leases, stats.reservations, stats.announced) == (0, 0, 0)
    assert stats.bytes_slabs == stats.bytes_used + stats.bytes_free


@pytest.mark.slow
def test_sigterm_to_an_engine_under_load(
    directory: Path, model: Path, cachestore: Cachestore
) -> None:
    flags = ("--cachestore", f"unix:{cachestore.socket}", "--drain-seconds", "1")
    for number in range(ROUNDS):
        with start_engine(directory, model, *flags) as engine:
            pid = engine.process.pid
            with clients(engine, number) as outcomes:
                engine.process.terminate()
                assert engine.process.wait(20) == 0
        for outcome in outcomes:
            outcome.check()
        assert not list(directory.glob("engine.sock*"))
        assert not Path("/proc").exists() or children(pid) == []
        assert_nothing_claimed(cachestore)
    log = (directory / "engine.log").read_text()
    assert "Traceback" not in log
    assert log.count(" request id=") >= ROUNDS * STREAMS


@pytest.mark.slow
def test_sigkill_to_an_engine_under_load(
    directory: Path, model: Path, cachestore: Cachestore
) -> None:
    flags = ("--cachestore", f"unix:{cachestore.socket}")
    for number in range(ROUNDS):
        with (
            start_engine(directory, model, *flags) as engine,
            clients(engine, number) as outcomes,
        ):
            engine.kill()
        for outcome in outcomes:
            outcome.check()
        assert (directory / "engine.sock").exists()
        assert_nothing_claimed(cachestore)
    with start_engine(directory, model, *flags) as engine:
        assert engine.generate(prompt=ids([1, 2]), max_tokens=3, ignore_eos=True)[0]
        assert engine.stop() == 0
    assert not list(directory.glob("engine.sock*"))


# --- the cachestore ---------------------------------------------------------------------------


@contextlib.contextmanager
def writers(store: Cachestore, seed: int) -> Iterator[None]:
    """Sessions that write and look up until the store is away; left when all have ended."""
    begun = threading.Semaphore(0)

    def work(number: int) -> None:
        chosen = random.Random(100 * seed + number)
        with contextlib.suppress(StoreUnavailable), store.client() as client:
            while True:
                sequence = entries.tokens(chosen.randrange(1, 3000), chosen.randrange(9) * 3000)
                with contextlib.suppress(StoreRefused):
                    lease = client.lookup(entries.NAMESPACE, sequence, 1, announce=True)
                    entries.write(client, sequence)
                    client.release([lease.id])
                begun.release()

    def hope() -> None:
        """Waits for rows that never come."""
        with contextlib.suppress(StoreUnavailable), store.client() as client:
            promised = entries.tokens(900, first=1_000_000)
            client.lookup(entries.NAMESPACE, promised, 1, announce=True)
            with contextlib.suppress(StoreUnavailable), store.client() as other:
                begun.release()
                other.lookup(entries.NAMESPACE, promised, 899, wait_seconds=60)

    with ThreadPoolExecutor(WRITERS + 1) as pool:
        working = [pool.submit(work, number) for number in range(WRITERS)]
        working.append(pool.submit(hope))
        for _ in range(random.Random(seed).randrange(5, 40)):
            assert begun.acquire(timeout=60)
        yield
        done, late = wait(working, 30)
        assert not late, "a call without an end"
        for each in done:
            each.result()


def test_sigterm_to_a_store_under_load(directory: Path) -> None:
    for number in range(ROUNDS):
        with start_cachestore(directory, budget="16MiB") as store:
            slabs: set[int] = set()
            with writers(store, number):
                slabs = held_slabs(store.pid)
                began = time.monotonic()
                assert store.terminate() == 0
                took = time.monotonic() - began
            # A second, and what a machine that does other things adds.
            assert took < 2
            assert_gone(directory, store.pid, slabs)
            assert "Traceback" not in store.log
        assert slabs or sys.platform != "linux"


def test_sigkill_to_a_store_under_load(directory: Path) -> None:
    for number in range(ROUNDS):
        with start_cachestore(directory, budget="16MiB") as store:
            with writers(store, number):
                slabs = held_slabs(store.pid)
                store.process.kill()
                store.process.wait()
            assert endpoint.session_path(store.socket).exists()
            assert not Path("/proc").exists() or not slabs & slabs_of_all_processes()
            assert not list(Path("/dev/shm").glob("mlxcs*"))
            began = time.monotonic()
            with start_cachestore(directory, budget="16MiB") as replacement:
                assert time.monotonic() - began < 10
                assert replacement.stats().records == 0
                assert replacement.terminate() == 0
    assert [path.name for path in directory.glob("*.sock*")] == []
