"""SIGINT and SIGTERM before the engine serves: the process ends at once, whatever it is at.

A thread that loads or downloads cannot be stopped, and Python waits for it at exit. So the main
thread unwinds, which gives its files back, and then leaves through `os._exit`.
"""

import os
import signal
from types import FrameType
from typing import NoReturn

ENDING = (signal.SIGINT, signal.SIGTERM)


class Interrupted(SystemExit):
    """One of them came; raised in the main thread. A SystemExit, for asyncio keeps others."""

    def __init__(self, number: int) -> None:
        super().__init__(exit_code(number))
        self.number = number


def exit_code(number: int) -> int:
    """What a shell reports of a process that this signal ended."""
    return 128 + number


def interrupt() -> None:
    """From now on the first signal raises Interrupted, and a second one ends the process."""
    for number in ENDING:
        signal.signal(number, _interrupt)


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    for each in ENDING:
        signal.signal(each, _exit)
    raise Interrupted(number)


def _exit(number: int, _frame: FrameType | None) -> NoReturn:
    os._exit(exit_code(number))
