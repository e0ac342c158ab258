"""SIGINT and SIGTERM: the first one ends the engine in order, a second one at once.

A thread that loads or downloads cannot be stopped, and Python waits for it at exit. So whoever
leaves such a thread behind unwinds the main thread, which gives its files back, and then ends the
process through `os._exit`.
"""

import asyncio
import os
import signal
from types import FrameType
from typing import NoReturn

ENDING = (signal.SIGINT, signal.SIGTERM)


class Leave(SystemExit):
    """A thread that cannot be stopped is left behind: end with `exit_code` through os._exit once
    the main thread is unwound. A SystemExit, for asyncio keeps others."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def exit_code(number: int) -> int:
    """What a shell reports of a process that this signal ended."""
    return 128 + number


def interrupt() -> None:
    """From now on the first signal raises Leave(0), for to end what has not begun is no failure;
    and a second one ends the process."""
    for number in ENDING:
        signal.signal(number, _interrupt)


def ending() -> "asyncio.Future[None]":
    """From now on the first signal sets this result, and a second one ends the process. Whoever
    runs the loop may set it too."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def end(number: int) -> None:
        if ended.done():
            os._exit(exit_code(number))  # whoever asks again does not want to wait
        ended.set_result(None)

    for number in ENDING:
        loop.add_signal_handler(number, end, number)
    return ended


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    for each in ENDING:
        signal.signal(each, _exit)
    raise Leave(0)


def _exit(number: int, _frame: FrameType | None) -> NoReturn:
    os._exit(exit_code(number))
