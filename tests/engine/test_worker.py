import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc
import mlx.core as mx
import pytest

from engine.batch import BatchMode, BatchShape
from engine.core import Core
from engine.kv.layout import probe
from engine.kv.live import LiveCaches
from engine.prefix import Prefix
from engine.request import Delta, Done, Event, Failed, Request
from engine.scheduler import Scheduler
from engine.tokenizer import Detokenizer
from engine.worker import Worker, WorkerOver
from tests.support.cores import STEP, FakePrefix, Letters
from tests.support.models import tiny_llama
from tests.support.waiting import until

PROMPT = (3, 1, 4, 1, 5)
SECONDS = 30.0


class Died(BaseException):
    """As KeyboardInterrupt and SystemExit, which `except Exception` does not catch."""


@dataclass
class NoStore(FakePrefix):
    """Answers each lookup at once: there is no store."""

    post: Callable[[Callable[[Core], None]], None] = field(default=lambda _: None)
    # Whose lookups are never answered.
    deaf: Container[int] = ()
    writes: bool = False

    def look_up(
        self,
        request_id: int,
        tokens: tuple[int, ...],
        planned: Sequence[int],
        wanted: Callable[[], bool],
    ) -> None:
        if request_id not in self.deaf:
            self.post(lambda core: core.looked_up(request_id, None))


class Running:
    """A worker with a tiny model and few rows."""

    def __init__(
        self,
        change: Callable[[Core], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        deaf: Container[int] = (),
    ) -> None:
        self.worker = Worker(self._make_core, clock)
        self._change = change
        self._deaf = deaf

    def _make_core(self) -> Core:
        caches = LiveCaches(tiny_llama())
        core = Core(
            caches=caches,
            shape=BatchShape(BatchMode.BATCHED, 2, STEP),
            scheduler=Scheduler(2, True, STEP.idle),
            prefix=cast(
                Prefix, NoStore(layout=probe(caches), post=self.worker.post, deaf=self._deaf)
            ),
            new_detokenizer=lambda: Detokenizer(Letters()),
        )
        self._change(core)
        return core

    def submit(self, request_id: int, max_tokens: int = 3) -> "queue.SimpleQueue[Event]":
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.worker.submit(request_id, Request(PROMPT, max_tokens), events.put)
        return events

    def kept_bytes(self) -> int:
        """Of freed arrays. Asking puts no rest off."""
        return self.worker.snapshot().result(SECONDS).cache_bytes

    def hold(self) -> Callable[[], None]:
        """Keep the worker in a message until the result is called."""
        began, go_on = threading.Event(), threading.Event()

        def wait(_: Core) -> None:
            began.set()
            assert go_on.wait(SECONDS)

        self.worker.post(wait)
        assert began.wait(SECONDS)
        return go_on.set


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running()
    made.worker.start()
    made.worker.ready.result(SECONDS)
    yield made
    made.worker.stop()


def last(events: "queue.SimpleQueue[Event]") -> Done | Failed:
    """The final event, and nothing after it."""
    while True:
        event = events.get(timeout=SECONDS)
        if not isinstance(event, Delta):
            assert events.empty()
            return event


def failed(events: "queue.SimpleQueue[Event]") -> Failed:
    event = last(events)
    assert isinstance(event, Failed), event
    return event


def no_worker_threads() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name == "mlx-worker"]


def test_requests_are_served_until_it_is_stopped(running: Running) -> None:
    replies = [running.submit(request_id, max_tokens=5) for request_id in range(5)]
    for events in replies:
        done = last(events)
        assert isinstance(done, Done)
        assert done.usage.completion_tokens == 5
    snapshot = running.worker.snapshot().result(SECONDS)
    assert (snapshot.counters.finished, snapshot.occupancy.decoding) == (5, 0)
    assert snapshot.peak_bytes >= snapshot.active_bytes > 0
    running.worker.stop()
    assert running.worker.ended.result(SECONDS) is None
    assert no_worker_threads()


def test_a_snapshot_does_not_change_afterwards(running: Running) -> None:
    before = running.worker.snapshot().result(SECONDS)
    last(running.submit(1))
    assert before.counters.finished == 0


def test_stopping_ends_running_and_queued_requests_with_a_status(running: Running) -> None:
    replies = [running.submit(request_id, max_tokens=100_000) for request_id in range(4)]
    for events in replies[:2]:
        assert isinstance(events.get(timeout=SECONDS), Delta)
    go_on = running.hold()
    replies.append(running.submit(9))  # still in the inbox
    snapshot = running.worker.snapshot()
    stopping = threading.Thread(target=running.worker.stop)
    stopping.start()
    while not running.worker._stopping:
        pass
    go_on()
    stopping.join(SECONDS)
    for events in replies:
        assert failed(events).code == grpc.StatusCode.UNAVAILABLE
    snapshot.exception(SECONDS)  # has a result or an exception
    assert running.worker.ended.result(SECONDS) is None
    assert failed(running.submit(10)).code == grpc.StatusCode.UNAVAILABLE
    assert no_worker_threads()
    running.worker.stop()
    running.worker.cancel(1)


def test_stop_before_start_does_nothing() -> None:
    running = Running()
    running.worker.stop()
    assert not running.worker.ready.done()


def test_stop_while_loading_ends_after_it() -> None:
    loading, go_on = threading.Event(), threading.Event()

    def wait(_: Core) -> None:
        loading.set()
        assert go_on.wait(SECONDS)

    running = Running(wait)
    running.worker.start()
    assert loading.wait(SECONDS)
    events = running.submit(1)
    stopping = threading.Thread(target=running.worker.stop)
    stopping.start()
    go_on.set()
    stopping.join(SECONDS)
    assert failed(events).code == grpc.StatusCode.UNAVAILABLE
    assert running.worker.ended.result(SECONDS) is None


@pytest.mark.parametrize("error", [ValueError("no weights"), Died("no weights")])
def test_loading_that_fails_is_told_to_everybody(error: BaseException) -> None:
    def fail(_: Core) -> None:
        raise error

    running = Running(fail)
    early = running.submit(1)
    snapshot = running.worker.snapshot()
    running.worker.start()
    assert running.worker.ready.exception(SECONDS) is error
    assert running.worker.ended.exception(SECONDS) is error
    for events in (early, running.submit(2)):
        assert failed(events).code == grpc.StatusCode.INTERNAL
    for pending in (snapshot, running.worker.snapshot()):
        with pytest.raises(WorkerOver, match="no weights"):
            pending.result(SECONDS)
    running.worker.post(lambda _: pytest.fail("called after the end"))
    running.worker.stop()
    assert no_worker_threads()


def kill_by_message(running: Running, error: BaseException) -> None:
    def die(_: Core) -> None:
        raise error

    running.worker.post(die)


def kill_by_step(running: Running, error: BaseException) -> None:
    def die(core: Core) -> None:
        def step() -> Any:
            raise error

        core._batch.step = step  # type: ignore[method-assign]

    running.worker.post(die)


@pytest.mark.parametrize("error", [RuntimeError("broken"), Died("broken")])
@pytest.mark.parametrize("kill", [kill_by_message, kill_by_step])
def test_when_it_dies_every_caller_gets_a_status(
    running: Running, kill: Callable[[Running, BaseException], None], error: BaseException
) -> None:
    replies = [running.submit(request_id, max_tokens=100_000) for request_id in range(4)]
    assert isinstance(replies[0].get(timeout=SECONDS), Delta)
    go_on = running.hold()
    kill(running, error)
    if kill is kill_by_step and isinstance(error, Exception):
        # A step that fails once is survived; the next one is not.
        running.worker.post(lambda core: core.turn())
        kill(running, error)
    replies.append(running.submit(9))
    snapshot = running.worker.snapshot()
    go_on()
    died = running.worker.ended.exception(SECONDS)
    assert died is not None
    assert error in (died, died.__cause__)
    for events in replies:
        assert failed(events).code == grpc.StatusCode.INTERNAL
        assert events.empty()
    if snapshot.exception(SECONDS) is not None:
        assert isinstance(snapshot.exception(SECONDS), WorkerOver)
    assert "broken" in failed(running.submit(10)).message
    with pytest.raises(WorkerOver, match="broken"):
        running.worker.snapshot().result(SECONDS)
    running.worker.stop()
    assert no_worker_threads()


def test_a_batch_that_cannot_even_be_closed_does_not_hide_the_death(running: Running) -> None:
    events = running.submit(1, max_tokens=100_000)
    assert isinstance(events.get(timeout=SECONDS), Delta)

    def die(core: Core) -> None:
        def refuse(*_: Any, **__: Any) -> Any:
            raise RuntimeError("in no state to be closed")

        core._batch.remove = refuse  # type: ignore[method-assign]
        core._batch.close = refuse  # type: ignore[method-assign]
        raise RuntimeError("the first failure")

    running.worker.post(die)
    assert str(running.worker.ended.exception(SECONDS)) == "the first failure"
    assert failed(events).code == grpc.StatusCode.INTERNAL
    assert no_worker_threads()


def test_a_caller_that_gave_up_on_a_snapshot_harms_nobody(running: Running) -> None:
    go_on = running.hold()
    abandoned = running.worker.snapshot()
    assert abandoned.cancel()
    go_on()
    assert isinstance(last(running.submit(1)), Done)
    with pytest.raises(CancelledError):
        abandoned.result(SECONDS)
    assert not running.worker.ended.done()


def test_waiting_for_the_worker_counts_as_waiting_in_the_queue() -> None:
    running = Running(clock=lambda: time.monotonic() - 5.0)
    running.worker.start()
    done = last(running.submit(1))
    running.worker.stop()
    assert isinstance(done, Done)
    assert done.timing.queue_ms >= 5000
    assert done.timing.lookup_ms < 5000


def test_it_says_how_long_a_turn_takes() -> None:
    now = 0.125
    running = Running(clock=lambda: now)
    assert running.worker.turn_seconds == 0
    running.worker.start()
    running.worker.ready.result(SECONDS)
    until(lambda: running.worker._turn_began is None, "the worker to wait for something to do")
    now = 0.5
    assert running.worker.turn_seconds == 0
    go_on = running.hold()
    assert running.worker.turn_seconds == 0
    now = 7.5
    assert running.worker.turn_seconds == 7
    go_on()
    until(lambda: running.worker.turn_seconds == 0, "the worker to go on")
    assert isinstance(last(running.submit(1)), Done)
    running.worker.stop()
    now = 60.0
    assert running.worker.turn_seconds == 0


def test_at_rest_it_gives_back_what_mlx_keeps_of_freed_arrays(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    for request_id in range(2):
        monkeypatch.setattr("engine.worker.REST_SECONDS", 60.0)
        assert isinstance(last(running.submit(10 + request_id)), Done)
        assert running.kept_bytes() > 0
        monkeypatch.setattr("engine.worker.REST_SECONDS", 0.2)
        assert isinstance(last(running.submit(20 + request_id)), Done)
        until(lambda: running.kept_bytes() == 0, "the memory to be given back")


def test_no_rest_while_a_request_waits_but_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.worker.REST_SECONDS", 0.1)
    running = Running(deaf={7})
    running.worker.start()
    until(lambda: running.kept_bytes() == 0, "the first rest, after the load")
    for _ in range(2):
        running.submit(7)
        # As of a copy out of the store: no step follows.
        running.worker.post(lambda core: mx.eval(mx.zeros(1 << 16)))
        time.sleep(0.5)
        assert running.kept_bytes() > 0
        running.worker.cancel(7)
        until(lambda: running.kept_bytes() == 0, "the memory to be given back")
    running.worker.stop()


SCRIPT = """
import sys
from tests.engine.test_worker import Died, Running
kind = sys.argv[1]
running = Running()
if kind == "load":
    running = Running(lambda core: 1 / 0)
running.worker.start()
if kind == "load":
    assert isinstance(running.worker.ready.exception(30), ZeroDivisionError)
else:
    events = running.submit(1, max_tokens=100_000)
    events.get(timeout=30)
    if kind == "death":
        def die(core):
            del core._batch  # so that it cannot be closed either
            raise Died()
        running.worker.post(die)
        assert isinstance(running.worker.ended.exception(30), Died)
if kind != "unstopped":
    running.worker.stop()
else:
    import threading
    threading.Thread(target=running.worker.stop).start()
print("ended")
"""


@pytest.mark.parametrize("kind", ["stop", "death", "load", "unstopped"])
def test_the_process_ends_cleanly_after_it(kind: str) -> None:
    """MLX aborts a process in which a thread that used it ended without saying so."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind],
        cwd=Path(__file__).parent.parent.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "ended\n"
