"""Everything that the store counts; the fields are those of StatsResponse in the proto."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from cachestore.node import Checkpoint, Stored
from cachestore.tree import MatchKind
from cachestore.write import Inserted, Staged


@dataclass(frozen=True, slots=True)
class NamespaceStatistics:
    namespace: bytes
    label: str
    bytes_used: int
    tokens: int
    records: int
    sequences: int
    checkpointed: bool
    checkpoints: int
    bytes_checkpoints: int


@dataclass(frozen=True, slots=True)
class LookupStatistics:
    exact: int
    supersequence: int
    prefix: int
    lcp: int
    miss: int
    tokens_requested: int
    tokens_served: int


@dataclass(frozen=True, slots=True)
class WriteStatistics:
    committed: int
    rows_inserted: int
    rows_duplicate: int
    refused: int
    dropped: int
    checkpoints_inserted: int
    checkpoints_duplicate: int


@dataclass(frozen=True, slots=True)
class Statistics:
    bytes_budget: int
    bytes_slabs: int
    bytes_used: int
    bytes_reserved: int
    bytes_quarantined: int
    bytes_retiring: int
    bytes_free: int
    bytes_useful: int
    bytes_padding: int
    bytes_stranded: int
    slabs: int
    records: int
    sequences: int
    tokens: int
    checkpoints: int
    bytes_checkpoints: int
    namespaces: tuple[NamespaceStatistics, ...]
    lookups: LookupStatistics
    writes: WriteStatistics
    evictions: int
    checkpoints_evicted: int
    checkpoints_surplus: int
    bytes_evicted: int
    bytes_moved: int
    sessions: int
    leases: int
    reservations: int
    announced: int
    pinned: int
    slab_failures: int
    check_failures: int


@dataclass(slots=True)
class LookupCounts:
    kinds: Counter[MatchKind] = field(default_factory=Counter)
    tokens_requested: int = 0
    tokens_served: int = 0

    def add(self, kind: MatchKind, tokens_requested: int, tokens_served: int) -> None:
        self.kinds[kind] += 1
        self.tokens_requested += tokens_requested
        self.tokens_served += tokens_served

    def statistics(self) -> LookupStatistics:
        return LookupStatistics(
            exact=self.kinds[MatchKind.EXACT],
            supersequence=self.kinds[MatchKind.SUPERSEQUENCE],
            prefix=self.kinds[MatchKind.PREFIX],
            lcp=self.kinds[MatchKind.LCP],
            miss=self.kinds[MatchKind.MISS],
            tokens_requested=self.tokens_requested,
            tokens_served=self.tokens_served,
        )


@dataclass(slots=True)
class WriteCounts:
    committed: int = 0
    rows_inserted: int = 0
    rows_duplicate: int = 0
    refused: int = 0
    dropped: int = 0
    checkpoints_inserted: int = 0
    checkpoints_duplicate: int = 0

    def add(self, staged: Staged, inserted: Inserted) -> None:
        """Count a commit."""
        self.committed += 1
        self.rows_inserted += inserted.rows
        self.rows_duplicate += sum(piece.rows for piece in staged.pieces) - inserted.rows
        self.checkpoints_inserted += inserted.checkpoints
        self.checkpoints_duplicate += len(staged.checkpoints) - inserted.checkpoints

    def statistics(self) -> WriteStatistics:
        return WriteStatistics(
            committed=self.committed,
            rows_inserted=self.rows_inserted,
            rows_duplicate=self.rows_duplicate,
            refused=self.refused,
            dropped=self.dropped,
            checkpoints_inserted=self.checkpoints_inserted,
            checkpoints_duplicate=self.checkpoints_duplicate,
        )


@dataclass(slots=True)
class Departures:
    """What has left: for room, because a conversation had too many checkpoints, or because no
    checkpoint led to it any more."""

    records: int = 0
    checkpoints_evicted: int = 0
    checkpoints_surplus: int = 0
    bytes: int = 0

    def evicted(self, gone: Sequence[Stored]) -> None:
        self.checkpoints_evicted += self._add(gone)

    def surplus(self, gone: Sequence[Stored]) -> None:
        self.checkpoints_surplus += self._add(gone)

    def _add(self, gone: Sequence[Stored]) -> int:
        """Returns how many of them are checkpoints."""
        checkpoints = sum(isinstance(stored, Checkpoint) for stored in gone)
        self.records += len(gone) - checkpoints
        self.bytes += sum(stored.bytes_held for stored in gone)
        return checkpoints
