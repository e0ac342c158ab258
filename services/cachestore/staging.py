"""Writes that are under way: from the reservation to the commit, or to any other end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cachestore.arena import Extent, State, aligned
from cachestore.config import TOKEN_BYTES, StoreConfig
from cachestore.holdings import Holdings, Piece
from cachestore.lease import Claims
from cachestore.refusal import NeedSlab, RefusalCode, Refused
from cachestore.stats import WriteCounts
from cachestore.tree import Record, Walk
from cachestore.validation import exhausted, require_record_bytes


@dataclass(frozen=True, slots=True)
class Reservation:
    """Rows [0, have) are held and pinned; the pieces are for those behind, in order. They may end
    before the last row: then commit them, and reserve again for the rest."""

    id: int
    have: int
    pieces: tuple[Piece, ...]

    @property
    def end(self) -> int:
        """Rows that are held once it is committed."""
        return self.pieces[-1].first_token + self.pieces[-1].rows if self.pieces else self.have


@dataclass(frozen=True, slots=True)
class Target:
    """What a reservation is for: the whole sequence, and how large its records get. Once staged,
    as much of the sequence as is staged, and whether that is all of it."""

    namespace: bytes
    tokens: bytes
    count: int
    record_overhead_bytes: int
    row_bytes: int
    label: str
    whole: bool = True


@dataclass(frozen=True, slots=True)
class _Staged:
    target: Target
    pieces: tuple[Piece, ...]
    path: tuple[Record, ...]


class Staging:
    """A staged write, in bytes of the arena:

        reserve ─▶ RESERVED ── commit ─▶ USED ── eviction ─▶ free
                      │  └──── abort, end of session ──────▶ free
                    lapse
                      ▼
                 QUARANTINED ── word of the writer, end of session ─▶ free

    `counts` is for the statistics.
    """

    def __init__(self, config: StoreConfig, holdings: Holdings, new_id: Callable[[], int]) -> None:
        self.counts = WriteCounts()
        self._config = config
        self._holdings = holdings
        self._reservations: Claims[_Staged] = Claims(config.reservation_seconds, new_id)
        # By session and reservation: the writer may still be copying.
        self._lapsed: dict[int, dict[int, tuple[Piece, ...]]] = {}

    def __len__(self) -> int:
        return len(self._reservations)

    def reserve(self, session: int, walk: Walk, target: Target, now: float) -> Reservation:
        """Pin the path of `walk`, and allocate extents for the rows behind it."""
        try:
            self._require_place(session, target.namespace)
            rows_max = self._record_rows(target)
            starts = range(walk.depth, target.count, rows_max)
            rows = [min(rows_max, target.count - start) for start in starts]
            overhead = target.record_overhead_bytes
            lengths = [aligned(overhead + n * target.row_bytes) for n in rows]
            # All of it must fit, although it may take several reservations.
            self._holdings.require_bytes(sum(lengths))
            extents = self._allocate(walk.path, lengths[: self._config.max_records_per_reservation])
        except Refused:
            self.counts.refused += 1
            raise
        # As many as there are extents.
        pieces = tuple(map(Piece, extents, starts, rows))
        staged = _Staged(_until(target, walk.depth + sum(rows[: len(extents)])), pieces, walk.path)
        return Reservation(self._reservations.open(session, staged, now), walk.depth, pieces)

    def commit(
        self, session: int, reservation_id: int, record_bytes: Sequence[int], now: float
    ) -> tuple[Target, int]:
        """Publish a write; returns what it was for, and how many rows it added."""
        staged = self._reservations.get(session, reservation_id)
        if staged is None:
            self._end_quarantine(session, reservation_id)
            raise Refused(
                RefusalCode.FAILED_PRECONDITION,
                f"reservation_id {reservation_id} has lapsed or never was; reserve again",
            )
        require_record_bytes(record_bytes, staged.pieces)
        self._reservations.close(session, reservation_id)
        target = staged.target
        inserted = self._holdings.insert(
            target.namespace,
            target.label,
            target.tokens,
            target.whole,
            staged.pieces,
            record_bytes,
            now,
        )
        self._holdings.unpin(staged.path)
        self.counts.committed += 1
        self.counts.rows_inserted += inserted
        self.counts.rows_duplicate += sum(piece.rows for piece in staged.pieces) - inserted
        return target, inserted

    def abort(self, session: int, reservation_id: int) -> None:
        """Drop a write, whose writer has stopped writing; unknown ones are ignored."""
        staged = self._reservations.close(session, reservation_id)
        if staged is None:
            self._end_quarantine(session, reservation_id)
            return
        self._drop(staged)
        self._free(staged.pieces)

    def lapse(self, now: float) -> None:
        for session, reservation_id, staged in self._reservations.lapse(now):
            self._drop(staged)
            for piece in staged.pieces:
                self._holdings.arena.turn(piece.extent, State.QUARANTINED)
            if staged.pieces:
                self._lapsed.setdefault(session, {})[reservation_id] = staged.pieces

    def close_session(self, session: int) -> None:
        """Its client is gone: nobody writes to its extents."""
        for staged in self._reservations.close_session(session):
            self._drop(staged)
            self._free(staged.pieces)
        for pieces in self._lapsed.pop(session, {}).values():
            self._free(pieces)

    def paths(self) -> list[tuple[Record, ...]]:
        """What is pinned here, once for each reservation."""
        return [staged.path for staged in self._reservations.held()]

    def check(self) -> None:
        """Verify every invariant, in time proportional to all writes and their extents."""
        self._reservations.check()
        arena = self._holdings.arena
        reserved = [p.extent for staged in self._reservations.held() for p in staged.pieces]
        assert all(self._lapsed.values())
        lapsed = [
            piece.extent
            for of_session in self._lapsed.values()
            for pieces in of_session.values()
            for piece in pieces
        ]
        for state, extents in ((State.RESERVED, reserved), (State.QUARANTINED, lapsed)):
            assert arena.held(state) == set(extents)
            assert len(arena.held(state)) == len(extents)

    def _allocate(self, path: Sequence[Record], lengths: Sequence[int]) -> list[Extent]:
        """Pin the path first, so that making room cannot evict it."""
        self._holdings.pin(path)
        try:
            return self._holdings.allocate(lengths)
        except (NeedSlab, Refused):
            self._holdings.unpin(path)
            raise

    def _drop(self, staged: _Staged) -> None:
        self._holdings.unpin(staged.path)
        self.counts.dropped += 1

    def _end_quarantine(self, session: int, reservation_id: int) -> None:
        of_session = self._lapsed.get(session, {})
        self._free(of_session.pop(reservation_id, ()))
        if not of_session:
            self._lapsed.pop(session, None)

    def _free(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            self._holdings.arena.free(piece.extent)

    def _require_place(self, session: int, namespace: bytes) -> None:
        """Refuse one reservation, or one namespace, too many."""
        if self._reservations.count(session) >= self._config.max_reservations_per_session:
            raise exhausted(
                f"reservation: {self._reservations.count(session)} are open; commit or abort some"
            )
        known = self._holdings.namespaces
        if namespace not in known:
            staged = {staged.target.namespace for staged in self._reservations.held()}
            if len(staged | known.keys() | {namespace}) > self._config.max_namespaces:
                raise exhausted(
                    f"namespace: {self._config.max_namespaces} are held already; flush the store"
                )

    def _record_rows(self, target: Target) -> int:
        """Rows of a whole record: the configured number, or what fits a slab."""
        slab_bytes, overhead = self._config.slab_bytes, target.record_overhead_bytes
        rows = min(self._config.record_tokens, (slab_bytes - overhead) // target.row_bytes)
        if rows < 1:
            raise exhausted(
                f"row_bytes: a record of one row takes {overhead + target.row_bytes} bytes, "
                f"a slab has {slab_bytes}; raise --budget"
            )
        return rows


def _until(target: Target, end: int) -> Target:
    if end == target.count:
        return target
    return replace(target, tokens=target.tokens[: end * TOKEN_BYTES], count=end, whole=False)
