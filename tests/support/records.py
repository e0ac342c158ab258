"""Records as engines write them, small and with arbitrary rows."""

from cachestore import record
from cachestore.client import Client
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


def write(client: Client, sequence: bytes, namespace: bytes = NAMESPACE) -> int:
    """Stores the whole sequence; returns the rows that were inserted."""
    reservation = client.reserve(
        namespace, sequence, 0, SCHEMA.overhead_bytes, SCHEMA.row_bytes, "a [model]"
    )
    sizes = []
    for piece in reservation.pieces:
        layout = record.plan(SCHEMA, piece.rows)
        rows = range(piece.first_token, piece.first_token + piece.rows)
        (path,) = record.paths(namespace, sequence, [rows])
        record.write_header(layout, path, client.extent(piece))
        sizes.append(layout.record_bytes)
    return client.commit(reservation.id, sizes)
