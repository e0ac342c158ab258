"""The gRPC face of the store: sessions and status codes outside, plain calls inside."""

import os
import time
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from typing import TypeVar

from cachestore import messages
from cachestore.calls import Calls, Context, RowsToCome
from cachestore.catalog_service import CatalogService
from cachestore.config import StoreConfig
from cachestore.histogram import Histogram, doubling
from cachestore.retirement import Retirement, Slab
from cachestore.session import SessionServer
from cachestore.store import Match, NewCheckpoint, Query, Sizes, Store, Target
from cachestore.v1 import cachestore_pb2 as pb
from cachestore.validation import require_wait

_Result = TypeVar("_Result")

# From 1 µs to 28 s.
_LOOKUP_SECONDS = doubling(1e-6, 100, per_doubling=4)
# Of these classes, in one that is shown.
_CLASSES_SHOWN = 8


class CachestoreService(CatalogService):
    """Answers calls of `sessions` from `store`, whose slabs are in `slabs`."""

    def __init__(
        self,
        *,
        store: Store,
        config: StoreConfig,
        slabs: MutableMapping[int, Slab],
        sessions: SessionServer,
        retirement: Retirement,
        clock: Callable[[], float],
        version: str,
    ) -> None:
        calls = Calls(store=store, slabs=slabs, sessions=sessions, clock=clock)
        super().__init__(store, calls, slabs, retirement)
        self._config = config
        self._clock = clock
        self._version = version
        self._started = clock()
        self._lookup_seconds = Histogram(_LOOKUP_SECONDS)

    @property
    def calls(self) -> int:
        return self._calls.count

    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupResponse:
        deadline = self._clock() + request.wait_seconds
        query = Query(
            namespace=request.namespace,
            tokens=request.tokens,
            limit=request.limit,
            announce=request.announce,
            checkpointed=request.checkpointed,
            checkpoints=tuple(request.checkpoints),
            parting_distance=request.parting_distance,
        )

        def lookup(session: int, now: float) -> Match:
            """In one step, so that of several that waited for the same rows one is told to
            compute them, and the others see its announcement."""
            nonlocal query
            require_wait(request.wait_seconds)
            may_wait = now < deadline and len(self._calls.waiting) < self._config.max_waiting
            if may_wait and self._store.rows_to_come(query, now):
                query = replace(query, waited=True)
                raise RowsToCome(deadline - now)
            return self._store.lookup(session, query, now)

        match = await self._calls.run(context, self._timed(lookup))
        return pb.LookupResponse(
            retired_slab_ids=self._retired(context),
            kind=pb.MatchKind.ValueType(match.kind),
            rows=match.rows,
            spans=messages.spans(match.spans),
            checkpoint=messages.checkpoint(match),
            lease_id=match.lease_id,
            lease_seconds=self._config.lease_seconds if match.lease_id else 0.0,
            parting=match.parting,
        )

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewResponse:
        valid = await self._calls.run(
            context,
            lambda session, now: self._store.renew(session, request.lease_ids, now),
            counted=False,
        )
        return pb.RenewResponse(valid=valid, retired_slab_ids=self._retired(context))

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        await self._calls.run(
            context,
            lambda session, now: self._store.release(session, request.lease_ids, now),
            counted=False,
        )
        return pb.ReleaseResponse()

    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.ReserveResponse:
        target = Target(
            namespace=request.namespace,
            tokens=request.tokens,
            first_row=request.first_row,
            record_overhead_bytes=request.record_overhead_bytes,
            row_bytes=request.row_bytes,
            label=request.label,
            checkpointed=request.checkpointed,
            checkpoints=tuple(NewCheckpoint(c.position, c.bytes) for c in request.checkpoints),
            conversation_start=request.conversation_start,
        )
        reservation = await self._calls.run(
            context, lambda session, now: self._store.reserve(session, target, now)
        )
        return messages.reservation(reservation, self._config.reservation_seconds)

    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitResponse:
        sizes = Sizes(request.record_bytes, request.checkpoint_bytes)
        inserted = await self._calls.run(
            context,
            lambda session, now: self._store.commit(session, request.reservation_id, sizes, now),
        )
        return pb.CommitResponse(
            rows_inserted=inserted.rows, checkpoints_inserted=inserted.checkpoints
        )

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        await self._calls.run(
            context, lambda session, now: self._store.abort(session, request.reservation_id, now)
        )
        return pb.AbortResponse()

    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsResponse:
        return await self._calls.run(context, lambda _session, now: self.stats(now), counted=False)

    def stats(self, now: float) -> pb.StatsResponse:
        """On the event loop, as everything that touches the store."""
        seconds = self._lookup_seconds
        answer = messages.stats(self._store.statistics(now))
        answer.version, answer.pid = self._version, os.getpid()
        answer.uptime_seconds = now - self._started
        answer.waiting = len(self._calls.waiting)
        answer.lookups.seconds_p50 = seconds.quantile(0.5)
        answer.lookups.seconds_p99 = seconds.quantile(0.99)
        answer.lookups.seconds.CopyFrom(messages.histogram(seconds.coarser(_CLASSES_SHOWN)))
        return answer

    def _retired(self, context: Context) -> list[int]:
        """What the caller should unmap."""
        session = self._calls.session(context)
        return self._retirement.held_by(session) if session is not None else []

    def _timed(self, call: Callable[[int, float], _Result]) -> Callable[[int, float], _Result]:
        """The same, noting how long it takes when it gives a result."""

        def timed(session: int, now: float) -> _Result:
            start = time.perf_counter()
            result = call(session, now)
            self._lookup_seconds.add(time.perf_counter() - start)
            return result

        return timed
