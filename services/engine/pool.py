"""Threads for calls that mostly wait."""

import logging
import threading
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)

# So long a thread without a call stays for the next one.
IDLE_SECONDS = 30.0


class WaitingPool:
    """Runs calls at once, as many side by side as there are, up to `threads_max`. Thread-safe.

    There are as many threads as calls were under way together of late. ThreadPoolExecutor never
    ends one, and with Python 3.12 it makes ever more of them: it takes a thread that waits for a
    call for a busy one, once another took the call for which it was woken (python/cpython#88354).
    """

    def __init__(self, threads_max: int, name: str) -> None:
        self._threads_max = threads_max
        self._name = name
        self._changed = threading.Condition()
        self._calls: deque[Callable[[], object]] = deque()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._over = False

    @property
    def threads(self) -> int:
        return len(self._threads)

    def submit(self, call: Callable[[], object]) -> None:
        """Raises RuntimeError after `shutdown`."""
        with self._changed:
            if self._over:
                raise RuntimeError(f"{self._name}: submitted after shutdown")
            self._calls.append(call)
            if len(self._calls) <= self._idle:
                self._changed.notify()
            elif len(self._threads) < self._threads_max:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._threads.add(thread)

    def shutdown(self) -> None:
        """Waits until all calls that were submitted are over."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
            threads = tuple(self._threads)
        for thread in threads:
            thread.join()

    def _run(self) -> None:
        while call := self._next():
            try:
                call()
            except Exception:
                log.exception("%s: a call failed", self._name)
            del call

    def _next(self) -> Callable[[], object] | None:
        """None when the thread is to end."""
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._calls or self._over, IDLE_SECONDS)
            self._idle -= 1
            if self._calls:
                return self._calls.popleft()
            self._threads.discard(threading.current_thread())
            return None
