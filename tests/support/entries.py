"""Sequences to put into a store, with bytes that can be told apart."""

import numpy as np

from cachestore.client import Client, Lease

NAMESPACE = bytes(range(32))
OVERHEAD_BYTES = 100
ROW_BYTES = 1000


def tokens(count: int, first: int = 0) -> bytes:
    """`count` token ids from `first` on, packed."""
    return np.arange(first, first + count, dtype="<u4").tobytes()


def payload(first_token: int, rows: int) -> bytes:
    """What the record of those rows holds."""
    record = np.arange(OVERHEAD_BYTES + rows * ROW_BYTES, dtype=np.int64)
    return (record * 31 + first_token).astype(np.uint8).tobytes()


def write(client: Client, sequence: bytes, namespace: bytes = NAMESPACE) -> int:
    """Stores the whole sequence; returns the rows that were inserted."""
    inserted, end = 0, 0
    while end < len(sequence) // 4:
        reservation = client.reserve(namespace, sequence, 0, OVERHEAD_BYTES, ROW_BYTES, "test")
        sizes = []
        for piece in reservation.pieces:
            record = payload(piece.first_token, piece.rows)
            client.extent(piece)[: len(record)] = record
            sizes.append(len(record))
        inserted, end = inserted + client.commit(reservation.id, sizes), reservation.end
    return inserted


def is_intact(client: Client, lease: Lease) -> bool:
    """Whether all records of a lease hold what `write` put there, in one go, from row 0 on."""
    first_token = 0
    for span in lease.spans:
        rows = (span.record_bytes - OVERHEAD_BYTES) // ROW_BYTES
        if bytes(client.record(span)) != payload(first_token, rows):
            return False
        first_token += span.rows
    return first_token == lease.rows
