"""One prefill for a crowd, with a real daemon: who is answered when, and what ends the waiting."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import grpc
import pytest

from cachestore.client import Client, Lease, StoreRefused, StoreUnavailable, Unwanted
from cachestore.v1 import cachestore_pb2 as pb
from tests.support import entries
from tests.support.daemons import Cachestore
from tests.support.waiting import until

PROMPT = entries.tokens(1000)
LONG = 60.0


@pytest.fixture
def client(daemon: Cachestore) -> Iterator[Client]:
    with daemon.client() as session:
        yield session


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def ask(client: Client, tokens: bytes = PROMPT, wait_seconds: float = LONG) -> Lease:
    limit = len(tokens) // 4 - 1
    return client.lookup(entries.NAMESPACE, tokens, limit, True, wait_seconds)


class Crowd:
    """Lookups that begin one after the other and wait; `order` has those that are answered."""

    def __init__(self, daemon: Cachestore, threads: ThreadPoolExecutor) -> None:
        self.order: list[int] = []
        self._daemon = daemon
        self._threads = threads
        self._lock = threading.Lock()

    def join(
        self, client: Client, tokens: bytes = PROMPT, wait_seconds: float = LONG
    ) -> "Future[Lease]":
        number = self._daemon.stats().waiting

        def wait() -> Lease:
            lease = ask(client, tokens, wait_seconds)
            with self._lock:
                self.order.append(number)
            return lease

        answer = self._threads.submit(wait)
        self.until_waiting(number + 1)
        return answer

    def until_waiting(self, count: int) -> None:
        until(lambda: self._daemon.stats().waiting == count, f"{count} waiting lookups")


@pytest.fixture
def crowd(daemon: Cachestore, threads: ThreadPoolExecutor) -> Crowd:
    return Crowd(daemon, threads)


def test_a_crowd_is_answered_with_the_rows_of_the_first(
    daemon: Cachestore, client: Client, crowd: Crowd
) -> None:
    leader = ask(client)
    assert (leader.rows, leader.id > 0) == (0, True)
    with daemon.client() as other:
        # Several of one session, and of another one; the tails differ.
        sessions = [client, other] * 3
        tails = [PROMPT[:3600] + entries.tokens(40, first=5000 * n) for n in range(1, 7)]
        answers = [crowd.join(*each) for each in zip(sessions, tails, strict=True)]
        found = daemon.stats()
        assert (found.announced, found.leases, found.lookups.miss) == (1, 1, 1)
        entries.write(client, PROMPT)
        assert [answer.result(10).rows for answer in answers] == [900] * 6
    assert daemon.stats().waiting == 0
    assert sum(answer.result().id > 0 for answer in answers) == 6


@pytest.mark.parametrize("end", ["release", "close"])
def test_when_the_first_gives_up_the_next_one_leads(
    daemon: Cachestore, client: Client, crowd: Crowd, end: str
) -> None:
    leader = daemon.client()
    lease = ask(leader)
    answers = [crowd.join(client) for _ in range(4)]
    if end == "release":
        leader.release([lease.id])
    leader.close()
    assert answers[0].result(10).rows == 0
    crowd.until_waiting(3)
    assert daemon.stats().announced == 1
    client.release([answers[0].result().id])
    assert answers[1].result(10).rows == 0
    crowd.until_waiting(2)
    entries.write(client, PROMPT)
    assert [answer.result(10).rows for answer in answers[2:]] == [999, 999]
    assert crowd.order[:2] == [0, 1]
    assert sorted(crowd.order) == [0, 1, 2, 3]


def test_rows_beyond_those_of_the_first_are_computed_once_too(client: Client, crowd: Crowd) -> None:
    ask(client)
    longer = PROMPT + entries.tokens(500, first=9000)
    second, third = crowd.join(client, longer), crowd.join(client, longer)
    entries.write(client, PROMPT)
    assert second.result(10).rows == 1000
    crowd.until_waiting(1)
    entries.write(client, longer)
    assert third.result(10).rows == 1499


def test_nobody_waits_longer_than_it_wants_to(
    daemon: Cachestore, client: Client, crowd: Crowd
) -> None:
    ask(client)
    patient = crowd.join(client)
    start = time.monotonic()
    assert ask(client, wait_seconds=0.0).rows == 0
    assert ask(client, wait_seconds=0.3).rows == 0
    assert 0.3 <= time.monotonic() - start < 5
    assert daemon.stats().announced == 3
    assert not patient.done()
    entries.write(client, PROMPT)
    assert patient.result(10).rows == 999


def test_who_does_not_want_the_answer_any_more_waits_no_longer(
    daemon: Cachestore, client: Client, threads: ThreadPoolExecutor, crowd: Crowd
) -> None:
    ask(client)
    patient = crowd.join(client)
    wanted = threading.Event()
    wanted.set()

    def impatient() -> None:
        client.lookup(entries.NAMESPACE, PROMPT, 999, True, LONG, wanted=wanted.is_set)

    answer = threads.submit(impatient)
    crowd.until_waiting(2)
    wanted.clear()
    with pytest.raises(Unwanted):
        answer.result(10)
    crowd.until_waiting(1)
    assert (daemon.stats().announced, daemon.stats().leases) == (1, 1)
    entries.write(client, PROMPT)
    assert patient.result(10).rows == 999


def test_who_promises_nothing_can_wait_too(client: Client, crowd: Crowd) -> None:
    def look(wait_seconds: float) -> Lease:
        return client.lookup(entries.NAMESPACE, PROMPT, 999, wait_seconds=wait_seconds)

    assert look(LONG).id == 0
    leader = ask(client)
    assert look(0.1).id == 0
    client.release([leader.id])
    assert look(LONG).id == 0


def test_other_sequences_do_not_wait(client: Client) -> None:
    ask(client)
    start = time.monotonic()
    assert ask(client, entries.tokens(1000, first=1)).rows == 0
    assert ask(client, PROMPT[:400] + entries.tokens(900, first=9000)).rows == 0
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "end",
    [
        lambda daemon, _: daemon.kill(),
        lambda daemon, _: daemon.terminate(),
        lambda _, own: own.close(),
    ],
    ids=["daemon killed", "daemon terminated", "client closed"],
)
def test_who_waits_is_told_at_once_when_there_is_nothing_to_wait_for(
    daemon: Cachestore,
    client: Client,
    crowd: Crowd,
    end: Callable[[Cachestore, Client], object],
) -> None:
    ask(client)
    own = daemon.client()
    answer = crowd.join(own)
    start = time.monotonic()
    end(daemon, own)
    assert isinstance(answer.exception(10), StoreUnavailable)
    assert time.monotonic() - start < 10
    own.close()


def test_who_has_gone_is_not_promoted(daemon: Cachestore, client: Client, crowd: Crowd) -> None:
    lease = ask(client)
    own = daemon.client()
    gone = crowd.join(own)
    patient = crowd.join(client)
    own.close()
    assert isinstance(gone.exception(10), StoreUnavailable)
    crowd.until_waiting(1)
    client.release([lease.id])
    assert patient.result(10).rows == 0
    found = daemon.stats()
    assert (found.waiting, found.announced, found.leases) == (0, 1, 1)


@pytest.mark.parametrize("seconds", [-1.0, 121.0, float("nan")])
def test_a_wrong_wait_is_refused_by_name(client: Client, seconds: float) -> None:
    request = pb.LookupRequest(namespace=entries.NAMESPACE, tokens=PROMPT, wait_seconds=seconds)
    with pytest.raises(StoreRefused, match="wait_seconds") as refusal:
        client._call(client._stub.Lookup, request)
    assert refusal.value.code is grpc.StatusCode.INVALID_ARGUMENT
