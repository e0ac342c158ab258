"""Calls about single records: those of cachestore-admin, and an engine's that pins a prompt."""

import asyncio
from abc import ABC
from collections.abc import AsyncIterator, Mapping, Sequence

from cachestore import messages, record
from cachestore.calls import Calls, Context
from cachestore.catalog import Evicted, busiest
from cachestore.memory import Memory
from cachestore.node import Record
from cachestore.retirement import Retirement, Slab
from cachestore.store import Store
from cachestore.v1 import cachestore_pb2 as pb
from cachestore.v1 import cachestore_pb2_grpc
from cachestore.validation import invalid, require_limit, require_namespace
from cachestore.verify import verify

# Dropping so many takes about 5 ms.
_EVICT_RECORDS = 256
# Ranking so many takes about 0.5 ms.
_RANK_RECORDS = 512


class CatalogService(cachestore_pb2_grpc.CachestoreServicer, ABC):
    def __init__(
        self, store: Store, calls: Calls, slabs: Mapping[int, Slab], retirement: Retirement
    ) -> None:
        self._store = store
        self._calls = calls
        self._slabs = slabs
        self._retirement = retirement

    async def ListNamespaces(
        self, request: pb.ListNamespacesRequest, context: Context
    ) -> pb.ListNamespacesResponse:
        statistics = await self._calls.run(
            context, lambda _session, now: self._store.statistics(now), counted=False
        )
        return pb.ListNamespacesResponse(
            namespaces=[messages.namespace(each) for each in statistics.namespaces]
        )

    async def ListEntries(
        self, request: pb.ListEntriesRequest, context: Context
    ) -> pb.ListEntriesResponse:
        def entries(_session: int, now: float) -> list[pb.Entry]:
            if request.namespace:
                require_namespace(request.namespace)
            require_limit(request.limit)
            catalog = self._store.catalog(now)
            found = catalog.entries(request.namespace, request.after_record_id, request.limit, now)
            return list(map(messages.entry, found))

        return pb.ListEntriesResponse(
            entries=await self._calls.run(context, entries, counted=False)
        )

    async def ListPrefixes(
        self, request: pb.ListPrefixesRequest, context: Context
    ) -> pb.ListPrefixesResponse:
        def records(_session: int, now: float) -> list[Record]:
            require_limit(request.limit)
            return self._store.catalog(now).records()

        held = await self._calls.run(context, records, counted=False)
        best: list[Record] = []
        # Whoever looks on must not keep a lookup waiting: a piece at a time.
        for start in range(0, len(held), _RANK_RECORDS):
            best = busiest([*best, *held[start : start + _RANK_RECORDS]], request.limit)
            await asyncio.sleep(0)
        now = self._calls.now()
        catalog = self._store.catalog(now)
        return pb.ListPrefixesResponse(
            entries=[
                messages.entry(catalog.entry(record, now))
                for record in best
                if record.id in self._store.stored
            ]
        )

    async def Evict(self, request: pb.EvictRequest, context: Context) -> pb.EvictResponse:
        def chosen(_session: int, now: float) -> list[int]:
            catalog = self._store.catalog(now)
            match request.WhichOneof("what"):
                case "namespace":
                    require_namespace(request.namespace)
                    return catalog.everything(request.namespace)
                case "record_id":
                    return catalog.behind(request.record_id)
                case "everything" if request.everything:
                    return catalog.everything()
            raise invalid("what is not set; give a namespace, a record_id, or everything")

        def evict(record_ids: Sequence[int]) -> Evicted:
            return self._store.catalog(self._calls.now()).evict(record_ids)

        ids = await self._calls.run(context, chosen)
        answer = pb.EvictResponse()
        for start in range(0, len(ids), _EVICT_RECORDS):
            evicted = evict(ids[start : start + _EVICT_RECORDS])
            answer.records += evicted.records
            answer.checkpoints += evicted.checkpoints
            answer.bytes += evicted.bytes
            answer.kept += evicted.kept
            await asyncio.sleep(0)
        self._retirement.retire()
        return answer

    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinResponse:
        def pin(_session: int, now: float) -> pb.PinResponse:
            catalog = self._store.catalog(now)
            record_id = request.record_id
            if request.WhichOneof("what") == "sequence":
                sequence = request.sequence
                record_id = catalog.end_of(sequence.namespace, sequence.tokens).id
            kept = catalog.pin(record_id)
            return pb.PinResponse(
                records=len(kept.path),
                checkpoints=len(kept.checkpoints),
                bytes=sum(stored.bytes_held for stored in kept.stored),
                record_id=record_id,
            )

        return await self._calls.run(context, pin)

    async def Unpin(self, request: pb.UnpinRequest, context: Context) -> pb.UnpinResponse:
        await self._calls.run(
            context, lambda _session, now: self._store.catalog(now).unpin(request.record_id)
        )
        return pb.UnpinResponse()

    async def Verify(
        self, request: pb.VerifyRequest, context: Context
    ) -> AsyncIterator[pb.VerifyResponse]:
        memory = Memory(self._slabs)
        steps = await self._calls.run(
            context, lambda _session, now: verify(self._store, now, memory.view), counted=False
        )
        for progress in steps:
            yield messages.progress(progress)
            await asyncio.sleep(0)

    async def Inspect(self, request: pb.InspectRequest, context: Context) -> pb.InspectResponse:
        def inspect(_session: int, now: float) -> pb.InspectResponse:
            catalog = self._store.catalog(now)
            held = catalog.find(request.record_id)
            size = min(held.span.record_bytes, record.HEADER_BYTES_MAX)
            head = bytes(Memory(self._slabs).view(held.span.extent)[:size])
            return pb.InspectResponse(entry=messages.entry(catalog.entry(held, now)), head=head)

        return await self._calls.run(context, inspect, counted=False)
