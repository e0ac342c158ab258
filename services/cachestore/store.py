"""The store: sessions look up, lease, reserve and commit. Bytes of slabs are moved by others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cachestore.announce import Announcement, Announcements
from cachestore.arena import Extent, State
from cachestore.catalog import Catalog
from cachestore.compaction import Compaction, Move
from cachestore.config import TOKEN_BYTES, StoreConfig
from cachestore.holdings import Holdings, Piece
from cachestore.lease import Claims, random_id
from cachestore.refusal import NeedSlab, RefusalCode, Refused
from cachestore.staging import Reservation, Staging, Target
from cachestore.stats import LookupCounts, Statistics
from cachestore.tree import MatchKind, Record, Span
from cachestore.validation import (
    exhausted,
    require_lease_ids,
    require_record_shape,
    require_rows,
    require_sequence,
)

__all__ = [
    "Extent",
    "Match",
    "MatchKind",
    "NeedSlab",
    "Piece",
    "RefusalCode",
    "Refused",
    "Reservation",
    "Span",
    "Store",
]


@dataclass(frozen=True, slots=True)
class Match:
    """Rows [0, rows) in order; `lease_id` is 0 for a miss that was not announced."""

    kind: MatchKind
    rows: int
    spans: tuple[Span, ...]
    lease_id: int


@dataclass(frozen=True, slots=True)
class _Lease:
    path: tuple[Record, ...]
    announced: Announcement | None


class Store:
    """Single-threaded, and free of clocks: `now` is in seconds and never runs backwards.

    Every call first ends what has lapsed by `now`. Sessions are known to the caller: an unknown
    one is a programmer's error, anything else that is wrong with a request raises Refused.
    """

    def __init__(self, config: StoreConfig, new_id: Callable[[], int] = random_id) -> None:
        self._config = config
        self._holdings = Holdings(config)
        self._counted: dict[int, bool] = {}  # by session
        self._last_session = 0
        self._leases: Claims[_Lease] = Claims(config.lease_seconds, new_id)
        self._announcements = Announcements(
            config.record_tokens, config.max_announced_tokens_per_session
        )
        self._catalog = Catalog(config, self._holdings)
        self._compaction = Compaction(self._holdings)
        self._staging = Staging(config, self._holdings, new_id)
        self._lookups = LookupCounts()
        self._settled: Callable[[], None] = lambda: None
        self._growth_after = 0.0
        self._slab_failures = 0
        self._check_failures = 0

    def listen(self, settled: Callable[[], None]) -> None:
        """Have `settled` called whenever announced rows have been committed, an announcement has
        ended, or a session has. It must only take note: the store is in the middle of a call."""
        self._settled = settled

    @property
    def records(self) -> Mapping[int, Record]:
        """By id, the oldest first."""
        return self._holdings.records

    @property
    def sound(self) -> bool:
        return self._check_failures == 0

    def fail(self) -> None:
        """`check` has failed: two records might share their bytes. From now on every lookup is a
        miss, no lease is valid, and nothing is written."""
        self._check_failures += 1

    def slab_failed(self, now: float) -> None:
        """There is no memory for another slab: for a while, evict rather than ask for one."""
        self._slab_failures += 1
        self._growth_after = now + self._config.growth_pause_seconds

    def add_slab(self, size_bytes: int) -> int:
        """Take a new slab into use; returns its id."""
        held = self._holdings.arena.bytes_slabs
        assert held + size_bytes <= self._config.budget_bytes
        return self._holdings.arena.add_slab(size_bytes)

    def retire_slabs(self) -> list[int]:
        """Take slabs in which nothing lies out of use, but one, which the next write may want.

        They stay inside the budget until `remove_slab` is called for each.
        """
        arena = self._holdings.arena
        others = arena.empty_slabs[1:]
        for slab_id in others:
            arena.retire_slab(slab_id)
        return others

    def remove_slab(self, slab_id: int) -> None:
        """Nobody maps a retired slab any more."""
        self._holdings.arena.remove_slab(slab_id)

    def open_session(self, counted: bool) -> int:
        self._last_session += 1
        self._counted[self._last_session] = counted
        return self._last_session

    def close_session(self, session: int, now: float) -> None:
        """End its leases and reservations. Its client is gone: nobody writes to its extents."""
        self.expire(now)
        for lease in self._leases.close_session(session):
            self._end_lease(lease)
        self._staging.close_session(session)
        del self._counted[session]
        self._settled()

    def rows_to_come(self, namespace: bytes, tokens: bytes, limit: int, now: float) -> int:
        """Rows that a lookup could be served if it waited: announced by somebody, not held yet.

        0 when they are fewer than a record. Changes nothing but what has lapsed.
        """
        self.expire(now)
        require_rows("limit", limit, self._require_sequence(namespace, tokens))
        if not self.sound:
            return 0
        return self._announcements.rows_to_come(namespace, tokens[: limit * TOKEN_BYTES])

    def lookup(
        self,
        session: int,
        namespace: bytes,
        tokens: bytes,
        limit: int,
        now: float,
        announce: bool = False,
    ) -> Match:
        """Find the longest held prefix, and lease at most `limit` rows of it.

        A hit refreshes the recency of the whole path that agrees with the tokens. To announce
        is to promise the rows that are missing; a miss has a lease then, too.
        """
        self.expire(now)
        assert session in self._counted
        count = self._require_sequence(namespace, tokens)
        require_rows("limit", limit, count)
        if not self.sound:
            self._lookups.add(MatchKind.MISS, count, 0)
            return Match(MatchKind.MISS, rows=0, spans=(), lease_id=0)
        if self._leases.count(session) >= self._config.max_leases_per_session:
            raise exhausted(f"lease: {self._leases.count(session)} are open; release some first")
        walk = self._holdings.walk(namespace, tokens)
        rows = min(walk.depth, limit)
        kind = walk.kind if rows else MatchKind.MISS
        self._lookups.add(kind, count, rows)
        if rows == 0 and not announce:
            return Match(kind, rows=0, spans=(), lease_id=0)
        spans = walk.spans(rows)
        if rows:
            self._holdings.hit(walk.path, len(spans), now)
        lease = _Lease(
            walk.path[: len(spans)],
            self._announcements.open(session, namespace, tokens, walk.depth) if announce else None,
        )
        self._holdings.pin(lease.path)
        return Match(kind, rows, spans, self._leases.open(session, lease, now))

    def renew(self, session: int, lease_ids: Sequence[int], now: float) -> list[bool]:
        """Extend leases; False for each that has ended, or never was this session's."""
        self.expire(now)
        require_lease_ids(lease_ids)
        return [self._leases.renew(session, lease_id, now) and self.sound for lease_id in lease_ids]

    def release(self, session: int, lease_ids: Sequence[int], now: float) -> None:
        """End leases; those that have ended already are ignored."""
        self.expire(now)
        require_lease_ids(lease_ids)
        for lease_id in lease_ids:
            lease = self._leases.close(session, lease_id)
            if lease is not None:
                self._end_lease(lease)

    def reserve(
        self,
        session: int,
        namespace: bytes,
        tokens: bytes,
        first_row: int,
        record_overhead_bytes: int,
        row_bytes: int,
        label: str,
        now: float,
    ) -> Reservation:
        """Stage a write: pin the rows already held, and allocate extents for the others.

        Raises NeedSlab, having changed nothing, when the budget allows another slab and no free
        bytes fit; add it and call again.
        """
        self.expire(now)
        assert session in self._counted
        count = self._require_sequence(namespace, tokens)
        require_rows("first_row", first_row, count)
        require_record_shape(record_overhead_bytes, row_bytes, label)
        self._require_sound()
        walk = self._holdings.walk(namespace, tokens)
        if walk.depth < first_row:
            raise Refused(
                RefusalCode.FAILED_PRECONDITION,
                f"first_row is {first_row}, but only {walk.depth} rows are held; "
                "write from there or look up again",
            )
        target = Target(namespace, tokens, count, record_overhead_bytes, row_bytes, label)
        return self._staging.reserve(session, walk, target, now)

    def commit(
        self, session: int, reservation_id: int, record_bytes: Sequence[int], now: float
    ) -> int:
        """Publish a staged write, and return how many rows it added.

        Also the writer's word that it has stopped writing: after a lapse its extents leave
        quarantine, although the write itself is refused.
        """
        self.expire(now)
        self._require_sound()
        target, inserted = self._staging.commit(session, reservation_id, record_bytes, now)
        if self._announcements.commit(target.namespace, target.tokens):
            self._settled()
        return inserted

    def abort(self, session: int, reservation_id: int, now: float) -> None:
        """Drop a staged write, whose writer has stopped writing; unknown ones are ignored."""
        self.expire(now)
        self._staging.abort(session, reservation_id)

    def expire(self, now: float) -> None:
        """End the leases and reservations whose deadline has come. Cheap when there are none."""
        for _, _, lease in self._leases.lapse(now):
            self._end_lease(lease)
        self._staging.lapse(now)
        self._holdings.growing = now >= self._growth_after

    def catalog(self, now: float) -> Catalog:
        """What is held, for people."""
        self.expire(now)
        return self._catalog

    def flush(self) -> int:
        """Drop everything that is not in use or pinned; return how many records that were."""
        return self._catalog.evict(self._catalog.everything()).records

    def compact(self, move: Move) -> bool:
        """Bring scattered free bytes together a little, by moving records that nobody uses with
        `move(from, to)`, which has to copy at once; the two may overlap. True if there is more
        to do."""
        return self.sound and self._compaction.step(move)

    def statistics(self, now: float) -> Statistics:
        self.expire(now)
        arena = self._holdings.arena
        namespaces = self._holdings.statistics()
        return Statistics(
            bytes_budget=self._config.budget_bytes,
            bytes_slabs=arena.bytes_slabs,
            bytes_used=arena.bytes_in(State.USED),
            bytes_reserved=arena.bytes_in(State.RESERVED),
            bytes_quarantined=arena.bytes_in(State.QUARANTINED),
            bytes_retiring=arena.bytes_retiring,
            bytes_free=arena.bytes_free,
            bytes_useful=self._holdings.bytes_useful,
            bytes_padding=self._holdings.bytes_padding,
            bytes_stranded=self._holdings.bytes_stranded,
            slabs=arena.slabs,
            records=len(self.records),
            sequences=sum(namespace.sequences for namespace in namespaces),
            tokens=sum(namespace.tokens for namespace in namespaces),
            namespaces=namespaces,
            lookups=self._lookups.statistics(),
            writes=self._staging.counts.statistics(),
            evictions=self._holdings.evictions,
            bytes_evicted=self._holdings.bytes_evicted,
            bytes_moved=self._compaction.bytes_moved,
            sessions=sum(self._counted.values()),
            leases=len(self._leases),
            reservations=len(self._staging),
            announced=len(self._announcements),
            pinned=self._catalog.pinned,
            slab_failures=self._slab_failures,
            check_failures=self._check_failures,
        )

    def check(self) -> None:
        """Verify every invariant, in time proportional to everything that is held."""
        self._holdings.check()
        self._leases.check()
        self._staging.check()
        leases = self._leases.held()
        self._announcements.check([one.announced for one in leases if one.announced is not None])
        assert self._holdings.arena.bytes_slabs <= self._config.budget_bytes
        self._catalog.check()
        paths = [lease.path for lease in leases] + self._staging.paths() + self._catalog.paths()
        pins = [record.pins for record in self._holdings.records.values()]
        assert sum(map(len, paths)) == sum(pins)

    def _end_lease(self, lease: _Lease) -> None:
        self._holdings.unpin(lease.path)
        if lease.announced is not None:
            self._announcements.close(lease.announced)
            self._settled()

    def _require_sound(self) -> None:
        if not self.sound:
            raise Refused(
                RefusalCode.FAILED_PRECONDITION, "the store has failed its own check; restart it"
            )

    def _require_sequence(self, namespace: bytes, tokens: bytes) -> int:
        return require_sequence(namespace, tokens, self._config.max_tokens)
