"""What a store has been told, and what it must find by that: the model of its state machine."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from cachestore.checkpoints import BRANCH_IDLE_SECONDS
from cachestore.eviction import Candidate
from cachestore.node import Checkpoint, Record
from cachestore.store import MatchKind
from tests.support.claims import CHECKPOINTED, Ids, Writer
from tests.support.stores import Bench


@dataclass
class Ledger:
    """Of rows it knows what was committed, and of checkpoints also which were served or committed
    last: it foresees what is served, and who leaves before whom."""

    bench: Bench
    committed: set[tuple[bytes, Ids]] = field(default_factory=set)
    ended: set[tuple[bytes, Ids]] = field(default_factory=set)
    # By id: what was committed, and when it was last used.
    checkpoints: dict[int, tuple[bytes, Ids]] = field(default_factory=dict)
    uses: dict[int, int] = field(default_factory=dict)
    used_at: dict[int, float] = field(default_factory=dict)
    lost: int = 0

    @property
    def stored(self) -> Mapping[int, Candidate]:
        return self.bench.store.stored

    def commit(self, writer: Writer) -> None:
        self.committed.add((writer.namespace, writer.ids))
        if writer.whole:
            self.ended.add((writer.namespace, writer.ids))

    def learn(self, checkpoint_id: int, namespace: bytes, ids: Ids) -> None:
        assert self.checkpoints.setdefault(checkpoint_id, (namespace, ids)) == (namespace, ids)
        self.use(checkpoint_id)

    def use(self, checkpoint_id: int) -> None:
        self.uses[checkpoint_id] = 1 + max(self.uses.values(), default=0)
        self.used_at[checkpoint_id] = self.bench.now

    def best(self, namespace: bytes, ids: Ids) -> tuple[MatchKind, int]:
        """What a store that forgets nothing would find."""
        held = {
            known[: n + 1]
            for own, known in self.committed
            if own == namespace
            for n in range(len(known))
        }
        ends = {known for own, known in self.ended if own == namespace}
        depth = max((n for n in range(1, len(ids) + 1) if ids[:n] in held), default=0)
        if depth == 0:
            return MatchKind.MISS, 0
        if ids in ends:
            return MatchKind.EXACT, depth
        if any((*ids, token) in held for token in range(3)):
            return MatchKind.SUPERSEQUENCE, depth
        return (MatchKind.PREFIX if ids[:depth] in ends else MatchKind.LCP), depth

    def depths(self, namespace: bytes, ids: Ids, served: int) -> range:
        """How many rows of these may be held: when some have left, any number from those that are
        served on."""
        _, depth = self.best(namespace, ids)
        return range(depth if self.nothing_left() else served, depth + 1)

    def rows_held(self, session: int, namespace: bytes, ids: Ids) -> int:
        """How many rows of these a lookup is served at most: with a limit it would be fewer."""
        if namespace == CHECKPOINTED:
            return self.usable(namespace, ids)
        match = self.bench.lookup(ids, len(ids), namespace, session)
        self.bench.store.release(session, [match.lease_id], self.bench.now)
        return match.rows

    def may_lack(self, namespace: bytes, ids: Ids, served: int) -> bool:
        """Whether the last of these rows may have left, or never been there, when a lookup of
        them is served so many."""
        there = self.nothing_left() and self.best(namespace, ids)[1] == len(ids)
        return served < len(ids) and not there

    def nothing_left(self) -> bool:
        return self.lost == 0 and self.bench.store.statistics(self.bench.now).evictions == 0

    def held(self, namespace: bytes) -> dict[Ids, int]:
        """The checkpoints that the store still has."""
        return {
            ids: checkpoint_id
            for checkpoint_id, (own, ids) in self.checkpoints.items()
            if own == namespace and checkpoint_id in self.stored
        }

    def usable(self, namespace: bytes, ids: Ids) -> int:
        """Rows that a lookup of a checkpointed namespace is served."""
        held = self.held(namespace)
        return max((n for n in range(1, len(ids) + 1) if ids[:n] in held), default=0)

    def check_bound(self, writer: Writer, before: Mapping[Ids, int], bound: int) -> None:
        """Right after a commit, when `before` was held. No more stay than may, and no fewer; those
        that have left were not used for longest."""
        now = self.held(writer.namespace)
        ever, start = {**before, **now}, writer.conversation_start
        path = sorted((ids for ids in ever if writer.ids[: len(ids)] == ids), key=len)
        staying = {*path[-1:], *(writer.ids[:n] for n in writer.positions)}
        groups = [(path[1:], 0.0)]
        if 0 < start <= len(writer.ids):
            others = [ids for ids in ever if len(ids) > start and ids not in path]
            branches = [ids for ids in others if ids[:start] == writer.ids[:start]]
            groups = [
                ([ids for ids in path[1:] if len(ids) <= start], 0.0),
                ([ids for ids in path if len(ids) > start], 0.0),
                (branches, BRANCH_IDLE_SECONDS),
            ]
        for group, idle_seconds in groups:
            gone = [ever[ids] for ids in group if ids not in now]
            assert not gone or writer.positions
            assert all(self._idle_seconds(each) >= idle_seconds for each in gone)
            free = {
                ids
                for ids in group
                if ids in now and self._free([now[ids]])
                if self._idle_seconds(now[ids]) >= idle_seconds
            }
            droppable = [now[ids] for ids in free - staying]
            assert not gone or len(free) >= bound
            assert not writer.positions or len(free) <= bound or not droppable
            self._check_order(gone, droppable)
        assert before.keys() - now.keys() <= {ids for group, _ in groups for ids in group}

    def check_eviction(self, before: Mapping[int, Candidate]) -> None:
        """Right after room was made: rows that no lookup can reach were the first to leave."""
        gone = [stored for stored in before.values() if stored.id not in self.stored]
        self._check_order(
            [stored.id for stored in gone if isinstance(stored, Checkpoint)],
            [stored.id for stored in self.stored.values() if isinstance(stored, Checkpoint)],
        )
        if any(isinstance(stored, Checkpoint) or not stored.checkpointed for stored in gone):
            records = [stored for stored in self.stored.values() if isinstance(stored, Record)]
            assert not any(record.unreachable for record in records)

    def _check_order(self, gone: Collection[int], left: Collection[int]) -> None:
        latest = max((self.uses[each] for each in gone), default=0)
        assert all(self.uses[each] > latest for each in self._free(left))

    def _idle_seconds(self, checkpoint_id: int) -> float:
        return self.bench.now - self.used_at[checkpoint_id]

    def _free(self, checkpoint_ids: Collection[int]) -> list[int]:
        return [each for each in checkpoint_ids if self.stored[each].pins == 0]
