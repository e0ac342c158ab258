"""Sequences to put into a store, with bytes that can be told apart."""

from collections.abc import Sequence

import numpy as np

from cachestore.client import (
    Checkpoint,
    Client,
    Lease,
    NewCheckpoint,
    Piece,
    Span,
    StagedCheckpoint,
)

NAMESPACE = bytes(range(32))
OVERHEAD_BYTES = 100
ROW_BYTES = 1000
STATE_BYTES = 5000


def tokens(count: int, first: int = 0) -> bytes:
    """`count` token ids from `first` on, packed."""
    return np.arange(first, first + count, dtype="<u4").tobytes()


def payload(first_token: int, rows: int) -> bytes:
    """What the record of those rows holds."""
    record = np.arange(OVERHEAD_BYTES + rows * ROW_BYTES, dtype=np.int64)
    return (record * 31 + first_token).astype(np.uint8).tobytes()


def state(position: int) -> bytes:
    """What the record of a checkpoint holds."""
    return (np.arange(STATE_BYTES, dtype=np.int64) * 17 + position).astype(np.uint8).tobytes()


def write(
    client: Client,
    sequence: bytes,
    namespace: bytes = NAMESPACE,
    checkpoints: Sequence[int] | None = None,
    conversation_start: int = 0,
) -> int:
    """Stores the whole sequence; returns the rows that were inserted. With positions of
    checkpoints, or none of them, the namespace is a checkpointed one."""
    inserted, end = 0, 0
    while end < len(sequence) // 4:
        reservation = client.reserve(
            namespace,
            sequence,
            0,
            OVERHEAD_BYTES,
            ROW_BYTES,
            "test",
            checkpointed=checkpoints is not None,
            checkpoints=[NewCheckpoint(position, STATE_BYTES) for position in checkpoints or ()],
            conversation_start=conversation_start,
        )
        staged: list[Piece | StagedCheckpoint] = [*reservation.pieces, *reservation.checkpoints]
        records = [payload(piece.first_token, piece.rows) for piece in reservation.pieces]
        states = [state(checkpoint.position) for checkpoint in reservation.checkpoints]
        for each, record in zip(staged, (*records, *states), strict=True):
            client.extent(each)[: len(record)] = record
        inserted += client.commit(reservation.id, [*map(len, records)], [*map(len, states)])
        end = reservation.end
    return inserted


def records(client: Client, lease: Lease) -> list[memoryview]:
    """Those of its spans, and of its checkpoint."""
    held: list[Span | Checkpoint] = [*lease.spans]
    if lease.checkpoint is not None:
        held.append(lease.checkpoint)
    return [client.record(each) for each in held]


def is_intact(client: Client, lease: Lease) -> bool:
    """Whether all records of a lease, and its checkpoint, hold what `write` put there, in one go,
    from row 0 on."""
    if lease.checkpoint is not None:
        position = lease.checkpoint.position
        if position != lease.rows or bytes(client.record(lease.checkpoint)) != state(position):
            return False
    first_token = 0
    for span in lease.spans:
        rows = (span.record_bytes - OVERHEAD_BYTES) // ROW_BYTES
        if bytes(client.record(span)) != payload(first_token, rows):
            return False
        first_token += span.rows
    return first_token == lease.rows
