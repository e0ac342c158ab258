"""What the clients of a store under test hold: staged writes, leases, and what is in the rows."""

import hashlib
import itertools
from dataclasses import dataclass

from cachestore.store import Match, Reservation
from tests.support.stores import NAMESPACE, OTHER_NAMESPACE

Ids = tuple[int, ...]
# The namespaces have rows of different sizes, so that holes of one do not fit the other.
ROW_BYTES = {NAMESPACE: 56, OTHER_NAMESPACE: 152}


def shared(one: Ids, other: Ids) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def fingerprint(namespace: bytes, ids: Ids) -> bytes:
    digest = hashlib.shake_128(namespace + repr(ids).encode())
    return digest.digest(ROW_BYTES[namespace])


@dataclass(frozen=True)
class Writer:
    session: int
    namespace: bytes
    ids: Ids
    whole: bool
    reservation: Reservation
    deadline: float

    @property
    def bytes_held(self) -> int:
        return sum(piece.extent.length for piece in self.reservation.pieces)


@dataclass
class Announced:
    """`done` of the rows have been committed."""

    ids: Ids
    done: int


@dataclass(frozen=True)
class Reader:
    session: int
    namespace: bytes
    match: Match
    rows: tuple[bytes, ...]
    deadline: float
    announced: Announced | None
