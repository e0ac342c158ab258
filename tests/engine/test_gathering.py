"""The first step after a pause waits for requests that come together."""

import queue
import time
from collections.abc import Iterator

import pytest

import engine.worker
from engine.batch import StepResult
from engine.core import Core
from engine.request import Done
from tests.engine.test_worker import SECONDS, Running, last
from tests.support.waiting import until


@pytest.fixture
def steps() -> Iterator[tuple[Running, "queue.SimpleQueue[int]"]]:
    """Lookups of request 2 are not answered; in the queue, of each step, its rows."""
    rows: queue.SimpleQueue[int] = queue.SimpleQueue()

    def count(core: Core) -> None:
        step = core._batch.step

        def counted() -> StepResult:
            rows.put(core.occupancy().prefilling + core.occupancy().decoding)
            return step()

        core._batch.step = counted  # type: ignore[method-assign]

    made = Running(count, deaf={2})
    made.worker.start()
    made.worker.ready.result(SECONDS)
    yield made, rows
    made.worker.stop()


def test_those_that_are_looked_up_together_begin_together(
    steps: tuple[Running, "queue.SimpleQueue[int]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.worker, "GATHER_SECONDS", SECONDS)
    running, rows = steps
    go_on = running.hold()
    replies = [running.submit(request_id) for request_id in (1, 2)]
    go_on()
    until(running.worker._inbox.empty, "the worker to take both")
    time.sleep(0.05)  # in which it would begin with the one that is answered
    assert rows.empty()
    running.worker.post(lambda core: core.looked_up(2, None))
    assert rows.get(timeout=SECONDS) == 2
    assert all(isinstance(last(events), Done) for events in replies)


def test_the_first_step_waits_for_a_request_that_is_being_prepared(
    steps: tuple[Running, "queue.SimpleQueue[int]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.worker, "GATHER_SECONDS", SECONDS)
    running, rows = steps
    with running.worker.preparing():
        replies = [running.submit(1)]
        until(running.worker._inbox.empty, "the worker to take it")
        time.sleep(0.05)
        assert rows.empty()
    replies.append(running.submit(3))
    assert rows.get(timeout=SECONDS) == 2
    assert all(isinstance(last(events), Done) for events in replies)


def test_a_lookup_without_an_answer_keeps_nobody_waiting(
    steps: tuple[Running, "queue.SimpleQueue[int]"],
) -> None:
    running, rows = steps
    go_on = running.hold()
    unanswered, reply = running.submit(2), running.submit(1)
    go_on()
    assert isinstance(last(reply), Done)
    assert rows.get(timeout=SECONDS) == 1
    assert unanswered.empty()
