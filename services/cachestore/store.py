"""The store: sessions look up, lease, reserve and commit. Bytes of slabs are moved by others."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from cachestore.arena import State
from cachestore.catalog import Catalog
from cachestore.compaction import Compaction, Move
from cachestore.config import StoreConfig
from cachestore.eviction import Candidate
from cachestore.extent import Extent
from cachestore.holdings import Holdings
from cachestore.lease import random_id
from cachestore.node import Span
from cachestore.refusal import NeedSlab, RefusalCode, Refused
from cachestore.serving import NOTHING, Match, Query, Serving
from cachestore.staging import Reservation, Staging
from cachestore.stats import Statistics
from cachestore.tree import MatchKind
from cachestore.validation import (
    require_lease_ids,
    require_new_checkpoints,
    require_positions,
    require_record_shape,
    require_rows,
    require_sequence,
)
from cachestore.write import Inserted, NewCheckpoint, Piece, Sizes, StagedCheckpoint, Target

__all__ = [
    "Extent",
    "Inserted",
    "Match",
    "MatchKind",
    "NeedSlab",
    "NewCheckpoint",
    "Piece",
    "Query",
    "RefusalCode",
    "Refused",
    "Reservation",
    "Sizes",
    "Span",
    "StagedCheckpoint",
    "Store",
    "Target",
]


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
        self._catalog = Catalog(config, self._holdings)
        self._compaction = Compaction(self._holdings)
        self._settled: Callable[[], None] = lambda: None
        self._serving = Serving(config, self._holdings, new_id, self._settle)
        self._staging = Staging(config, self._holdings, new_id)
        self._growth_after = 0.0
        self._slab_failures = 0
        self._check_failures = 0

    def listen(self, settled: Callable[[], None]) -> None:
        """Have `settled` called whenever announced rows have been committed, an announcement has
        ended, or a session has. It must only take note: the store is in the middle of a call."""
        self._settled = settled

    @property
    def stored(self) -> Mapping[int, Candidate]:
        """Records and checkpoints by id, the oldest first."""
        return self._holdings.inventory.stored

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
        self._serving.close_session(session)
        self._staging.close_session(session)
        del self._counted[session]
        self._settled()

    def rows_to_come(self, query: Query, now: float) -> int:
        """Rows that a lookup could be served if it waited: announced by somebody, not held yet.

        0 when they are few, as Announcements says. Changes nothing but what has lapsed.
        """
        self.expire(now)
        return self._serving.rows_to_come(query) if self.sound else 0

    def lookup(self, session: int, query: Query, now: float) -> Match:
        """Find the longest held prefix, and lease what is served of it.

        A hit refreshes the recency of the whole path that agrees with the tokens. To announce
        is to promise the rows that are missing; a miss has a lease then, too.
        """
        self.expire(now)
        assert session in self._counted
        if not self.sound:
            self._serving.counts.add(MatchKind.MISS, self._serving.require(query), 0)
            return NOTHING
        return self._serving.lookup(session, query, now)

    def renew(self, session: int, lease_ids: Sequence[int], now: float) -> list[bool]:
        """Extend leases; False for each that has ended, or never was this session's."""
        self.expire(now)
        require_lease_ids(lease_ids)
        return [valid and self.sound for valid in self._serving.renew(session, lease_ids, now)]

    def release(self, session: int, lease_ids: Sequence[int], now: float) -> None:
        """End leases; those that have ended already are ignored."""
        self.expire(now)
        require_lease_ids(lease_ids)
        self._serving.release(session, lease_ids)

    def reserve(self, session: int, target: Target, now: float) -> Reservation:
        """Stage a write: pin the rows already held, and allocate extents for the others and for
        checkpoints that are not held.

        Raises NeedSlab, having changed nothing, when the budget allows another slab and no free
        bytes fit; add it and call again.
        """
        self.expire(now)
        assert session in self._counted
        self._require_target(target)
        self._require_sound()
        walk = self._holdings.walk(target.namespace, target.tokens)
        if walk.depth < target.first_row:
            raise Refused(
                RefusalCode.FAILED_PRECONDITION,
                f"first_row is {target.first_row}, but only {walk.depth} rows are held; "
                "write from there or look up again",
            )
        return self._staging.reserve(session, walk, target, now)

    def commit(self, session: int, reservation_id: int, sizes: Sizes, now: float) -> Inserted:
        """Publish a staged write, rows and checkpoints together; returns what it added.

        Also the writer's word that it has stopped writing: after a lapse its extents leave
        quarantine, although the write itself is refused.
        """
        self.expire(now)
        self._require_sound()
        staged, inserted = self._staging.commit(session, reservation_id, sizes, now)
        target = staged.target
        positions = tuple(checkpoint.position for checkpoint in staged.checkpoints)
        self._serving.committed(
            target.namespace, target.tokens, positions if target.checkpointed else None
        )
        return inserted

    def abort(self, session: int, reservation_id: int, now: float) -> None:
        """Drop a staged write, whose writer has stopped writing; unknown ones are ignored."""
        self.expire(now)
        self._staging.abort(session, reservation_id)

    def expire(self, now: float) -> None:
        """End the leases and reservations whose deadline has come. Cheap when there are none."""
        self._serving.lapse(now)
        self._staging.lapse(now)
        self._holdings.growing = now >= self._growth_after

    def catalog(self, now: float) -> Catalog:
        """What is held, for people."""
        self.expire(now)
        return self._catalog

    def flush(self) -> int:
        """Drop everything that is not in use or pinned; return how many records of rows went."""
        return self._catalog.evict(self._catalog.everything()).records

    def compact(self, move: Move) -> bool:
        """Bring scattered free bytes together a little, by moving records that nobody uses with
        `move(from, to)`, which has to copy at once; the two may overlap. True if there is more
        to do."""
        return self.sound and self._compaction.step(move)

    def statistics(self, now: float) -> Statistics:
        self.expire(now)
        arena = self._holdings.arena
        inventory, departures = self._holdings.inventory, self._holdings.departures
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
            bytes_padding=inventory.bytes_padding,
            bytes_stranded=inventory.bytes_stranded,
            slabs=arena.slabs,
            records=sum(namespace.records for namespace in namespaces),
            sequences=sum(namespace.sequences for namespace in namespaces),
            tokens=sum(namespace.tokens for namespace in namespaces),
            checkpoints=sum(namespace.checkpoints for namespace in namespaces),
            bytes_checkpoints=sum(namespace.bytes_checkpoints for namespace in namespaces),
            namespaces=namespaces,
            lookups=self._serving.counts.statistics(),
            writes=self._staging.counts.statistics(),
            evictions=departures.records,
            checkpoints_evicted=departures.checkpoints_evicted,
            checkpoints_surplus=departures.checkpoints_surplus,
            bytes_evicted=departures.bytes,
            bytes_moved=self._compaction.bytes_moved,
            sessions=sum(self._counted.values()),
            leases=self._serving.leases,
            reservations=len(self._staging),
            announced=self._serving.announced,
            pinned=self._catalog.pinned,
            slab_failures=self._slab_failures,
            check_failures=self._check_failures,
        )

    @property
    def changes(self) -> int:
        """Grows with each change of what `checks` looks at: nothing of it changes without bytes,
        pins, leases or reservations."""
        parts = (self._holdings.arena, self._holdings, self._serving, self._staging)
        return sum(part.changes for part in parts)

    def check(self) -> None:
        """Verify every invariant, in time proportional to everything that is held."""
        for _ in self.checks():
            pass

    def checks(self) -> Iterator[int]:
        """The same a little at a time: yields how many things have been looked at since it last
        did. No good any more once the store has changed in between, as `changes` says."""
        yield from self._holdings.checks()
        yield from self._serving.checks()
        yield from self._staging.checks()
        assert self._holdings.arena.bytes_slabs <= self._config.budget_bytes
        yield from self._catalog.checks()
        pins: Counter[Candidate] = Counter()
        for kept in (*self._serving.kept(), *self._staging.kept(), *self._catalog.kept()):
            pins.update(kept.stored)
            yield len(kept.stored)
        for each in self.stored.values():
            assert pins.pop(each, 0) == each.pins
            yield 1
        assert not pins

    def _settle(self) -> None:
        self._settled()

    def _require_sound(self) -> None:
        if not self.sound:
            raise Refused(
                RefusalCode.FAILED_PRECONDITION, "the store has failed its own check; restart it"
            )

    def _require_target(self, target: Target) -> None:
        count = require_sequence(target.namespace, target.tokens, self._config.max_tokens)
        require_rows("first_row", target.first_row, count)
        require_record_shape(target.record_overhead_bytes, target.row_bytes, target.label)
        positions = [new.position for new in target.checkpoints]
        require_positions(target.checkpointed, positions, count)
        require_new_checkpoints(target.checkpoints)
        require_rows("conversation_start", target.conversation_start, count)
