"""How a call reaches the store: with a session, a slab when it needs one, and a status."""

import asyncio
import logging
from collections.abc import Callable, MutableMapping
from typing import Any, TypeVar

import grpc

from cachestore import shm
from cachestore.frame import SESSION_METADATA
from cachestore.retirement import Slab
from cachestore.session import SessionServer
from cachestore.store import NeedSlab, RefusalCode, Refused, Store
from cachestore.waiting import WaitingRoom

Context = grpc.aio.ServicerContext[Any, Any]
_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)


class RowsToCome(Exception):
    """Somebody computes rows that would serve the call: it may wait for them."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"rows may come within {seconds} s")
        self.seconds = seconds


class Calls:
    """Runs calls of `sessions` on `store`, and makes the slabs that it asks for.

    `count` says how many there have been of engines; looking on is no work.
    """

    def __init__(
        self,
        *,
        store: Store,
        slabs: MutableMapping[int, Slab],
        sessions: SessionServer,
        clock: Callable[[], float],
    ) -> None:
        self.count = 0
        self.waiting = WaitingRoom()
        store.listen(self.waiting.wake)
        self._store = store
        self._slabs = slabs
        self._sessions = sessions
        self._clock = clock
        self._growth: asyncio.Task[OSError | None] | None = None

    def now(self) -> float:
        return self._clock()

    def session(self, context: Context) -> int | None:
        """The caller's, unless it has ended."""
        return self._sessions.find(_token(context))

    async def run(
        self, context: Context, call: Callable[[int, float], _Result], counted: bool = True
    ) -> _Result:
        """Answers with `call(session, now)`, or ends the call with a status."""
        self.count += counted
        try:
            return await self._attempt(context, call)
        except Refused as refusal:
            code, message = grpc.StatusCode[refusal.code.value], refusal.message
        except Exception:
            _log.exception("a call failed")
            code, message = grpc.StatusCode.INTERNAL, "failed; see the log of cachestore"
        # Raises something else when the client has just gone, which is no failure of the store.
        await context.abort(code, message)

    async def _attempt(self, context: Context, call: Callable[[int, float], _Result]) -> _Result:
        """Adds slabs as long as `call` asks for one, and waits as long as it wants to.

        Nothing is awaited between the check of the session and the call, so a session that ends
        cannot leave anything behind in the store.
        """
        error: OSError | None = None
        while True:
            session = self.session(context)
            if session is None:
                raise Refused(
                    RefusalCode.UNAUTHENTICATED,
                    f"{SESSION_METADATA}: not the token of an open session",
                )
            try:
                return call(session, self._clock())
            except NeedSlab as need:
                size = need.bytes
            except RowsToCome as hope:
                await self.waiting.wait(hope.seconds)
                continue
            if error is not None:
                raise Refused(
                    RefusalCode.RESOURCE_EXHAUSTED,
                    f"no shared memory for a slab of {size} bytes: {error.strerror}",
                )
            # Without a slab the call may find room by eviction.
            error = await self._grow(size)

    async def _grow(self, size: int) -> OSError | None:
        """Waits for one more slab. Whoever comes while one is being made waits for that one.

        Only one at a time, so that several callers together cannot exceed the budget; and as a
        task of its own, so that a caller that is cancelled does not lose the descriptor.
        """
        if self._growth is None or self._growth.done():
            self._growth = asyncio.create_task(self._add_slab(size))
        return await asyncio.shield(self._growth)

    async def _add_slab(self, size: int) -> OSError | None:
        try:
            fd = await asyncio.to_thread(shm.create_slab, size)
        except OSError as error:
            _log.error("no shared memory for a slab of %d bytes: %s", size, error)
            self._store.slab_failed(self._clock())
            return error
        slab_id = self._store.add_slab(size)
        self._slabs[slab_id] = Slab(fd, size)
        _log.info("slab %d of %d bytes added", slab_id, size)
        return None


def _token(context: Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == SESSION_METADATA and isinstance(value, str):
            return value
    return ""
