"""What the daemon does between calls: it ends what has lapsed, and looks after itself."""

import asyncio
import gc
import logging
import time
from collections.abc import Callable

from cachestore.compaction import Move
from cachestore.store import Store

CHECK_SECONDS = 60.0
RETIRE_SECONDS = 60.0
STALL_SECONDS_MAX = 0.02
# Of each second, at most a third goes into compaction, and calls come in between its steps.
_COMPACTION_STEPS_MAX = 100
_COMPACTION_PAUSE_SECONDS = 0.002
# A slow machine's, until a check of so many records has been measured: of fewer, most of the time
# does not depend on how many they are.
_CHECK_SECONDS_PER_RECORD = 2e-5
_RECORDS_MEASURED_MIN = 100
_YOUNG_OBJECTS = 5_000
_YOUNG_COLLECTIONS_MAX = 10
_NEVER = 1 << 30

_log = logging.getLogger(__name__)


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
    time without calls. A store that contradicts itself is made to fail.
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
        self._calls_seen = self._calls_checked = 0
        self._next_check = clock() + CHECK_SECONDS
        self._seconds_per_record = _CHECK_SECONDS_PER_RECORD

    def tick(self) -> None:
        now = self._clock()
        self._store.expire(now)
        calls = self._calls()
        if calls == self._calls_seen:
            self._collect()
            if now - self._busy_until >= RETIRE_SECONDS and self._store.sound:
                self._retire()
            # Without a call since the last check there is nothing new to find.
            if now >= self._next_check and calls != self._calls_checked:
                self._calls_checked = calls
                self._next_check = now + CHECK_SECONDS
                self._check()
        else:
            self._busy_until = now
        self._calls_seen = calls

    async def compact(self, move: Move, stopping: Callable[[], bool]) -> None:
        """Bring free bytes together, as far as one second allows it."""
        for _ in range(_COMPACTION_STEPS_MAX):
            if stopping() or not self._store.compact(move):
                return
            await asyncio.sleep(_COMPACTION_PAUSE_SECONDS)

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

    def _check(self) -> None:
        records = len(self._store.stored)
        if records * self._seconds_per_record > STALL_SECONDS_MAX:
            return  # `cachestore-admin verify` checks it, however long that takes
        start = time.thread_time()  # what other programs take is no property of the store
        try:
            self._store.check()
        except Exception:
            _log.exception("the store contradicts itself and serves nothing from now on")
            self._store.fail()
        if records >= _RECORDS_MEASURED_MIN:
            self._seconds_per_record = (time.thread_time() - start) / records
