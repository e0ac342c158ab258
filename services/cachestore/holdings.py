"""What is held: namespaces, their trees, the bytes of their records, and who leaves for room."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sortedcontainers import SortedList

from cachestore.arena import Arena, Extent, State
from cachestore.config import TOKEN_BYTES, StoreConfig
from cachestore.eviction import LeastRecentlyUsed
from cachestore.refusal import NeedSlab, RefusalCode, Refused
from cachestore.stats import NamespaceStatistics
from cachestore.tree import Record, Span, Tree, Walk


@dataclass(frozen=True, slots=True)
class Piece:
    """One record to be written: rows [first_token, first_token + rows) of a sequence."""

    extent: Extent
    first_token: int
    rows: int


@dataclass(slots=True)
class Namespace:
    label: str
    tree: Tree
    bytes_used: int = 0


class Holdings:
    """Keeps trees, arena and eviction policy in step.

    A namespace exists as long as its tree holds a record. Pins always cover a whole path from the
    root, so exactly the records without a pin could leave, one after the other. While `growing`
    is False, room is made by eviction rather than by another slab.
    """

    def __init__(self, config: StoreConfig) -> None:
        self.arena = Arena()
        self.namespaces: dict[bytes, Namespace] = {}
        self.records: dict[int, Record] = {}  # by id, which is the order of their age
        self.evictions = 0
        self.bytes_evicted = 0
        self.bytes_padding = 0
        self.bytes_stranded = 0
        self.growing = True
        self._config = config
        self._policy = LeastRecentlyUsed()
        self._at: dict[tuple[int, int], Record] = {}  # by slab and offset
        self._lengths: SortedList[int] = SortedList()  # of all records' extents
        self._pinned: set[Record] = set()
        self._bytes_pinned = 0
        self._last_record_id = 0

    @property
    def median_bytes(self) -> int:
        """Of the extents of all records; 0 without records."""
        return int(self._lengths[(len(self._lengths) - 1) // 2]) if self._lengths else 0

    @property
    def bytes_useful(self) -> int:
        """Free bytes in holes that a record of the median size fits in."""
        return self.arena.bytes_in_holes(self.median_bytes)

    def record_at(self, slab_id: int, offset: int) -> Record | None:
        """The record whose extent begins there."""
        return self._at.get((slab_id, offset))

    def slide(self, record: Record) -> Extent:
        """A record without pins changes places with the hole before it; the caller moves its
        bytes, before anything else happens."""
        assert record.pins == 0
        extent = record.span.extent
        moved = self.arena.slide(extent)
        del self._at[extent.slab_id, extent.offset]
        self._at[moved.slab_id, moved.offset] = record
        record.span = replace(record.span, extent=moved)
        return moved

    def walk(self, namespace: bytes, tokens: bytes) -> Walk:
        held = self.namespaces.get(namespace)
        return (held.tree if held is not None else Tree(namespace)).walk(tokens)

    def hit(self, path: Sequence[Record], served: int, now: float) -> None:
        """A lookup agreed with the path, and was served rows of its first `served` records."""
        for record in path[:served]:
            record.hits += 1
        self._use(path, now)

    def pin(self, path: Sequence[Record]) -> None:
        """Keep the records of a path, from the root down, until they are unpinned as often."""
        for record in path:
            if record.pins == 0:
                self._pinned.add(record)
                self._bytes_pinned += record.bytes_held
            record.pins += 1
        if path:
            self._policy.settle(path[-1])

    def unpin(self, path: Sequence[Record]) -> None:
        for record in path:
            assert record.pins > 0
            record.pins -= 1
            if record.pins == 0:
                self._pinned.remove(record)
                self._bytes_pinned -= record.bytes_held
        if path:
            self._policy.settle(path[-1])

    def require_bytes(self, needed: int) -> None:
        """Refuse what cannot fit, however the bytes may lie, before anything is evicted for it."""
        budget = self._config.budget_bytes
        if needed > budget:
            raise Refused(
                RefusalCode.RESOURCE_EXHAUSTED,
                f"tokens: the entry takes {needed} bytes of a budget of {budget}; "
                "raise --budget or store fewer tokens",
            )
        unpinned = self.arena.bytes_in(State.USED) - self._bytes_pinned
        growth = budget - self.arena.bytes_slabs
        if needed > self.arena.bytes_free + growth + unpinned:
            raise _no_room()

    def allocate(self, lengths: Sequence[int]) -> list[Extent]:
        """Extents of these lengths, all equal but the last, which may be shorter.

        Takes free bytes first, then asks for a slab (NeedSlab), then evicts; the other way
        round when not growing. Raises Refused, if it can be known before anything is evicted,
        when what is pinned or being written leaves no room. The caller has asked `require_bytes`.
        """
        taken: list[Extent] = []
        evicting = False
        try:
            for index, length in enumerate(lengths):
                extent = self.arena.allocate(length)
                if extent is None and not evicting:
                    self._require_room(lengths[index:], whole=lengths[0])
                    evicting = True
                taken.append(extent or self._evict_for(length))
        except (NeedSlab, Refused):
            for extent in taken:
                self.arena.free(extent)
            raise
        return taken

    def insert(
        self,
        key: bytes,
        label: str,
        tokens: bytes,
        whole: bool,
        pieces: Sequence[Piece],
        record_bytes: Sequence[int],
        now: float,
    ) -> int:
        """Add what is still missing of a sequence, and mark its end unless there is more of it to
        come; return the rows added.

        The pieces cover the sequence from somewhere inside what is held to its end:

            held      ├──────────────────────┤ depth
            pieces            ├─ freed ─┼─ cut ───┼─ new ───┤

        The path is used, and bytes of the first kind of piece are free again.
        """
        namespace = self.namespaces.setdefault(key, Namespace(label, Tree(key)))
        walk = namespace.tree.walk(tokens)
        first_token = pieces[0].first_token if pieces else len(tokens) // TOKEN_BYTES
        assert walk.depth >= first_token, "the path up to the first piece is pinned"
        path, end, offset = list(walk.path), walk.end, walk.offset
        for piece, size in zip(pieces, record_bytes, strict=True):
            piece_end = piece.first_token + piece.rows
            if piece_end <= walk.depth:
                self.arena.free(piece.extent)
                continue
            start = max(walk.depth, piece.first_token)
            run = tokens[start * TOKEN_BYTES : piece_end * TOKEN_BYTES]
            span = self._adopt(piece, size, first_row=start - piece.first_token)
            namespace.bytes_used += piece.extent.length
            record = namespace.tree.insert(end, offset, run, span)
            self.records[span.record_id] = record
            self._at[span.extent.slab_id, span.extent.offset] = record
            self._lengths.add(span.extent.length)
            path.append(record)
            end, offset = record, record.rows
        if walk.path:
            self._policy.settle(walk.path[-1])
        if whole:
            namespace.tree.mark(end, offset)
        self._use(path, now)
        return len(tokens) // TOKEN_BYTES - walk.depth

    def statistics(self) -> tuple[NamespaceStatistics, ...]:
        return tuple(
            NamespaceStatistics(
                namespace=namespace.tree.namespace,
                label=namespace.label,
                bytes_used=namespace.bytes_used,
                tokens=namespace.tree.tokens,
                records=namespace.tree.records,
                sequences=namespace.tree.sequences,
            )
            for namespace in self.namespaces.values()
        )

    def drop(self, record: Record) -> None:
        """Take out an idle record, and free its bytes."""
        namespace = self.namespaces[record.namespace]
        self._policy.forget(record)
        above = namespace.tree.remove(record)
        extent = record.span.extent
        del self.records[record.span.record_id]
        del self._at[extent.slab_id, extent.offset]
        self._lengths.remove(extent.length)
        self.arena.free(extent)
        namespace.bytes_used -= record.bytes_held
        self.bytes_padding -= record.span.bytes_padding
        self.bytes_stranded -= record.span.bytes_stranded
        if above is not None:
            self._policy.settle(above)
        if namespace.tree.records == 0:
            del self.namespaces[record.namespace]

    def check(self) -> None:
        """Verify every invariant, in time proportional to everything that is held."""
        self.arena.check()
        records = [record for held in self.namespaces.values() for record in held.tree]
        assert {record.span.record_id: record for record in records} == self.records
        assert list(self.records) == sorted(self.records)
        self._policy.check(records)
        pinned = {record for record in records if record.pins > 0}
        assert self._pinned == pinned
        assert self._bytes_pinned == sum(record.bytes_held for record in pinned)
        assert self.bytes_padding == sum(record.span.bytes_padding for record in records)
        assert self.bytes_stranded == sum(record.span.bytes_stranded for record in records)
        extents = {record.span.extent for record in records}
        assert extents == self.arena.held(State.USED)
        assert len(extents) == len(records)
        at = {(r.span.extent.slab_id, r.span.extent.offset): r for r in records}
        assert self._at == at
        assert list(self._lengths) == sorted(extent.length for extent in extents)
        for key, namespace in self.namespaces.items():
            namespace.tree.check()
            assert namespace.tree.namespace == key
            assert namespace.tree.records > 0
            assert namespace.bytes_used == sum(record.bytes_held for record in namespace.tree)
        # A pinned record has only pinned ones above it.
        above = [record.parent for record in pinned]
        assert all(parent.pins > 0 for parent in above if parent is not None and parent.rows > 0)

    def _require_room(self, lengths: Sequence[int], whole: int) -> None:
        """Called when no hole is large enough, before anything is evicted.

        The slab is asked for by the length of a whole record also when only the last one, which
        may be shorter, is left: so no slab is asked for after an eviction.
        """
        slab_bytes = self._config.next_slab_bytes(self.arena.bytes_slabs)
        if slab_bytes >= whole and self.growing:
            raise NeedSlab(slab_bytes)
        if not self.arena.could_hold(lengths, [record.span.extent for record in self._pinned]):
            raise NeedSlab(slab_bytes) if slab_bytes >= whole else _no_room()

    def _evict_for(self, length: int) -> Extent:
        while (extent := self.arena.allocate(length)) is None:
            victim = self._policy.victim()
            if victim is None:
                raise _no_room()
            self.drop(victim)
            self.evictions += 1
            self.bytes_evicted += victim.bytes_held
        return extent

    def _adopt(self, piece: Piece, record_bytes: int, first_row: int) -> Span:
        self.arena.turn(piece.extent, State.USED)
        self._last_record_id += 1
        span = Span(
            record_id=self._last_record_id,
            extent=piece.extent,
            record_bytes=record_bytes,
            first_row=first_row,
            rows=piece.rows - first_row,
        )
        self.bytes_padding += span.bytes_padding
        self.bytes_stranded += span.bytes_stranded
        return span

    def _use(self, path: Sequence[Record], now: float) -> None:
        self._policy.use(path)
        for record in path:
            record.used_at = now


def _no_room() -> Refused:
    return Refused(
        RefusalCode.RESOURCE_EXHAUSTED,
        "tokens: no room beside what is pinned or being written; retry later or raise --budget",
    )
