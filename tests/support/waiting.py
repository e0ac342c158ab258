"""Waiting for what another process does, without guessing how long it takes."""

import time
from collections.abc import Callable
from typing import TypeVar

_Found = TypeVar("_Found")

_POLL_SECONDS = 0.01


def until(probe: Callable[[], _Found | None], what: str, seconds: float = 10.0) -> _Found:
    """The first true value of `probe`; fails when there is none in time."""
    deadline = time.monotonic() + seconds
    while True:
        found = probe()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds} s for {what}")
        time.sleep(_POLL_SECONDS)
