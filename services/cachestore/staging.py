"""Writes that are under way: from the reservation to the commit, or to any other end."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cachestore.arena import State, aligned
from cachestore.config import StoreConfig
from cachestore.extent import Extent
from cachestore.holdings import Holdings, Kept
from cachestore.lease import Claims
from cachestore.refusal import NeedSlab, RefusalCode, Refused
from cachestore.stats import WriteCounts
from cachestore.tree import Walk
from cachestore.validation import exhausted, require_kind, require_sizes
from cachestore.write import Inserted, NewCheckpoint, Piece, Sizes, Staged, StagedCheckpoint, Target


@dataclass(frozen=True, slots=True)
class Reservation:
    """Rows [0, have) are held and pinned; the pieces are for those behind, in order. They may end
    before the last row: then commit them, and reserve again for the rest, checkpoints included."""

    id: int
    have: int
    pieces: tuple[Piece, ...]
    checkpoints: tuple[StagedCheckpoint, ...]

    @property
    def end(self) -> int:
        """Rows that are held once it is committed."""
        return self.pieces[-1].first_token + self.pieces[-1].rows if self.pieces else self.have


@dataclass(frozen=True, slots=True)
class _Write:
    staged: Staged
    kept: Kept


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
        self._reservations: Claims[_Write] = Claims(config.reservation_seconds, new_id)
        # By session and reservation: the writer may still be copying.
        self._lapsed: dict[int, dict[int, list[Extent]]] = {}

    def __len__(self) -> int:
        return len(self._reservations)

    @property
    def changes(self) -> int:
        """Of reservations."""
        return self._reservations.changes

    def reserve(self, session: int, walk: Walk, target: Target, now: float) -> Reservation:
        """Pin the path of `walk`, and allocate extents for the rows behind it and for checkpoints
        that are not on it."""
        require_kind(target.checkpointed, self._kind(target.namespace))
        try:
            self._require_place(session, target.namespace)
            rows_max = self._record_rows(target)
            starts = range(walk.depth, target.count, rows_max)
            rows = [min(rows_max, target.count - start) for start in starts]
            overhead = target.record_overhead_bytes
            lengths = [aligned(overhead + n * target.row_bytes) for n in rows]
            missing = self._missing(walk, target)
            # All of it must fit, although it may take several reservations.
            needed = sum(lengths) + sum(aligned(new.nbytes) for new in missing)
            self._holdings.require_bytes(needed)
            del lengths[self._config.max_records_per_reservation :]
            end = walk.depth + sum(rows[: len(lengths)])
            reachable = [new for new in missing if new.position <= end]
            kept = Kept(walk.path)
            extents = self._allocate(kept, [*lengths, *(aligned(new.nbytes) for new in reachable)])
        except Refused:
            self.counts.refused += 1
            raise
        # The first extents are for rows, as many as there are lengths.
        pieces = tuple(map(Piece, extents[: len(lengths)], starts, rows))
        positions = [new.position for new in reachable]
        checkpoints = tuple(map(StagedCheckpoint, extents[len(lengths) :], positions))
        write = _Write(Staged(target.until(end), pieces, checkpoints), kept)
        reservation_id = self._reservations.open(session, write, now)
        return Reservation(reservation_id, walk.depth, pieces, checkpoints)

    def commit(
        self, session: int, reservation_id: int, sizes: Sizes, now: float
    ) -> tuple[Staged, Inserted]:
        """Publish a write; returns what it was, and how much of it was missing."""
        write = self._reservations.get(session, reservation_id)
        if write is None:
            self._end_quarantine(session, reservation_id)
            raise Refused(
                RefusalCode.FAILED_PRECONDITION,
                f"reservation_id {reservation_id} has lapsed or never was; reserve again",
            )
        staged = write.staged
        extents, rows = staged.extents, len(staged.pieces)
        require_sizes("record_bytes", sizes.records, extents[:rows])
        require_sizes("checkpoint_bytes", sizes.checkpoints, extents[rows:])
        self._reservations.close(session, reservation_id)
        inserted = self._holdings.insert(staged, sizes, now)
        self._holdings.unpin(write.kept)
        self.counts.add(staged, inserted)
        return staged, inserted

    def abort(self, session: int, reservation_id: int) -> None:
        """Drop a write, whose writer has stopped writing; unknown ones are ignored."""
        write = self._reservations.close(session, reservation_id)
        if write is None:
            self._end_quarantine(session, reservation_id)
            return
        self._drop(write)
        self._free(write.staged.extents)

    def lapse(self, now: float) -> None:
        for session, reservation_id, write in self._reservations.lapse(now):
            self._drop(write)
            extents = write.staged.extents
            for extent in extents:
                self._holdings.arena.turn(extent, State.QUARANTINED)
            if extents:
                self._lapsed.setdefault(session, {})[reservation_id] = extents

    def close_session(self, session: int) -> None:
        """Its client is gone: nobody writes to its extents."""
        for write in self._reservations.close_session(session):
            self._drop(write)
            self._free(write.staged.extents)
        for extents in self._lapsed.pop(session, {}).values():
            self._free(extents)

    def kept(self) -> list[Kept]:
        """What is pinned here, once for each reservation."""
        return [write.kept for write in self._reservations.held()]

    def checks(self) -> Iterator[int]:
        """Verify every invariant, as Store.checks does."""
        yield from self._reservations.checks()
        arena = self._holdings.arena
        writes = self._reservations.held()
        reserved = [extent for write in writes for extent in write.staged.extents]
        assert all(self._lapsed.values())
        of_sessions = self._lapsed.values()
        lapsed = [e for session in of_sessions for extents in session.values() for e in extents]
        for state, extents in ((State.RESERVED, reserved), (State.QUARANTINED, lapsed)):
            left = set(arena.held(state))
            for extent in extents:
                left.remove(extent)
                yield 1
            assert not left
        for write in writes:
            target = write.staged.target
            assert self._holdings.checkpointed(target.namespace) in (target.checkpointed, None)
            assert target.checkpointed or not write.staged.checkpoints
            yield 1

    def _allocate(self, kept: Kept, lengths: Sequence[int]) -> list[Extent]:
        """Pin the path first, so that making room cannot evict it."""
        self._holdings.pin(kept)
        try:
            return self._holdings.allocate(lengths)
        except (NeedSlab, Refused):
            self._holdings.unpin(kept)
            raise

    def _drop(self, write: _Write) -> None:
        self._holdings.unpin(write.kept)
        self.counts.dropped += 1

    def _end_quarantine(self, session: int, reservation_id: int) -> None:
        of_session = self._lapsed.get(session, {})
        self._free(of_session.pop(reservation_id, ()))
        if not of_session:
            self._lapsed.pop(session, None)

    def _free(self, extents: Sequence[Extent]) -> None:
        for extent in extents:
            self._holdings.arena.free(extent)

    def _kind(self, namespace: bytes) -> bool | None:
        """Whether the namespace is checkpointed; None when nothing is held or staged there."""
        held = self._holdings.checkpointed(namespace)
        if held is not None:
            return held
        targets = (write.staged.target for write in self._reservations.held())
        return next((t.checkpointed for t in targets if t.namespace == namespace), None)

    def _require_place(self, session: int, namespace: bytes) -> None:
        """Refuse one reservation, or one namespace, too many."""
        if self._reservations.count(session) >= self._config.max_reservations_per_session:
            raise exhausted(
                f"reservation: {self._reservations.count(session)} are open; commit or abort some"
            )
        known = self._holdings.namespaces
        if namespace not in known:
            staged = {write.staged.target.namespace for write in self._reservations.held()}
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

    def _missing(self, walk: Walk, target: Target) -> list[NewCheckpoint]:
        """Checkpoints of the target that are not held yet."""
        held = {checkpoint.position for checkpoint in walk.checkpoints()}
        return [new for new in target.checkpoints if new.position not in held]
