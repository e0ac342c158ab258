"""A store without sockets, whose slabs are byte arrays that the test itself writes and reads."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cachestore.config import StoreConfig
from cachestore.store import (
    Extent,
    Inserted,
    Match,
    NeedSlab,
    NewCheckpoint,
    Piece,
    Query,
    RefusalCode,
    Refused,
    Reservation,
    Sizes,
    Store,
    Target,
)

NAMESPACE = bytes(range(32))
OTHER_NAMESPACE = bytes(range(32, 64))
OVERHEAD_BYTES = 32
ROW_BYTES = 56
CHECKPOINT_BYTES = 300
# Four rows of 56 bytes and the overhead make extents of exactly 256 bytes.
RECORD_TOKENS = 4
RECORDS_PER_RESERVATION = 4


def packed(ids: Sequence[int]) -> bytes:
    return np.array(ids, dtype="<u4").tobytes()


def tiny_config(slabs: int = 4, slab_bytes: int = 1024) -> StoreConfig:
    return StoreConfig(
        budget_bytes=slabs * slab_bytes,
        slab_bytes_override=slab_bytes,
        record_tokens=RECORD_TOKENS,
        max_records_per_reservation=RECORDS_PER_RESERVATION,
    )


@dataclass
class Bench:
    """A store with one session of its own, and the memory behind it."""

    store: Store
    slabs: dict[int, bytearray] = field(default_factory=dict)
    session: int = 0
    now: float = 0.0
    memory_bytes: float = math.inf

    def __post_init__(self) -> None:
        self.session = self.store.open_session(counted=True)

    def memory(self, extent: Extent) -> memoryview:
        slab = memoryview(self.slabs[extent.slab_id])
        return slab[extent.offset : extent.offset + extent.length]

    def move(self, source: Extent, target: Extent) -> None:
        assert source.length == target.length
        self.memory(target)[:] = bytes(self.memory(source))

    def reserve(
        self,
        ids: Sequence[int],
        namespace: bytes = NAMESPACE,
        first_row: int = 0,
        row_bytes: int = ROW_BYTES,
        session: int = 0,
        checkpoints: Sequence[int] | None = None,
        conversation_start: int = 0,
    ) -> Reservation:
        """Adds slabs as asked for, as the server does, within `memory_bytes`. With positions of
        checkpoints, or none of them, the namespace is a checkpointed one."""
        new = tuple(NewCheckpoint(position, CHECKPOINT_BYTES) for position in checkpoints or ())
        target = Target(
            namespace,
            packed(ids),
            first_row,
            OVERHEAD_BYTES,
            row_bytes,
            "a model",
            checkpoints is not None,
            new,
            conversation_start,
        )
        failed = False
        while True:
            try:
                return self.store.reserve(session or self.session, target, self.now)
            except NeedSlab as need:
                if failed:
                    raise Refused(RefusalCode.RESOURCE_EXHAUSTED, "no memory") from need
                if sum(map(len, self.slabs.values())) + need.bytes > self.memory_bytes:
                    failed = True
                    self.store.slab_failed(self.now)
                    continue
                self.slabs[self.store.add_slab(need.bytes)] = bytearray(need.bytes)

    def commit(self, reservation: Reservation, session: int = 0, row_bytes: int = ROW_BYTES) -> int:
        """Returns the rows inserted."""
        return self.commit_all(reservation, session, row_bytes).rows

    def commit_all(
        self, reservation: Reservation, session: int = 0, row_bytes: int = ROW_BYTES
    ) -> Inserted:
        sizes = Sizes(
            record_sizes(reservation.pieces, row_bytes),
            [CHECKPOINT_BYTES] * len(reservation.checkpoints),
        )
        return self.store.commit(session or self.session, reservation.id, sizes, self.now)

    def write(
        self,
        ids: Sequence[int],
        namespace: bytes = NAMESPACE,
        checkpoints: Sequence[int] | None = None,
        conversation_start: int = 0,
    ) -> int:
        """Returns the rows inserted."""
        inserted, end = 0, 0
        while end < len(ids):
            reservation = self.reserve(
                ids,
                namespace,
                checkpoints=checkpoints,
                conversation_start=conversation_start,
            )
            inserted, end = inserted + self.commit(reservation), reservation.end
        return inserted

    def lookup(
        self,
        ids: Sequence[int],
        limit: int | None = None,
        namespace: bytes = NAMESPACE,
        session: int = 0,
        announce: bool = False,
        checkpoints: Sequence[int] | None = None,
        parting_distance: int = 0,
    ) -> Match:
        """With positions of checkpoints to be announced, or none of them, only rows with one."""
        query = self.query(ids, limit, namespace, announce, checkpoints, parting_distance)
        return self.store.lookup(session or self.session, query, self.now)

    def rows_to_come(
        self,
        ids: Sequence[int],
        limit: int | None = None,
        namespace: bytes = NAMESPACE,
        checkpoints: Sequence[int] | None = None,
        waited: bool = False,
    ) -> int:
        query = self.query(ids, limit, namespace, checkpoints=checkpoints)
        return self.store.rows_to_come(replace(query, waited=waited), self.now)

    def query(
        self,
        ids: Sequence[int],
        limit: int | None = None,
        namespace: bytes = NAMESPACE,
        announce: bool = False,
        checkpoints: Sequence[int] | None = None,
        parting_distance: int = 0,
    ) -> Query:
        rows = len(ids) if limit is None else limit
        positions, needed = tuple(checkpoints or ()), checkpoints is not None
        return Query(namespace, packed(ids), rows, announce, needed, positions, parting_distance)

    def peek(
        self,
        ids: Sequence[int],
        namespace: bytes = NAMESPACE,
        checkpoints: Sequence[int] | None = None,
    ) -> int:
        """Rows that are served, without a lease that stays."""
        match = self.lookup(ids, namespace=namespace, checkpoints=checkpoints)
        self.store.release(self.session, [match.lease_id], self.now)
        return match.rows


def record_sizes(pieces: Sequence[Piece], row_bytes: int = ROW_BYTES) -> list[int]:
    return [OVERHEAD_BYTES + piece.rows * row_bytes for piece in pieces]


def write_many(bench: Bench, records: int) -> int:
    """Rows behind a hundred common beginnings, in a namespace of their own; returns `records`."""
    held = len(bench.store.stored)
    for number in itertools.count():
        if len(bench.store.stored) == held + records:
            return records
        bench.write([number % 100] * RECORD_TOKENS + [number] * RECORD_TOKENS, OTHER_NAMESPACE)
    raise AssertionError("there is always room")
