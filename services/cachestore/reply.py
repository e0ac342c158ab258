"""What the daemon answers, as the client hands it on: checked, and immutable.

A reply that contradicts itself or the request raises Contradiction. Whether an extent lies
inside its slab is checked where the slab is mapped.
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from cachestore.config import BUDGET_BYTES_MIN, EXTENT_UNIT_BYTES, TOKEN_BYTES
from cachestore.extent import Extent
from cachestore.v1 import cachestore_pb2
from cachestore.write import Piece, StagedCheckpoint


class Contradiction(Exception):
    pass


class MatchKind(enum.StrEnum):
    EXACT = "exact"
    SUPERSEQUENCE = "supersequence"
    PREFIX = "prefix"
    LCP = "lcp"
    MISS = "miss"


_KINDS = {
    cachestore_pb2.MATCH_KIND_EXACT: MatchKind.EXACT,
    cachestore_pb2.MATCH_KIND_SUPERSEQUENCE: MatchKind.SUPERSEQUENCE,
    cachestore_pb2.MATCH_KIND_PREFIX: MatchKind.PREFIX,
    cachestore_pb2.MATCH_KIND_LCP: MatchKind.LCP,
    cachestore_pb2.MATCH_KIND_MISS: MatchKind.MISS,
}


class Span(NamedTuple):
    """Rows [first_row, first_row + rows) of one record, whose bytes lie at `offset`.

    A tuple, and in the order of the columns, because a long match has hundreds.
    """

    record_id: int
    slab_id: int
    offset: int
    length: int
    generation: int
    record_bytes: int
    first_row: int
    rows: int

    @property
    def extent(self) -> Extent:
        return Extent(self.slab_id, self.offset, self.length, self.generation)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The record of a model's state after `position` tokens, in the layers without rows."""

    id: int
    position: int
    extent: Extent
    record_bytes: int


@dataclass(frozen=True, slots=True)
class Lease:
    """A lookup's answer. `id` and `seconds` are 0 when there is nothing to release: for a miss
    that was not announced. `checkpoint` is at position `rows`, when the namespace needs them.
    `parting` is where the promise includes one more; 0 for nowhere."""

    id: int
    kind: MatchKind
    rows: int
    spans: tuple[Span, ...]
    seconds: float
    checkpoint: Checkpoint | None = None
    parting: int = 0


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room for rows [have, end); rows [0, have) are held by the store already. When `end` is not
    the last token, the rest takes another reservation after the commit of this one. And room for
    those checkpoints, of the ones asked for, up to `end` that are not held."""

    id: int
    have: int
    pieces: tuple[Piece, ...]
    checkpoints: tuple[StagedCheckpoint, ...]
    seconds: float

    @property
    def end(self) -> int:
        return self.pieces[-1].first_token + self.pieces[-1].rows if self.pieces else self.have


def stats(reply: cachestore_pb2.StatsResponse) -> cachestore_pb2.StatsResponse:
    """Checks what people are told to do something about."""
    if reply.pid < 1 or reply.bytes_budget < BUDGET_BYTES_MIN:
        raise Contradiction(f"process {reply.pid} with a budget of {reply.bytes_budget} bytes")
    return reply


def lease(reply: cachestore_pb2.LookupResponse, request: cachestore_pb2.LookupRequest) -> Lease:
    """Checks the answer to a lookup."""
    limit, checkpointed = request.limit, request.checkpointed
    kind = _KINDS.get(reply.kind)
    spans = _spans(reply.spans)
    if kind is None:
        raise Contradiction(f"a match of unknown kind {reply.kind}")
    if reply.rows != sum(span.rows for span in spans) or reply.rows > limit:
        raise Contradiction(f"a match of {reply.rows} rows, other than its spans or over {limit}")
    if kind is MatchKind.MISS and spans:
        raise Contradiction("a miss with rows")
    if reply.HasField("checkpoint") is not (checkpointed and bool(spans)):
        raise Contradiction("rows without the checkpoint that they need, or one without rows")
    checkpoint = _checkpoint(reply.checkpoint, reply.rows) if checkpointed and spans else None
    if reply.parting:
        if not (request.parting_distance and reply.lease_id):
            raise Contradiction(f"a parting at {reply.parting} that nobody has asked for")
        if not reply.rows + request.parting_distance <= reply.parting <= limit:
            raise Contradiction(f"a parting at {reply.parting} with {reply.rows} rows of {limit}")
    if not spans and reply.lease_id == 0:
        return Lease(0, kind, 0, (), 0.0)
    _check_promise(reply.lease_id, reply.lease_seconds)
    return Lease(
        reply.lease_id, kind, reply.rows, spans, reply.lease_seconds, checkpoint, reply.parting
    )


def reservation(
    reply: cachestore_pb2.ReserveResponse, request: cachestore_pb2.ReserveRequest
) -> Reservation:
    """Checks that the pieces cover rows that are not held, in order, with room for each."""
    tokens = len(request.tokens) // TOKEN_BYTES
    pieces = tuple(_piece(piece) for piece in reply.pieces)
    if reply.have < request.first_row:
        raise Contradiction(f"a reservation from row {reply.have}, before {request.first_row}")
    row = reply.have
    for piece in pieces:
        if piece.first_token != row:
            raise Contradiction(f"a piece from row {piece.first_token} instead of {row}")
        if piece.extent.length < request.record_overhead_bytes + piece.rows * request.row_bytes:
            raise Contradiction(f"{piece.extent.length} bytes for {piece.rows} rows")
        row += piece.rows
    if row > tokens or (row < tokens and not pieces):
        raise Contradiction(f"a reservation up to row {row} of {tokens}")
    checkpoints = _staged(reply.checkpoints, request.checkpoints, row)
    _check_disjoint([piece.extent for piece in pieces] + [each.extent for each in checkpoints])
    _check_promise(reply.reservation_id, reply.reservation_seconds)
    return Reservation(
        reply.reservation_id, reply.have, pieces, checkpoints, reply.reservation_seconds
    )


def _spans(columns: cachestore_pb2.Spans) -> tuple[Span, ...]:
    fields = (
        columns.record_ids,
        columns.slab_ids,
        columns.offsets,
        columns.lengths,
        columns.generations,
        columns.record_bytes,
        columns.first_rows,
        columns.rows,
    )
    if len({len(column) for column in fields}) != 1:
        raise Contradiction("spans whose columns differ in length")
    spans = tuple(map(Span._make, zip(*fields, strict=True)))
    for span in spans:
        _check_extent(span.offset, span.length)
        if span.rows == 0:
            raise Contradiction("a span without rows")
        if not 0 < span.record_bytes <= span.length:
            raise Contradiction(f"a record of {span.record_bytes} bytes in {span.length}")
    return spans


def _piece(piece: cachestore_pb2.Piece) -> Piece:
    if piece.rows == 0:
        raise Contradiction("a piece without rows")
    return Piece(_extent(piece.extent), piece.first_token, piece.rows)


def _checkpoint(checkpoint: cachestore_pb2.Checkpoint, rows: int) -> Checkpoint:
    extent = _extent(checkpoint.extent)
    if checkpoint.position != rows:
        raise Contradiction(f"a checkpoint at {checkpoint.position} for {rows} rows")
    if not 0 < checkpoint.record_bytes <= extent.length:
        raise Contradiction(f"a checkpoint of {checkpoint.record_bytes} bytes in {extent.length}")
    return Checkpoint(checkpoint.checkpoint_id, rows, extent, checkpoint.record_bytes)


def _staged(
    staged: Sequence[cachestore_pb2.StagedCheckpoint],
    wanted: Sequence[cachestore_pb2.NewCheckpoint],
    end: int,
) -> tuple[StagedCheckpoint, ...]:
    sizes = {new.position: new.bytes for new in wanted if new.position <= end}
    checkpoints = tuple(StagedCheckpoint(_extent(each.extent), each.position) for each in staged)
    for each in checkpoints:
        if not 0 < sizes.get(each.position, 0) <= each.extent.length:
            raise Contradiction(f"{each.extent.length} bytes for a checkpoint at {each.position}")
    if any(left.position >= right.position for left, right in pairwise(checkpoints)):
        raise Contradiction("checkpoints that are not in order")
    return checkpoints


def _extent(extent: cachestore_pb2.Extent) -> Extent:
    _check_extent(extent.offset, extent.length)
    return Extent(extent.slab_id, extent.offset, extent.length, extent.generation)


def _check_extent(offset: int, length: int) -> None:
    if offset % EXTENT_UNIT_BYTES or length % EXTENT_UNIT_BYTES or length == 0:
        raise Contradiction(f"an extent of [{offset}, +{length})")


def _check_disjoint(extents: Sequence[Extent]) -> None:
    for left, right in pairwise(sorted(extents)):
        if left.slab_id == right.slab_id and left.offset + left.length > right.offset:
            raise Contradiction(f"two extents at offset {right.offset} of slab {right.slab_id}")


def _check_promise(promise_id: int, seconds: float) -> None:
    if promise_id == 0 or not (seconds > 0 and math.isfinite(seconds)):
        raise Contradiction(f"number {promise_id} for {seconds} seconds")
