"""The tree against a list of prefixes: which (record, row) holds the last token of each, and which
checkpoint is right behind it."""

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cachestore.checkpoints import beneath
from cachestore.extent import Extent
from cachestore.node import Checkpoint, Record, Span
from cachestore.tree import MatchKind, Tree, Walk
from tests.support.machines import MACHINE
from tests.support.stores import NAMESPACE, packed
from tests.support.whole import whole

Ids = tuple[int, ...]
# Few tokens, so that sequences share prefixes; bytes of one are not those of another shifted.
SEQUENCES = st.lists(st.sampled_from([0, 1, 256, 2**32 - 1]), min_size=1, max_size=12).map(tuple)


class TreeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree = Tree(NAMESPACE, checkpointed=True)
        self.rows: dict[Ids, tuple[int, int]] = {}
        self.checkpoints: dict[Ids, Checkpoint] = {}
        self.ends: set[Ids] = set()
        self.last_record_id = 0

    def span(self, first_row: int, rows: int) -> Span:
        self.last_record_id += 1
        extent = Extent(1, 256 * self.last_record_id, 256, self.last_record_id)
        return Span(self.last_record_id, extent, 1, first_row, rows)

    def depth(self, ids: Ids) -> int:
        return max(n for n in range(len(ids) + 1) if n == 0 or ids[:n] in self.rows)

    def kind(self, ids: Ids) -> MatchKind:
        depth = self.depth(ids)
        if depth == 0:
            return MatchKind.MISS
        if ids in self.ends:
            return MatchKind.EXACT
        if depth == len(ids) and any(
            len(held) > depth and held[:depth] == ids for held in self.rows
        ):
            return MatchKind.SUPERSEQUENCE
        return MatchKind.PREFIX if ids[:depth] in self.ends else MatchKind.LCP

    @rule(ids=SEQUENCES, record_tokens=st.integers(1, 6), first_row=st.integers(0, 3))
    def insert(self, ids: Ids, record_tokens: int, first_row: int) -> None:
        walk = self.tree.walk(packed(ids))
        end, offset = walk.end, walk.offset
        for start in range(walk.depth, len(ids), record_tokens):
            run = ids[start : start + record_tokens]
            end = self.tree.insert(end, offset, packed(run), self.span(first_row, len(run)))
            offset = end.rows
            for index in range(len(run)):
                row = (self.last_record_id, first_row + index)
                assert self.rows.setdefault(ids[: start + index + 1], row) == row
        self.tree.mark(end, offset)
        self.ends.add(ids)

    @rule(ids=SEQUENCES, data=st.data())
    def walk(self, ids: Ids, data: st.DataObject) -> None:
        walk = self.tree.walk(packed(ids))
        assert (walk.depth, walk.kind) == (self.depth(ids), self.kind(ids))
        wanted = data.draw(st.integers(0, walk.depth))
        spans = walk.spans(wanted)
        found = [(s.record_id, s.first_row + index) for s in spans for index in range(s.rows)]
        assert found == [self.rows[ids[: n + 1]] for n in range(wanted)]
        assert len({span.record_id for span in spans}) == len(spans)
        self.look_for_checkpoints(walk, ids, limit=data.draw(st.integers(0, len(ids))))

    def look_for_checkpoints(self, walk: Walk, ids: Ids, limit: int) -> None:
        """On the way and no further than tokens agree, which is no further than they are held."""
        on_the_way = [
            self.checkpoints[ids[:n]] for n in range(1, len(ids) + 1) if ids[:n] in self.checkpoints
        ]
        assert walk.checkpoints() == on_the_way
        reached = [checkpoint for checkpoint in on_the_way if checkpoint.position <= limit]
        assert walk.checkpoint(limit) is (reached[-1] if reached else None)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def walk_close_to_something_held(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(sorted(self.rows)))
        self.walk(held[: data.draw(st.integers(1, len(held)))] + data.draw(SEQUENCES), data)
        self.walk(held, data)

    @precondition(lambda self: self.rows.keys() - self.checkpoints.keys())
    @rule(data=st.data())
    def attach(self, data: st.DataObject) -> None:
        ids = data.draw(st.sampled_from(sorted(self.rows.keys() - self.checkpoints.keys())))
        record, offset = self.tree.walk(packed(ids)).place(len(ids))
        first_row = record.span.first_row
        assert (record.id, first_row + offset - 1) == self.rows[ids]
        checkpoint = self.tree.attach(record, offset, self.span(first_row=0, rows=1))
        assert checkpoint.position == len(ids)
        self.checkpoints[ids] = checkpoint

    @precondition(lambda self: self.checkpoints)
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        ids = data.draw(st.sampled_from(sorted(self.checkpoints)))
        self.tree.detach(self.checkpoints.pop(ids))

    @precondition(lambda self: self.checkpoints)
    @rule(data=st.data())
    def look_beneath(self, data: st.DataObject) -> None:
        ids = data.draw(st.sampled_from(sorted(self.rows)))
        found = list(beneath(*self.tree.walk(packed(ids)).place(len(ids))))
        behind = [
            checkpoint
            for held, checkpoint in self.checkpoints.items()
            if len(held) > len(ids) and held[: len(ids)] == ids
        ]
        assert set(found) == set(behind)
        assert len(found) == len(behind)

    @precondition(lambda self: any(record.idle for record in self.tree))
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        record: Record = data.draw(st.sampled_from([r for r in self.tree if r.idle]))
        gone = {
            ids for ids, (record_id, _) in self.rows.items() if record_id == record_id_of(record)
        }
        self.tree.remove(record)
        self.rows = {ids: row for ids, row in self.rows.items() if ids not in gone}
        self.ends -= gone
        # Only whole ends go: nothing is held behind a prefix that is not, checkpoints neither.
        assert self.checkpoints.keys() <= self.rows.keys()
        assert all(len(ids) == 1 or ids[:-1] in self.rows for ids in self.rows)

    @invariant()
    def counts_agree(self) -> None:
        whole(self.tree.checks())
        assert self.tree.tokens == len(self.rows)
        assert self.tree.sequences == len(self.ends)
        assert self.tree.checkpoints == len(self.checkpoints)
        assert self.tree.records == len({record_id for record_id, _ in self.rows.values()})


def record_id_of(record: Record) -> int:
    return record.span.record_id


TestTree = TreeMachine.TestCase
TestTree.settings = MACHINE
