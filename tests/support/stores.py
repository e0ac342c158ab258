"""A store without sockets, whose slabs are byte arrays that the test itself writes and reads."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cachestore.config import StoreConfig
from cachestore.store import (
    Extent,
    Match,
    NeedSlab,
    Piece,
    RefusalCode,
    Refused,
    Reservation,
    Store,
)

NAMESPACE = bytes(range(32))
OTHER_NAMESPACE = bytes(range(32, 64))
OVERHEAD_BYTES = 32
ROW_BYTES = 56
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
    ) -> Reservation:
        """Adds slabs as asked for, as the server does, within `memory_bytes`."""
        failed = False
        while True:
            try:
                return self.store.reserve(
                    session or self.session,
                    namespace,
                    packed(ids),
                    first_row,
                    OVERHEAD_BYTES,
                    row_bytes,
                    "a model",
                    self.now,
                )
            except NeedSlab as need:
                if failed:
                    raise Refused(RefusalCode.RESOURCE_EXHAUSTED, "no memory") from need
                if sum(map(len, self.slabs.values())) + need.bytes > self.memory_bytes:
                    failed = True
                    self.store.slab_failed(self.now)
                    continue
                self.slabs[self.store.add_slab(need.bytes)] = bytearray(need.bytes)

    def commit(self, reservation: Reservation, session: int = 0, row_bytes: int = ROW_BYTES) -> int:
        return self.store.commit(
            session or self.session,
            reservation.id,
            record_sizes(reservation.pieces, row_bytes),
            self.now,
        )

    def write(self, ids: Sequence[int], namespace: bytes = NAMESPACE) -> int:
        inserted, end = 0, 0
        while end < len(ids):
            reservation = self.reserve(ids, namespace)
            inserted, end = inserted + self.commit(reservation), reservation.end
        return inserted

    def lookup(
        self,
        ids: Sequence[int],
        limit: int | None = None,
        namespace: bytes = NAMESPACE,
        session: int = 0,
        announce: bool = False,
    ) -> Match:
        return self.store.lookup(
            session or self.session,
            namespace,
            packed(ids),
            len(ids) if limit is None else limit,
            self.now,
            announce,
        )

    def rows_to_come(self, ids: Sequence[int], limit: int | None = None) -> int:
        rows = len(ids) if limit is None else limit
        return self.store.rows_to_come(NAMESPACE, packed(ids), rows, self.now)

    def peek(self, ids: Sequence[int], namespace: bytes = NAMESPACE) -> int:
        """Rows held, without a lease that stays."""
        match = self.lookup(ids, namespace=namespace)
        self.store.release(self.session, [match.lease_id], self.now)
        return match.rows


def record_sizes(pieces: Sequence[Piece], row_bytes: int = ROW_BYTES) -> list[int]:
    return [OVERHEAD_BYTES + piece.rows * row_bytes for piece in pieces]
