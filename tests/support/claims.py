"""What the clients of a store under test hold: staged writes, leases, and what is in the rows."""

import hashlib
import itertools
from dataclasses import dataclass

import hypothesis.strategies as st

from cachestore.arena import State
from cachestore.store import Extent, Match, Reservation, Store
from tests.support.stores import (
    CHECKPOINT_BYTES,
    NAMESPACE,
    OTHER_NAMESPACE,
    OVERHEAD_BYTES,
    Bench,
)

Ids = tuple[int, ...]
CHECKPOINTED = bytes(range(64, 96))
# The namespaces have rows of different sizes, so that holes of one do not fit the other.
ROW_BYTES = {NAMESPACE: 56, OTHER_NAMESPACE: 152, CHECKPOINTED: 56}


def shared(one: Ids, other: Ids) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def reach(rows: int, positions: list[int] | None) -> int:
    if positions is None:
        return rows
    return max((position for position in positions if position <= rows), default=0)


def positions_of(data: st.DataObject, namespace: bytes, ids: Ids) -> list[int] | None:
    """Of checkpoints, where rows need some."""
    if namespace != CHECKPOINTED:
        return None
    return sorted(data.draw(st.sets(st.integers(1, len(ids)), max_size=4)))


def seen(store: Store) -> object:
    """Of what a check of the store looks at, enough to tell whether anything has changed."""
    stored = [(s.span, s.pins, s.last_used, s.namespace) for s in store.stored.values()]
    arena, serving = store._holdings.arena, store._serving
    held = [frozenset(arena.held(state)) for state in State]
    return stored, held, arena.slab_ids, arena.bytes_slabs, list(serving._leases._claims.items())


def fingerprint(namespace: bytes, ids: Ids) -> bytes:
    digest = hashlib.shake_128(namespace + repr(ids).encode())
    return digest.digest(ROW_BYTES[namespace])


def state(namespace: bytes, ids: Ids) -> bytes:
    """What a checkpoint behind these tokens holds."""
    digest = hashlib.shake_128(b"state" + namespace + repr(ids).encode())
    return digest.digest(CHECKPOINT_BYTES)


@dataclass(frozen=True)
class Writer:
    session: int
    namespace: bytes
    ids: Ids
    whole: bool
    conversation_start: int
    reservation: Reservation
    deadline: float

    @property
    def extents(self) -> list[Extent]:
        rows = [piece.extent for piece in self.reservation.pieces]
        return rows + [staged.extent for staged in self.reservation.checkpoints]

    @property
    def bytes_held(self) -> int:
        return sum(extent.length for extent in self.extents)

    @property
    def positions(self) -> list[int]:
        """Of the checkpoints that it writes."""
        return [staged.position for staged in self.reservation.checkpoints]


@dataclass
class Announced:
    """`done` of the rows can be served; where rows need checkpoints, those come at `positions`."""

    ids: Ids
    done: int
    positions: list[int] | None

    def worth(self, ids: Ids) -> int:
        """Rows of `ids` that can be served when all has come."""
        return reach(shared(self.ids, ids), self.positions)

    def to_come(self, ids: Ids, rows: int) -> int:
        """Those of `ids`, of which the first `rows` can be served, that are worth waiting for."""
        held = max(rows, self.done)
        far_more = len(self.ids) - self.done > 2 * (len(ids) - held)
        return 0 if far_more else self.worth(ids) - held

    def note(self, ids: Ids, positions: list[int] | None) -> None:
        """All rows of `ids` have been committed, and checkpoints at these positions."""
        self.done = max(self.done, reach(shared(self.ids, ids), positions))


@dataclass(frozen=True)
class Parting:
    """Where a lookup of `ids`, served `rows` of them, is to be told that they part from others, who
    have announced that much, when a checkpoint there is worth `distance`."""

    ids: Ids
    rows: int
    positions: list[int]
    distance: int
    others: list[Announced]

    def at(self, held: int) -> int:
        """0 for nowhere; `held` of `ids` are held, not only what can be served."""
        end = max(held, *(shared(self.ids, other.ids) for other in self.others), 0)
        gain = end - max(self.rows, reach(end, self.positions))
        return end if self.distance and gain >= self.distance else 0


@dataclass(frozen=True)
class Reader:
    session: int
    namespace: bytes
    match: Match
    rows: tuple[bytes, ...]
    deadline: float
    announced: Announced | None


def fill(bench: Bench, writer: Writer) -> None:
    """Writes what the reservation is for."""
    for piece in writer.reservation.pieces:
        rows = [
            fingerprint(writer.namespace, writer.ids[: piece.first_token + index + 1])
            for index in range(piece.rows)
        ]
        record = bytes(OVERHEAD_BYTES) + b"".join(rows)
        bench.memory(piece.extent)[: len(record)] = record
    for staged in writer.reservation.checkpoints:
        record = state(writer.namespace, writer.ids[: staged.position])
        bench.memory(staged.extent)[: len(record)] = record


def read(bench: Bench, namespace: bytes, match: Match) -> tuple[bytes, ...]:
    """Rows in order, and then the checkpoint if there is one."""
    size = ROW_BYTES[namespace]
    found = []
    for span in match.spans:
        record = bytes(bench.memory(span.extent)[: span.record_bytes])[OVERHEAD_BYTES:]
        found += [
            record[row * size : (row + 1) * size]
            for row in range(span.first_row, span.first_row + span.rows)
        ]
    if match.checkpoint is not None:
        span = match.checkpoint
        found.append(bytes(bench.memory(span.extent)[: span.record_bytes]))
    return tuple(found)
