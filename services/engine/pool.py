"""Threads for calls that mostly wait."""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)

Call = Callable[[], object]
# Where an idle thread waits for its next call; None: there is none to come.
_Inbox = queue.SimpleQueue[Call | None]

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
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        # The last one was busy last. It gets the next call, so that the others may end.
        self._idle: list[_Inbox] = []
        # Calls that wait for a thread.
        self._waiting: deque[Call] = deque()
        self._over = False

    @property
    def threads(self) -> int:
        return len(self._threads)

    def submit(self, call: Call) -> None:
        """Raises RuntimeError after `shutdown`, and when the system has no thread to run it on."""
        with self._lock:
            if self._over:
                raise RuntimeError(f"{self._name}: submitted after shutdown")
            if self._idle:
                self._idle.pop().put(call)
            elif len(self._threads) == self._threads_max or not self._begin(call):
                self._waiting.append(call)

    def shutdown(self) -> None:
        """Waits until all calls that were submitted are over."""
        with self._lock:
            self._over = True
            while self._idle:
                self._idle.pop().put(None)
            threads = tuple(self._threads)
        for thread in threads:
            thread.join()

    def _begin(self, call: Call) -> bool:
        """False when another thread has to take it, for there can be no more of them."""
        thread = threading.Thread(target=self._run, args=(call,), name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not self._threads:
                raise
            return False
        self._threads.add(thread)
        return True

    def _run(self, call: Call | None) -> None:
        inbox: _Inbox = queue.SimpleQueue()
        while call is not None:
            try:
                call()
            except Exception:
                log.exception("%s: a call failed", self._name)
            call = None  # what it holds must not wait for the next one
            call = self._next(inbox)

    def _next(self, inbox: _Inbox) -> Call | None:
        """None when the thread is to end."""
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            if self._over:
                self._threads.discard(threading.current_thread())
                return None
            self._idle.append(inbox)
        try:
            return inbox.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            with self._lock:
                if inbox in self._idle:
                    self._idle.remove(inbox)
                    self._threads.discard(threading.current_thread())
                    return None
        # Somebody has just put one there.
        return inbox.get()
