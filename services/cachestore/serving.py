"""Lookups, and what they open: leases, and announcements of rows to come."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cachestore.announce import Announcement, Announcements
from cachestore.checkpoints import deepest
from cachestore.config import TOKEN_BYTES, StoreConfig
from cachestore.holdings import Holdings, Kept
from cachestore.lease import Claims
from cachestore.node import Span
from cachestore.stats import LookupCounts
from cachestore.tree import MatchKind, Walk
from cachestore.validation import (
    exhausted,
    require_kind,
    require_parting_distance,
    require_positions,
    require_rows,
    require_sequence,
)


@dataclass(frozen=True, slots=True)
class Query:
    """Who asks wants at most `limit` rows, and when `checkpointed` only such as have a checkpoint
    behind them. To `announce` is to promise the rows that are missing, and checkpoints at these
    positions; with a `parting_distance` one more, where others part from it, if that is so many
    tokens behind any other. Who has `waited` for rows goes on doing so for fewer of them."""

    namespace: bytes
    tokens: bytes
    limit: int
    announce: bool = False
    checkpointed: bool = False
    checkpoints: tuple[int, ...] = ()
    parting_distance: int = 0
    waited: bool = False

    @property
    def wanted(self) -> bytes:
        """The tokens whose rows may be served."""
        return self.tokens[: self.limit * TOKEN_BYTES]


@dataclass(frozen=True, slots=True)
class Match:
    """Rows [0, rows) in order, and the checkpoint behind them if the query needs one; `lease_id`
    is 0 for a miss that was not announced. `parting` is where one more checkpoint was announced,
    0 for nowhere."""

    kind: MatchKind
    rows: int
    spans: tuple[Span, ...]
    checkpoint: Span | None
    lease_id: int
    parting: int


NOTHING = Match(MatchKind.MISS, rows=0, spans=(), checkpoint=None, lease_id=0, parting=0)


@dataclass(frozen=True, slots=True)
class _Lease:
    kept: Kept
    announced: Announcement | None


class Serving:
    """Calls `settled` whenever waiting may be over: announced rows have been committed, or an
    announcement has ended."""

    def __init__(
        self,
        config: StoreConfig,
        holdings: Holdings,
        new_id: Callable[[], int],
        settled: Callable[[], None],
    ) -> None:
        self.counts = LookupCounts()
        self._config = config
        self._holdings = holdings
        self._settled = settled
        self._leases: Claims[_Lease] = Claims(config.lease_seconds, new_id)
        self._announcements = Announcements(
            config.record_tokens, config.max_announced_tokens_per_session
        )

    @property
    def changes(self) -> int:
        """Of leases, with which announcements come and go."""
        return self._leases.changes

    @property
    def leases(self) -> int:
        return len(self._leases)

    @property
    def announced(self) -> int:
        return len(self._announcements)

    def require(self, query: Query) -> int:
        """Refuse what cannot be asked; returns the number of tokens."""
        count = require_sequence(query.namespace, query.tokens, self._config.max_tokens)
        require_rows("limit", query.limit, count)
        require_positions(query.checkpointed, query.checkpoints, count)
        require_parting_distance(query.announce and query.checkpointed, query.parting_distance)
        require_kind(query.checkpointed, self._holdings.checkpointed(query.namespace))
        return count

    def rows_to_come(self, query: Query) -> int:
        """Rows that a lookup could be served if it waited: announced by somebody, not held yet.

        0 when they are few, as Announcements says. Changes nothing.
        """
        self.require(query)
        wanted = query.wanted
        to_come = self._announcements.rows_to_come(query.namespace, wanted, 0, query.waited)
        if to_come and query.checkpointed:
            usable = _usable(self._holdings.walk(query.namespace, wanted), query.limit)
            return self._announcements.rows_to_come(query.namespace, wanted, usable, query.waited)
        return to_come

    def lookup(self, session: int, query: Query, now: float) -> Match:
        """Find the longest held prefix, and lease what is served of it.

        A hit refreshes the recency of the whole path that agrees with the tokens, and of the
        checkpoint that is served. An announced miss has a lease, too.
        """
        count = self.require(query)
        if self._leases.count(session) >= self._config.max_leases_per_session:
            raise exhausted(f"lease: {self._leases.count(session)} are open; release some first")
        walk = self._holdings.walk(query.namespace, query.tokens)
        rows = min(walk.depth, query.limit)
        checkpoint = walk.checkpoint(query.limit) if query.checkpointed else None
        if query.checkpointed:
            rows = checkpoint.position if checkpoint is not None else 0
        kind = walk.kind if rows else MatchKind.MISS
        self.counts.add(kind, count, rows)
        if rows == 0 and not query.announce:
            return NOTHING
        spans = walk.spans(rows)
        kept = Kept(walk.path[: len(spans)], () if checkpoint is None else (checkpoint,))
        if rows:
            self._holdings.hit(walk, kept, now)
        parting = self._parting(query, walk, rows)
        announced = self._announce(session, query, walk, parting) if query.announce else None
        self._holdings.pin(kept)
        lease_id = self._leases.open(session, _Lease(kept, announced), now)
        return Match(kind, rows, spans, checkpoint.span if checkpoint else None, lease_id, parting)

    def renew(self, session: int, lease_ids: Sequence[int], now: float) -> list[bool]:
        return [self._leases.renew(session, lease_id, now) for lease_id in lease_ids]

    def release(self, session: int, lease_ids: Sequence[int]) -> None:
        for lease_id in lease_ids:
            lease = self._leases.close(session, lease_id)
            if lease is not None:
                self._end(lease)

    def close_session(self, session: int) -> None:
        for lease in self._leases.close_session(session):
            self._end(lease)

    def lapse(self, now: float) -> None:
        for _, _, lease in self._leases.lapse(now):
            self._end(lease)

    def committed(
        self, namespace: bytes, tokens: bytes, checkpoints: tuple[int, ...] | None
    ) -> None:
        """All rows of `tokens` are held now, and checkpoints at these positions where rows need
        them: somebody may have waited for that."""
        if self._announcements.commit(namespace, tokens, checkpoints):
            self._settled()

    def kept(self) -> list[Kept]:
        """What is pinned here, once for each lease."""
        return [lease.kept for lease in self._leases.held()]

    def checks(self) -> Iterator[int]:
        """Verify every invariant, as Store.checks does."""
        yield from self._leases.checks()
        announced = [lease.announced for lease in self._leases.held()]
        yield from self._announcements.checks([one for one in announced if one is not None])

    def _parting(self, query: Query, walk: Walk, rows: int) -> int:
        """Where these tokens part from what others hold or have announced, if a checkpoint there
        is worth it to the next one who parts there, and 0 otherwise."""
        if query.parting_distance == 0:
            return 0
        held = min(walk.depth, query.limit)
        parting = self._announcements.parting(query.namespace, query.wanted, held)
        before = max(rows, deepest(query.checkpoints, parting))
        return parting if parting - before >= query.parting_distance else 0

    def _announce(
        self, session: int, query: Query, walk: Walk, parting: int
    ) -> Announcement | None:
        namespace, tokens = query.namespace, query.tokens
        if not query.checkpointed:
            return self._announcements.open(session, namespace, tokens, walk.depth)
        positions = sorted({*query.checkpoints, parting} - {0})
        usable = _usable(walk, walk.depth)
        return self._announcements.open(session, namespace, tokens, usable, tuple(positions))

    def _end(self, lease: _Lease) -> None:
        self._holdings.unpin(lease.kept)
        if lease.announced is not None:
            self._announcements.close(lease.announced)
            self._settled()


def _usable(walk: Walk, limit: int) -> int:
    """Rows that can be served of a checkpointed namespace."""
    checkpoint = walk.checkpoint(limit)
    return checkpoint.position if checkpoint is not None else 0
