"""The whole store, with several sessions, against what was written.

Every row has a fingerprint made of its namespace and all tokens up to its own. Writers put it
into the slabs, early, late or after their reservation has lapsed; whatever a lookup serves must
read back as exactly the fingerprints of what it asked for, as long as its lease lives. One of the
namespaces is a checkpointed one.
"""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cachestore.check import Check
from cachestore.node import Record
from cachestore.store import Match, MatchKind, RefusalCode, Refused, Store
from tests.support.claims import (
    CHECKPOINTED,
    ROW_BYTES,
    Announced,
    Ids,
    Parting,
    Reader,
    Writer,
    fill,
    fingerprint,
    positions_of,
    read,
    seen,
    state,
)
from tests.support.ledger import Ledger
from tests.support.machines import MACHINE
from tests.support.stores import RECORD_TOKENS, RECORDS_PER_RESERVATION, Bench, tiny_config

NAMESPACES = st.sampled_from(sorted(ROW_BYTES))
TOKENS_MAX = 18
SEQUENCES = st.lists(st.integers(0, 2), min_size=1, max_size=TOKENS_MAX).map(tuple)
ENDS = st.lists(st.integers(0, 2), max_size=6).map(tuple)
SESSIONS_MAX = 3
CHECKPOINTS_MAX = 2


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(Store(replace(tiny_config(), checkpoints_max=CHECKPOINTS_MAX)))
        self.store = self.bench.store
        self.check = Check(self.store)
        self.seen: dict[int, object] = {}  # by how much had changed
        self.sessions = [self.bench.session]
        self.writers: list[Writer] = []
        self.lapsed: list[Writer] = []
        self.readers: list[Reader] = []
        self.ledger = Ledger(self.bench)
        self.pinned: set[int] = set()
        self.retiring: list[int] = []

    @precondition(lambda self: len(self.sessions) < SESSIONS_MAX)
    @rule()
    def open_session(self) -> None:
        self.sessions.append(self.store.open_session(counted=True))

    @precondition(lambda self: len(self.sessions) > 1)
    @rule(data=st.data())
    def close_session(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.sessions[1:]))
        self.store.close_session(session, self.bench.now)
        self.sessions.remove(session)
        self.writers = [w for w in self.writers if w.session != session]
        self.lapsed = [w for w in self.lapsed if w.session != session]
        self.readers = [r for r in self.readers if r.session != session]

    @rule(seconds=st.sampled_from([1, 10, 20, 30]))
    def wait(self, seconds: int) -> None:
        self.bench.now += seconds
        now = self.bench.now
        self.readers = [reader for reader in self.readers if reader.deadline > now]
        self.lapsed += [w for w in self.writers if w.deadline <= now and w.extents]
        self.writers = [writer for writer in self.writers if writer.deadline > now]

    @rule(data=st.data(), namespace=NAMESPACES, ids=SEQUENCES)
    def reserve(self, data: st.DataObject, namespace: bytes, ids: Ids) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        positions = positions_of(data, namespace, ids)
        start = data.draw(st.integers(0, len(ids))) if positions else 0
        first_row = data.draw(st.just(0) | st.integers(0, len(ids) - 1))
        known = self.ledger.rows_held(self.sessions[0], namespace, ids) if first_row else 0
        held, before = self.ledger.held(namespace), dict(self.store.stored)
        try:
            reservation = self.bench.reserve(
                ids, namespace, first_row, ROW_BYTES[namespace], session, positions, start
            )
        except Refused as refusal:
            if refusal.code is RefusalCode.FAILED_PRECONDITION:
                assert self.ledger.may_lack(namespace, ids[:first_row], known)
                assert self.store.stored == before
            elif refusal.code is not RefusalCode.RESOURCE_EXHAUSTED:
                raise
            return
        assert first_row <= reservation.have <= self.ledger.best(namespace, ids)[1]
        assert first_row <= known or namespace == CHECKPOINTED
        first_tokens = [piece.first_token for piece in reservation.pieces]
        ends = [piece.first_token + piece.rows for piece in reservation.pieces]
        assert [reservation.have, *ends] == [*first_tokens, reservation.end]
        assert len(ends) <= RECORDS_PER_RESERVATION
        whole = reservation.end == len(ids)
        assert whole or len(ends) == RECORDS_PER_RESERVATION
        self.ledger.check_eviction(before)
        staged, deadline = ids[: reservation.end], self.bench.now + 30.0
        writer = Writer(session, namespace, staged, whole, start, reservation, deadline)
        missing = [n for n in positions or () if n <= len(staged) and ids[:n] not in held]
        assert writer.positions == missing
        self.writers.append(writer)
        if data.draw(st.booleans()):
            fill(self.bench, writer)

    @rule(data=st.data(), namespace=NAMESPACES, ids=SEQUENCES)
    def write(self, data: st.DataObject, namespace: bytes, ids: Ids) -> None:
        count = len(self.writers)
        self.reserve(data, namespace, ids)
        if len(self.writers) > count:
            self.finish(self.writers[-1])

    @rule(data=st.data(), namespace=NAMESPACES, common=SEQUENCES, ends=st.tuples(ENDS, ENDS))
    def race(
        self, data: st.DataObject, namespace: bytes, common: Ids, ends: tuple[Ids, Ids]
    ) -> None:
        """Two writers reserve before either commits, so that the second brings duplicates."""
        count = len(self.writers)
        for end in ends:
            self.reserve(data, namespace, common + end)
        for writer in self.writers[count:]:
            self.finish(writer)

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.finish(data.draw(st.sampled_from(self.writers)))

    def finish(self, writer: Writer) -> None:
        fill(self.bench, writer)
        namespace, ids = writer.namespace, writer.ids
        held, stored = self.ledger.held(namespace), dict(self.store.stored)
        before = self.store.statistics(self.bench.now)
        inserted = self.bench.commit_all(writer.reservation, writer.session, ROW_BYTES[namespace])
        after = self.store.statistics(self.bench.now)
        self.writers.remove(writer)
        self.ledger.commit(writer)
        for announced in self.announcements(namespace):
            announced.note(ids, writer.positions if namespace == CHECKPOINTED else None)
        gone = [each for each in stored.values() if each.id not in self.store.stored]
        records = [each for each in gone if isinstance(each, Record)]
        assert 0 <= inserted.rows <= len(ids) - writer.reservation.have
        assert after.tokens == before.tokens + inserted.rows - sum(each.rows for each in records)
        assert after.evictions == before.evictions + len(records)
        assert after.checkpoints_surplus == before.checkpoints_surplus + len(gone) - len(records)
        assert after.checkpoints_evicted == before.checkpoints_evicted
        for position in writer.positions:
            match = self.bench.lookup(ids, position, namespace, self.sessions[0], checkpoints=[])
            assert match.rows == position
            assert match.checkpoint is not None
            self.ledger.learn(match.checkpoint.record_id, namespace, ids[:position])
            self.store.release(self.sessions[0], [match.lease_id], self.bench.now)
        self.ledger.check_bound(writer, held, CHECKPOINTS_MAX)
        match = self.look(writer.session, namespace, ids, len(ids))
        assert match.rows == len(ids) or namespace == CHECKPOINTED
        assert match.kind in (MatchKind.EXACT, MatchKind.MISS) or not writer.whole
        if match.lease_id:
            # Without the lease, so that the next write meets records that nobody has pinned.
            self.store.release(writer.session, [match.lease_id], self.bench.now)
            self.readers.pop()

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        writer = data.draw(st.sampled_from(self.writers))
        self.store.abort(writer.session, writer.reservation.id, self.bench.now)
        self.writers.remove(writer)

    @precondition(lambda self: self.lapsed)
    @rule(data=st.data())
    def write_on_after_the_lapse(self, data: st.DataObject) -> None:
        writer = data.draw(st.sampled_from(self.lapsed))
        for extent in writer.extents:
            self.bench.memory(extent)[:] = b"\xee" * extent.length

    @precondition(lambda self: self.lapsed)
    @rule(data=st.data(), late_commit=st.booleans())
    def stop_writing_after_the_lapse(self, data: st.DataObject, late_commit: bool) -> None:
        writer = data.draw(st.sampled_from(self.lapsed))
        if late_commit:
            with pytest.raises(Refused, match="lapsed"):
                self.bench.commit(writer.reservation, writer.session, ROW_BYTES[writer.namespace])
        else:
            self.store.abort(writer.session, writer.reservation.id, self.bench.now)
        self.lapsed.remove(writer)

    @rule(data=st.data(), namespace=NAMESPACES, ids=SEQUENCES)
    def lookup(self, data: st.DataObject, namespace: bytes, ids: Ids) -> None:
        session = data.draw(st.sampled_from(self.sessions))
        limit, announce = data.draw(st.integers(0, len(ids))), data.draw(st.booleans())
        positions = positions_of(data, namespace, ids)
        distance = data.draw(st.integers(0, 6)) if announce and positions is not None else 0
        self.look(session, namespace, ids, limit, announce, positions, distance)

    @precondition(lambda self: self.ledger.held(CHECKPOINTED))
    @rule(data=st.data(), tail=ENDS, writing=st.booleans())
    def go_on_from_a_checkpoint(self, data: st.DataObject, tail: Ids, writing: bool) -> None:
        """What is drawn at random seldom meets one."""
        held = sorted(self.ledger.held(CHECKPOINTED))
        ids = (data.draw(st.sampled_from(held)) + tail)[:TOKENS_MAX]
        (self.write if writing else self.lookup)(data, CHECKPOINTED, ids)

    def look(
        self,
        session: int,
        namespace: bytes,
        ids: Ids,
        limit: int,
        announce: bool = False,
        positions: list[int] | None = None,
        distance: int = 0,
    ) -> Match:
        if namespace == CHECKPOINTED:
            positions = positions or []
        to_come = self.bench.rows_to_come(ids, limit, namespace, positions)
        waiting_on = self.bench.rows_to_come(ids, limit, namespace, positions, waited=True)
        others = self.announcements(namespace)
        match = self.bench.lookup(ids, limit, namespace, session, announce, positions, distance)
        wanted = ids[:limit]
        parting = Parting(wanted, match.rows, positions or [], distance, others)
        depths = self.ledger.depths(namespace, wanted, match.rows)
        assert match.parting in {parting.at(held) for held in depths}
        expected = max((one.to_come(wanted, match.rows) for one in others), default=0)
        assert to_come == (expected if expected >= RECORD_TOKENS else 0)
        assert waiting_on == max(0, expected)
        assert match.rows <= limit
        assert match.rows == sum(span.rows for span in match.spans)
        rows = tuple(fingerprint(namespace, ids[: n + 1]) for n in range(match.rows))
        assert (match.checkpoint is not None) == (namespace == CHECKPOINTED and match.rows > 0)
        if match.checkpoint is not None:
            served = ids[: match.rows]
            assert match.checkpoint.record_id == self.ledger.held(namespace)[served]
            self.ledger.use(match.checkpoint.record_id)
            rows = (*rows, state(namespace, served))
        assert read(self.bench, namespace, match) == rows
        assert (match.kind is MatchKind.MISS) == (match.rows == 0)
        assert (match.lease_id == 0) == (match.rows == 0 and not announce)
        kind, depth = self.ledger.best(namespace, ids)
        if self.ledger.nothing_left():
            assert match.rows == min(depth, limit) or namespace == CHECKPOINTED
            assert match.kind == (kind if match.rows else MatchKind.MISS)
        if namespace == CHECKPOINTED:
            assert match.rows == self.ledger.usable(namespace, ids[:limit])
        assert match.rows <= depth
        if match.lease_id:
            promised = None if positions is None else [*positions, match.parting]
            announced = self.announced(namespace, ids, promised) if announce else None
            deadline = self.bench.now + 30.0
            self.readers.append(Reader(session, namespace, match, rows, deadline, announced))
        return match

    def announced(
        self, namespace: bytes, ids: Ids, positions: list[int] | None
    ) -> Announced | None:
        """What a lookup of these has announced, if anybody could wait for it."""
        done = self.ledger.rows_held(self.sessions[0], namespace, ids)
        announced = Announced(ids, done, positions)
        return announced if announced.worth(ids) > done else None

    def announcements(self, namespace: bytes) -> list[Announced]:
        return [
            reader.announced
            for reader in self.readers
            if reader.announced is not None and reader.namespace == namespace
        ]

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from(self.readers))
        lease_ids = [reader.match.lease_id, 1]
        assert self.store.renew(reader.session, lease_ids, self.bench.now) == [True, False]
        self.readers.remove(reader)
        self.readers.append(replace(reader, deadline=self.bench.now + 30.0))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from(self.readers))
        self.store.release(reader.session, [reader.match.lease_id], self.bench.now)
        self.readers.remove(reader)

    @precondition(lambda self: self.readers)
    @rule()
    def release_all(self) -> None:
        for reader in self.readers:
            self.store.release(reader.session, [reader.match.lease_id], self.bench.now)
        self.readers.clear()

    @rule(slabs=st.sampled_from([1, 2, 4]))
    def let_the_system_have_little_memory(self, slabs: int) -> None:
        self.bench.memory_bytes = 1024 * slabs

    @rule(data=st.data())
    def pin_or_unpin(self, data: st.DataObject) -> None:
        catalog = self.store.catalog(self.bench.now)
        if self.store.stored:
            record_id = data.draw(st.sampled_from(sorted(self.store.stored)))
            if record_id in self.pinned:
                catalog.unpin(record_id)
                self.pinned.remove(record_id)
            else:
                catalog.pin(record_id)
                self.pinned.add(record_id)

    @rule(data=st.data())
    def evict_a_record(self, data: st.DataObject) -> None:
        catalog = self.store.catalog(self.bench.now)
        if self.store.stored:
            record_id = data.draw(st.sampled_from(sorted(self.store.stored)))
            self.ledger.lost += catalog.evict(catalog.behind(record_id)).records

    @rule(steps=st.integers(1, 20))
    def compact(self, steps: int) -> None:
        """What is leased, staged or pinned stays where it is; the rest is still read as it was."""
        for _ in range(steps):
            if not self.store.compact(self.bench.move):
                break

    @rule()
    def retire_slabs(self) -> None:
        self.retiring += self.store.retire_slabs()

    @precondition(lambda self: self.retiring)
    @rule(data=st.data())
    def remove_slab(self, data: st.DataObject) -> None:
        slab_id = data.draw(st.sampled_from(self.retiring))
        self.store.remove_slab(slab_id)
        self.retiring.remove(slab_id)
        del self.bench.slabs[slab_id]

    @rule(looks=st.integers(1, 100))
    def check_a_little(self, looks: int) -> None:
        """Whatever has happened since the step before does not look like a contradiction."""
        self.check.step(looks)
        assert not self.check.problem

    @rule()
    def flush(self) -> None:
        self.ledger.lost += self.store.flush()

    @invariant()
    def leased_rows_are_intact(self) -> None:
        for reader in self.readers:
            assert read(self.bench, reader.namespace, reader.match) == reader.rows
            checkpoint = reader.match.checkpoint
            assert checkpoint is None or checkpoint.record_id in self.store.stored

    @invariant()
    def pinned_records_are_held(self) -> None:
        assert self.pinned <= self.store.stored.keys()

    @invariant()
    def counts_agree(self) -> None:
        statistics = self.store.statistics(self.bench.now)
        self.store.check()
        assert self.seen.setdefault(self.store.changes, seen(self.store)) == seen(self.store)
        assert statistics.leases == len(self.readers)
        assert statistics.reservations == len(self.writers)
        assert statistics.sessions == len(self.sessions)
        announced = [announced for n in ROW_BYTES for announced in self.announcements(n)]
        assert statistics.announced == len(announced)
        assert statistics.bytes_reserved == sum(w.bytes_held for w in self.writers)
        assert statistics.bytes_quarantined == sum(w.bytes_held for w in self.lapsed)
        assert statistics.bytes_slabs == sum(len(slab) for slab in self.bench.slabs.values())
        parts = ("used", "reserved", "quarantined", "retiring", "free")
        assert statistics.bytes_slabs == sum(getattr(statistics, f"bytes_{part}") for part in parts)
        assert statistics.bytes_slabs <= statistics.bytes_budget
        retiring = sum(len(self.bench.slabs[slab_id]) for slab_id in self.retiring)
        assert statistics.bytes_retiring == retiring

    def teardown(self) -> None:
        for session in self.sessions:
            self.store.close_session(session, self.bench.now)
        self.store.check()
        for record_id in self.pinned:
            self.store.catalog(self.bench.now).unpin(record_id)
        self.store.flush()
        statistics = self.store.statistics(self.bench.now)
        assert (statistics.records, statistics.checkpoints, statistics.namespaces) == (0, 0, ())
        assert statistics.bytes_free == statistics.bytes_slabs - statistics.bytes_retiring


TestStore = StoreMachine.TestCase
TestStore.settings = MACHINE
