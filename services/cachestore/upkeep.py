"""What the daemon does between calls: it ends what has lapsed, and looks after itself."""

import asyncio
import gc
from collections.abc import Callable

from cachestore.check import Check
from cachestore.compaction import Move
from cachestore.store import Store

CHECK_SECONDS = 60.0
RETIRE_SECONDS = 60.0
# Of compaction, and of a check, each second: it takes at most about a third of that. Calls come in
# between them.
STEPS_MAX = 100
_PAUSE_SECONDS = 0.002
_YOUNG_OBJECTS = 5_000
_YOUNG_COLLECTIONS_MAX = 10
_NEVER = 1 << 30


def calm_collector() -> None:
    """Keep Python's garbage collector from stalling the event loop.

    A collection of all generations takes 0.3 s when 65,000 records are held, and even one of the
    second generation took 0.18 s. Records are no cycles: they go when they are counted out. So
    only young objects are looked at as a matter of course, which takes below 1 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, _NEVER, _NEVER)


class Upkeep:
    """`tick` is called about once a second; chores wait for a second without calls.

    `calls` says how many there have been, and `retire` gives empty slabs back, after a longer
    time without calls.
    """

    def __init__(
        self,
        store: Store,
        clock: Callable[[], float],
        calls: Callable[[], int],
        retire: Callable[[], None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._calls = calls
        self._retire = retire
        self._busy_until = clock()
        self._calls_seen = 0
        self._idle = False
        self._check = Check(store)
        self._next_check = clock() + CHECK_SECONDS

    def tick(self) -> None:
        now = self._clock()
        self._store.expire(now)
        calls = self._calls()
        self._idle = calls == self._calls_seen
        if self._idle:
            self._collect()
            if now - self._busy_until >= RETIRE_SECONDS and self._store.sound:
                self._retire()
        else:
            self._busy_until = now
        self._calls_seen = calls

    async def compact(self, move: Move, stopping: Callable[[], bool]) -> None:
        """Bring free bytes together, as far as one second allows it."""
        for _ in range(STEPS_MAX):
            if stopping() or not self._store.compact(move):
                return
            await asyncio.sleep(_PAUSE_SECONDS)

    async def check(self, stopping: Callable[[], bool]) -> None:
        """Go on checking the store as far as one second allows it, until somebody calls. Begins at
        most once in CHECK_SECONDS, and not when nothing has changed since the last check."""
        if not self._idle or self._clock() < self._next_check:
            return
        for _ in range(STEPS_MAX):
            if stopping() or self._check.over or self._calls() != self._calls_seen:
                return
            self._check.step()
            if self._check.over:
                self._next_check = self._clock() + CHECK_SECONDS
            await asyncio.sleep(_PAUSE_SECONDS)

    def _collect(self) -> None:
        """Whatever is alive when nothing happens is here to stay: set it aside.

        Young garbage goes first: frozen, it would stay for good, a little each time that a session
        ends. After many young collections, looking at what survived them would take too long;
        what garbage is among it stays, a few cycles that were in use at a bad moment.
        """
        _, collections, _ = gc.get_count()
        gc.collect(1 if collections <= _YOUNG_COLLECTIONS_MAX else 0)
        gc.freeze()
        gc.collect(1)  # of next to nothing: it sets the count of young collections back
