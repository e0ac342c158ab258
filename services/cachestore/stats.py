"""Everything that the store counts; the fields are those of StatsResponse in the proto."""

from collections import Counter
from dataclasses import dataclass, field

from cachestore.tree import MatchKind


@dataclass(frozen=True, slots=True)
class NamespaceStatistics:
    namespace: bytes
    label: str
    bytes_used: int
    tokens: int
    records: int
    sequences: int


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
    namespaces: tuple[NamespaceStatistics, ...]
    lookups: LookupStatistics
    writes: WriteStatistics
    evictions: int
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

    def statistics(self) -> WriteStatistics:
        return WriteStatistics(
            committed=self.committed,
            rows_inserted=self.rows_inserted,
            rows_duplicate=self.rows_duplicate,
            refused=self.refused,
            dropped=self.dropped,
        )
