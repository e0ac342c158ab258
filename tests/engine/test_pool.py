"""WaitingPool: as many threads as calls wait together, and none that is lost."""

import functools
import random
import threading
import time
from collections.abc import Iterator

import pytest

from engine import pool
from engine.pool import WaitingPool
from tests.support.waiting import until

SECONDS = 10.0
MOST = 8


@pytest.fixture
def made() -> Iterator[WaitingPool]:
    made = WaitingPool(MOST, "a-pool")
    yield made
    made.shutdown()


class Calls:
    """Calls that wait until they are let go."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.ended: list[int] = []
        self._lock = threading.Lock()
        self.running = self.running_most = 0

    def __call__(self, number: int) -> None:
        with self._lock:
            self.running += 1
            self.running_most = max(self.running_most, self.running)
        assert self.go_on.wait(SECONDS)
        with self._lock:
            self.running -= 1
            self.ended.append(number)


def named_threads() -> int:
    return sum(thread.name == "a-pool" for thread in threading.enumerate())


def test_calls_run_side_by_side_and_the_others_after_them(made: WaitingPool) -> None:
    calls = Calls()
    for number in range(MOST + 5):
        made.submit(functools.partial(calls, number))
    until(lambda: calls.running == MOST, "all threads to be busy")
    assert made.threads == named_threads() == MOST
    calls.go_on.set()
    until(lambda: len(calls.ended) == MOST + 5, "all calls to end")
    assert sorted(calls.ended) == list(range(MOST + 5))
    assert calls.running_most == MOST


def test_threads_do_not_become_more_with_time() -> None:
    """Those of ThreadPoolExecutor do with Python 3.12: seven to twenty in so many rounds."""
    made = WaitingPool(256, "a-pool")
    draw = random.Random(0)
    for _ in range(2000):
        ended = threading.Semaphore(0)
        count = draw.randint(1, 3)
        for _ in range(count):
            seconds = draw.random() * 0.001

            def call(seconds: float = seconds, ended: threading.Semaphore = ended) -> None:
                time.sleep(seconds)
                ended.release()

            made.submit(call)
        for _ in range(count):
            assert ended.acquire(timeout=SECONDS)
    # Three at a time, and one more each: a thread whose call has just ended is not back yet.
    assert made.threads <= 2 * 3
    made.shutdown()
    assert named_threads() == 0


def test_idle_threads_end_and_come_again(
    made: WaitingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "IDLE_SECONDS", 0.05)
    for _ in range(3):
        calls = Calls()
        for number in range(4):
            made.submit(functools.partial(calls, number))
        until(lambda: calls.running == 4, "all calls to run")  # noqa: B023
        calls.go_on.set()
        until(lambda: named_threads() == 0, "the threads to end")
        assert made.threads == 0
        assert len(calls.ended) == 4


def test_after_a_burst_threads_end_although_calls_go_on(
    made: WaitingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "IDLE_SECONDS", 0.3)
    calls = Calls()
    for number in range(MOST):
        made.submit(functools.partial(calls, number))
    until(lambda: calls.running == MOST, "all calls to run")
    calls.go_on.set()

    def one_more() -> bool:
        made.submit(lambda: None)
        return made.threads <= 2

    until(one_more, "the other threads to end")


def test_no_call_is_lost_to_a_thread_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "IDLE_SECONDS", 0.002)
    made = WaitingPool(1, "a-pool")
    draw = random.Random(0)
    for _ in range(300):
        ended = threading.Event()
        made.submit(ended.set)
        assert ended.wait(SECONDS)
        time.sleep(draw.random() * 0.004)
    made.shutdown()


def test_where_the_system_has_no_thread_left(
    made: WaitingPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as refusing:
        refusing.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            made.submit(functools.partial(calls, 0))
    made.submit(functools.partial(calls, 1))
    until(lambda: calls.running == 1, "the thread to be busy")
    with monkeypatch.context() as refusing:
        refusing.setattr(threading.Thread, "start", refuse)
        made.submit(functools.partial(calls, 2))
    calls.go_on.set()
    until(lambda: calls.ended == [1, 2], "the call to be run by the thread that there is")


def test_a_call_that_fails_costs_no_other(
    made: WaitingPool, caplog: pytest.LogCaptureFixture
) -> None:
    ended = threading.Event()
    for _ in range(2 * MOST):
        made.submit(lambda: 1 / 0)
    made.submit(ended.set)
    assert ended.wait(SECONDS)
    until(lambda: len(caplog.records) == 2 * MOST, "all failures to be logged")
    assert {record.getMessage() for record in caplog.records} == {"a-pool: a call failed"}


def test_shutdown_waits_for_all_calls_and_takes_no_more() -> None:
    made = WaitingPool(2, "a-pool")
    calls = Calls()
    for number in range(5):
        made.submit(functools.partial(calls, number))
    threading.Timer(0.1, calls.go_on.set).start()
    made.shutdown()
    assert sorted(calls.ended) == list(range(5))
    assert named_threads() == 0
    with pytest.raises(RuntimeError, match="after shutdown"):
        made.submit(lambda: None)
    made.shutdown()
