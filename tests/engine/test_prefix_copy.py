"""Blocks on their way out of the store: two threads for one."""

import logging
import queue
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.found import Found
from engine.prefix import Prefix, Receiver
from tests.support.waiting import until

SECONDS = 30.0
NOBODY = cast(Found, SimpleNamespace())  # nothing is asked of it before the last block


class Answers:
    """What the core is told."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Callable[[Receiver], None]] = queue.SimpleQueue()
        self.post = self._inbox.put
        self.valid: list[bool] = []

    def copied(self, _request_id: int, valid: bool) -> None:
        self.valid.append(valid)

    def take(self) -> bool:
        self._inbox.get(timeout=SECONDS)(cast(Receiver, self))
        return self.valid[-1]


def block(copy: Callable[[], int]) -> Any:
    return SimpleNamespace(copy=copy)


def test_two_threads_share_a_block() -> None:
    answers = Answers()
    prefix = Prefix(answers.post)
    both = threading.Barrier(2)

    def copy() -> int:
        both.wait(SECONDS)
        return 10

    prefix.copy(1, NOBODY, block(copy), last=False)
    assert answers.take()
    assert prefix.status.attached.bytes == 20
    prefix.close()


@pytest.mark.parametrize("fails", [0, 1])
def test_a_share_that_fails_is_a_miss(fails: int) -> None:
    answers = Answers()
    prefix = Prefix(answers.post)
    both, calls = threading.Barrier(2), iter(range(2))

    def copy() -> int:
        number = next(calls)
        both.wait(SECONDS)
        if number == fails:
            raise MemoryError
        return 10

    prefix.copy(1, NOBODY, block(copy), last=False)
    assert not answers.take()
    assert prefix.status.attached.bytes == 0
    prefix.close()


def test_blocks_that_wait_when_it_ends_are_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    answers = Answers()
    prefix = Prefix(answers.post)
    both, go_on = threading.Barrier(3), threading.Event()

    def copy() -> int:
        both.wait(SECONDS)
        go_on.wait(SECONDS)
        return 10

    def unwanted() -> int:
        raise AssertionError("nobody asks for it any more")

    prefix.copy(1, NOBODY, block(copy), last=False)
    both.wait(SECONDS)
    prefix.copy(2, NOBODY, block(unwanted), last=False)
    closing = threading.Thread(target=prefix.close)
    closing.start()
    # It leaves one mark there, which ends the threads.
    until(lambda: prefix._copiers._work_queue.qsize() == 1, "what waits to be cancelled")
    go_on.set()
    closing.join(SECONDS)
    assert answers.take()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
