"""Records as engines write them, small and with arbitrary rows."""

from collections.abc import Callable, Sequence

from cachestore import record
from cachestore.client import Client, NewCheckpoint
from tests.support.entries import NAMESPACE

SCHEMA = record.Schema(
    "none",
    tuple(
        record.PartSpec(
            "kv", name, (0, 1), {"name": "none"}, (record.ArraySpec("rows", "float32", 1, 8),)
        )
        for name in ("keys", "values")
    ),
)


def write(
    client: Client,
    sequence: bytes,
    namespace: bytes = NAMESPACE,
    checkpoints: Sequence[int] | None = None,
) -> int:
    """Stores the whole sequence; returns the rows that were inserted. With positions of
    checkpoints, or none of them, the namespace is a checkpointed one."""
    return begin(client, sequence, namespace, checkpoints)()


def begin(
    client: Client,
    sequence: bytes,
    namespace: bytes = NAMESPACE,
    checkpoints: Sequence[int] | None = None,
) -> Callable[[], int]:
    """Reserves; what is returned writes and commits, as `write`."""
    nbytes = record.plan(SCHEMA, 1).record_bytes
    reservation = client.reserve(
        namespace,
        sequence,
        0,
        SCHEMA.overhead_bytes,
        SCHEMA.row_bytes,
        "a [model]",
        checkpointed=checkpoints is not None,
        checkpoints=[NewCheckpoint(position, nbytes) for position in checkpoints or ()],
    )

    def fill(extent: memoryview, rows: range) -> int:
        layout = record.plan(SCHEMA, len(rows))
        (path,) = record.paths(namespace, sequence, [rows])
        record.write_header(layout, path, extent)
        return layout.record_bytes

    def commit() -> int:
        pieces, states = reservation.pieces, reservation.checkpoints
        return client.commit(
            reservation.id,
            [fill(client.extent(p), range(p.first_token, p.first_token + p.rows)) for p in pieces],
            [fill(client.extent(s), range(s.position - 1, s.position)) for s in states],
        )

    return commit
