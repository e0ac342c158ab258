"""What is held: namespaces with their trees, the bytes of all that is in them, and who leaves."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cachestore.arena import Arena, State
from cachestore.checkpoints import bounded, surplus
from cachestore.config import TOKEN_BYTES, StoreConfig
from cachestore.eviction import Candidate, LeastRecentlyUsed
from cachestore.extent import Extent
from cachestore.inventory import Inventory
from cachestore.node import Checkpoint, Record, Span
from cachestore.refusal import NeedSlab, RefusalCode, Refused
from cachestore.stats import Departures, NamespaceStatistics
from cachestore.tree import Tree, Walk
from cachestore.write import Inserted, Sizes, Staged


@dataclass(slots=True)
class Namespace:
    label: str
    tree: Tree
    bytes_used: int = 0
    bytes_checkpoints: int = 0


class Kept(NamedTuple):
    """What a claim keeps from leaving: a path from the root down, and checkpoints on it."""

    path: tuple[Record, ...]
    checkpoints: tuple[Checkpoint, ...] = ()

    @property
    def stored(self) -> list[Candidate]:
        return [*self.path, *self.checkpoints]


class Holdings:
    """Keeps trees, arena, inventory and eviction policy in step.

    A namespace exists as long as its tree holds a record. Pins always cover a whole path from the
    root, and that of a checkpoint the path to its record, so exactly what has no pin could leave,
    one after the other. While `growing` is False, room is made by eviction rather than by another
    slab.
    """

    def __init__(self, config: StoreConfig) -> None:
        self.arena = Arena()
        self.inventory = Inventory()
        self.namespaces: dict[bytes, Namespace] = {}
        self.departures = Departures()
        self.growing = True
        self.changes = 0  # of what is pinned
        self._config = config
        self._policy = LeastRecentlyUsed()

    @property
    def bytes_useful(self) -> int:
        """Free bytes in holes that a record of the median size fits in."""
        return self.arena.bytes_in_holes(self.inventory.median_bytes)

    def slide(self, stored: Candidate) -> Extent:
        """Something without pins changes places with the hole before it; the caller moves its
        bytes, before anything else happens."""
        moved = self.arena.slide(stored.span.extent)
        self.inventory.move(stored, moved)
        return moved

    def walk(self, namespace: bytes, tokens: bytes) -> Walk:
        held = self.namespaces.get(namespace)
        return (held.tree if held is not None else Tree(namespace)).walk(tokens)

    def checkpointed(self, namespace: bytes) -> bool | None:
        """Whether rows of the namespace need checkpoints; None when it holds nothing."""
        held = self.namespaces.get(namespace)
        return held.tree.checkpointed if held is not None else None

    def hit(self, walk: Walk, kept: Kept, now: float) -> None:
        """A lookup agreed with a path, and was served what it keeps."""
        for stored in kept.stored:
            stored.hits += 1
        self._use(walk.path, kept.checkpoints, now)

    def pin(self, kept: Kept) -> None:
        """Let none of it leave until it is unpinned as often."""
        for stored in kept.stored:
            self.inventory.pin(stored)
        self.changes += 1
        self._settle(kept)

    def unpin(self, kept: Kept) -> None:
        for stored in kept.stored:
            self.inventory.unpin(stored)
        self.changes += 1
        self._settle(kept)

    def require_bytes(self, needed: int) -> None:
        """Refuse what cannot fit, however the bytes may lie, before anything is evicted for it."""
        budget = self._config.budget_bytes
        if needed > budget:
            raise Refused(
                RefusalCode.RESOURCE_EXHAUSTED,
                f"tokens: the entry takes {needed} bytes of a budget of {budget}; "
                "raise --budget or store fewer tokens",
            )
        unpinned = self.arena.bytes_in(State.USED) - self.inventory.bytes_pinned
        growth = budget - self.arena.bytes_slabs
        if needed > self.arena.bytes_free + growth + unpinned:
            raise _no_room()

    def allocate(self, lengths: Sequence[int]) -> list[Extent]:
        """Extents of these lengths.

        Takes free bytes first, then asks for a slab (NeedSlab), then evicts; the other way
        round when not growing. Raises Refused, if it can be known before anything is evicted,
        when what is pinned or being written leaves no room. The caller has asked `require_bytes`.
        """
        # The long ones first: short ones fit between, but not the other way round.
        order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        taken: dict[int, Extent] = {}
        evicting = False
        try:
            for done, index in enumerate(order):
                extent = self.arena.allocate(lengths[index])
                if extent is None and not evicting:
                    left = [lengths[later] for later in order[done:]]
                    self._require_room(left, longest=lengths[order[0]])
                    evicting = True
                taken[index] = extent or self._evict_for(lengths[index])
        except (NeedSlab, Refused):
            for extent in taken.values():
                self.arena.free(extent)
            raise
        return [taken[index] for index in range(len(lengths))]

    def insert(self, staged: Staged, sizes: Sizes, now: float) -> Inserted:
        """Add what is still missing of a sequence, and mark its end unless there is more of it to
        come. Then bound the checkpoints of the conversation.

        The pieces cover the sequence from somewhere inside what is held to its end:

            held      ├──────────────────────┤ depth
            pieces            ├─ freed ─┼─ cut ───┼─ new ───┤

        The path and the new checkpoints are used, and bytes of the first kind of piece are free
        again, as are those of checkpoints that are held already.
        """
        target = staged.target
        namespace = self.namespaces.setdefault(
            target.namespace, Namespace(target.label, Tree(target.namespace, target.checkpointed))
        )
        before = namespace.tree.walk(target.tokens)
        walk = self._insert_rows(namespace, before, staged, sizes.records)
        if before.path:
            self._policy.settle(before.path[-1])
        if target.whole:
            namespace.tree.mark(walk.end, walk.offset)
        inserted, fresh = self._insert_checkpoints(namespace, walk, staged, sizes.checkpoints)
        self._use(walk.path, fresh, now)
        if fresh:
            # The last one keeps the rows of whoever has written the end of the sequence.
            staying = (*fresh, *walk.checkpoints()[-1:])
            for group in bounded(walk, target.conversation_start):
                for checkpoint in surplus(group, self._config.checkpoints_max, staying, now):
                    self.departures.surplus(self.evict(checkpoint))
        return Inserted(walk.depth - before.depth, inserted)

    def statistics(self) -> tuple[NamespaceStatistics, ...]:
        return tuple(
            NamespaceStatistics(
                namespace=namespace.tree.namespace,
                label=namespace.label,
                bytes_used=namespace.bytes_used,
                tokens=namespace.tree.tokens,
                records=namespace.tree.records,
                sequences=namespace.tree.sequences,
                checkpointed=namespace.tree.checkpointed,
                checkpoints=namespace.tree.checkpoints,
                bytes_checkpoints=namespace.bytes_checkpoints,
            )
            for namespace in self.namespaces.values()
        )

    def evict(self, stored: Candidate) -> list[Candidate]:
        """Take out something idle, and the rows that no lookup can reach without it; returns all
        that has left."""
        self.drop(stored)
        gone = [stored]
        above = stored.record if isinstance(stored, Checkpoint) else stored.parent
        while above is not None and above.parent is not None and above.unreachable:
            self.drop(above)
            gone.append(above)
            above = above.parent
        return gone

    def drop(self, stored: Candidate) -> None:
        """Take out something idle, and free its bytes."""
        namespace = self.namespaces[stored.namespace]
        self._policy.forget(stored)
        if isinstance(stored, Checkpoint):
            above: Record | None = stored.record
            namespace.tree.detach(stored)
            namespace.bytes_checkpoints -= stored.bytes_held
        else:
            above = namespace.tree.remove(stored)
        self.inventory.remove(stored)
        self.arena.free(stored.span.extent)
        namespace.bytes_used -= stored.bytes_held
        if above is not None:
            self._policy.settle(above)
        if namespace.tree.records == 0:
            del self.namespaces[stored.namespace]

    def checks(self) -> Iterator[int]:
        """Verify every invariant, as Store.checks does."""
        yield from self.arena.checks()
        stored: list[Candidate] = []
        for key, namespace in self.namespaces.items():
            yield from namespace.tree.checks()
            assert namespace.tree.namespace == key
            assert namespace.tree.records > 0
            bytes_records = bytes_checkpoints = 0
            for record in namespace.tree:
                bytes_records += record.bytes_held
                bytes_checkpoints += sum(c.bytes_held for c in record.checkpoints.values())
                # What is pinned has only pinned records above it.
                above = record.parent
                assert not record.pins or above is None or above.parent is None or above.pins
                assert record.pins or not any(c.pins for c in record.checkpoints.values())
                stored += [record, *record.checkpoints.values()]
                yield 1 + len(record.checkpoints)
            assert namespace.bytes_checkpoints == bytes_checkpoints
            assert namespace.bytes_used == bytes_records + bytes_checkpoints
        yield from self._policy.checks(stored)
        yield from self.inventory.checks(stored, self.arena.held(State.USED))

    def _insert_rows(
        self, namespace: Namespace, walk: Walk, staged: Staged, record_bytes: Sequence[int]
    ) -> Walk:
        """Returns the walk of the whole sequence."""
        tokens, depth = staged.target.tokens, walk.depth
        first_token = staged.pieces[0].first_token if staged.pieces else staged.target.count
        assert depth >= first_token, "the path up to the first piece is pinned"
        path, end, offset = list(walk.path), walk.end, walk.offset
        for piece, size in zip(staged.pieces, record_bytes, strict=True):
            piece_end = piece.first_token + piece.rows
            if piece_end <= depth:
                self.arena.free(piece.extent)
                continue
            start = max(depth, piece.first_token)
            run = tokens[start * TOKEN_BYTES : piece_end * TOKEN_BYTES]
            first_row = start - piece.first_token
            span = self._adopt(piece.extent, size, first_row, piece.rows - first_row)
            end = namespace.tree.insert(end, offset, run, span)
            offset = end.rows
            self._add(namespace, end)
            path.append(end)
        return replace(walk, path=tuple(path), end=end, offset=offset, depth=staged.target.count)

    def _insert_checkpoints(
        self, namespace: Namespace, walk: Walk, staged: Staged, checkpoint_bytes: Sequence[int]
    ) -> tuple[int, tuple[Checkpoint, ...]]:
        """Returns how many were missing, and all of them as they are held now."""
        inserted, fresh = 0, []
        for new, size in zip(staged.checkpoints, checkpoint_bytes, strict=True):
            record, offset = walk.place(new.position)
            if offset in record.checkpoints:
                self.arena.free(new.extent)
            else:
                span = self._adopt(new.extent, size, first_row=0, rows=1)
                checkpoint = namespace.tree.attach(record, offset, span)
                namespace.bytes_checkpoints += checkpoint.bytes_held
                self._add(namespace, checkpoint)
                self._policy.settle(record)
                inserted += 1
            fresh.append(record.checkpoints[offset])
        return inserted, tuple(fresh)

    def _adopt(self, extent: Extent, record_bytes: int, first_row: int, rows: int) -> Span:
        self.arena.turn(extent, State.USED)
        return Span(self.inventory.next_id(), extent, record_bytes, first_row, rows)

    def _add(self, namespace: Namespace, stored: Candidate) -> None:
        namespace.bytes_used += stored.bytes_held
        self.inventory.add(stored)

    def _use(self, path: Sequence[Record], checkpoints: Collection[Checkpoint], now: float) -> None:
        self._policy.use(path)
        for checkpoint in checkpoints:
            self._policy.use_checkpoint(checkpoint)
        for stored in (*path, *checkpoints):
            stored.used_at = now

    def _settle(self, kept: Kept) -> None:
        """All records above the last one have children."""
        for stored in kept._replace(path=kept.path[-1:]).stored:
            self._policy.settle(stored)

    def _require_room(self, lengths: Sequence[int], longest: int) -> None:
        """Called when no hole is large enough, before anything is evicted.

        The slab is asked for by the longest extent also when only shorter ones are left: so no
        slab is asked for after an eviction.
        """
        slab_bytes = self._config.next_slab_bytes(self.arena.bytes_slabs, longest)
        if slab_bytes >= longest and self.growing:
            raise NeedSlab(slab_bytes)
        if not self.arena.could_hold(lengths, self.inventory.pinned_extents):
            raise NeedSlab(slab_bytes) if slab_bytes >= longest else _no_room()

    def _evict_for(self, length: int) -> Extent:
        while (extent := self.arena.allocate(length)) is None:
            victim = self._policy.victim()
            if victim is None:
                raise _no_room()
            self.departures.evicted(self.evict(victim))
        return extent


def _no_room() -> Refused:
    return Refused(
        RefusalCode.RESOURCE_EXHAUSTED,
        "tokens: no room beside what is pinned or being written; retry later or raise --budget",
    )
