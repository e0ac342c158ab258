"""Scattered free bytes come together, and what is moved reads as it did."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from cachestore import compaction
from cachestore.config import StoreConfig
from cachestore.store import Extent, NeedSlab, Piece, Query, Refused, Sizes, Store, Target
from tests.support.stores import NAMESPACE, OVERHEAD_BYTES, Bench, tiny_config

# One slab is filled by these. Without the two at SHORT the median is 512, and what they leave is
# two holes of 256 bytes with one record of 512 in between.
LENGTHS = (512, 256, 512, 256, 512, 256, 512, 256, 512, 256, 256)
SHORT = (1, 3)


def scattered() -> Bench:
    """A slab with useless holes. The n-th record is of the sequence [n], and full of n."""
    bench = Bench(Store(tiny_config(slabs=1, slab_bytes=sum(LENGTHS))))
    for index, length in enumerate(LENGTHS):
        reservation = bench.reserve([index], row_bytes=length - OVERHEAD_BYTES)
        (piece,) = reservation.pieces
        bench.memory(piece.extent)[:] = bytes([index]) * length
        bench.store.commit(bench.session, reservation.id, Sizes([length]), bench.now)
    ids = list(bench.store.stored)
    bench.store.catalog(bench.now).evict([ids[index] for index in SHORT])
    assert useful(bench) == (0, 512)
    return bench


def useful(bench: Bench) -> tuple[int, int]:
    found = bench.store.statistics(bench.now)
    return found.bytes_useful, found.bytes_free


def compact(bench: Bench) -> list[int]:
    """Until there is no more to do; the bytes moved by each step."""
    moved: list[int] = []

    def move(source: Extent, target: Extent) -> None:
        bench.move(source, target)
        moved[-1] += source.length

    more = True
    while more:
        moved.append(0)
        more = bench.store.compact(move)
        bench.store.check()
    assert bench.store.statistics(bench.now).bytes_moved == sum(moved)
    return [step for step in moved if step]


def assert_reads_as_written(bench: Bench) -> None:
    for index, length in enumerate(LENGTHS):
        match = bench.lookup([index])
        assert match.rows == (0 if index in SHORT else 1)
        for span in match.spans:
            assert bytes(bench.memory(span.extent)) == bytes([index]) * length


def test_holes_come_together() -> None:
    bench = scattered()
    assert compact(bench) == [512]
    assert useful(bench) == (512, 512)
    assert_reads_as_written(bench)


def test_what_is_leased_stays_where_it_is() -> None:
    bench = scattered()
    match = bench.lookup([2])
    assert compact(bench) == []
    bench.store.release(bench.session, [match.lease_id], bench.now)
    assert compact(bench) == [512]


def test_what_is_written_stays_where_it_is() -> None:
    bench = scattered()
    staged = bench.reserve([0, 99], row_bytes=256 - OVERHEAD_BYTES)
    assert compact(bench) == []
    bench.store.abort(bench.session, staged.id, bench.now)
    assert compact(bench) == [512]


def test_a_step_moves_little(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = scattered()
    # All that is left free is at both ends.
    ids = list(bench.store.stored)
    bench.store.catalog(bench.now).evict([ids[0], ids[-1]])
    monkeypatch.setattr(compaction, "SLICE_BYTES", 600)
    steps = compact(bench)
    assert len(steps) > 1
    assert max(steps) <= 600


def test_what_takes_long_to_copy_is_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "RECORD_BYTES_MAX", 511)
    assert compact(scattered()) == []


def test_few_free_bytes_are_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "FREE_SHARE_MIN", 512 / sum(LENGTHS))
    assert compact(scattered()) == []


def test_a_store_that_contradicts_itself_moves_nothing() -> None:
    bench = scattered()
    bench.store.fail()
    assert compact(bench) == []


class Load:
    """Random operations that keep a store of 128 MiB at 95 %: sequences of 10 to 2,000 tokens, of
    two models, half of which go on where another one ends or has been left."""

    BUDGET_BYTES = 128 << 20
    ROW_BYTES = (1200, 700)

    def __init__(self, seed: int) -> None:
        self.store = Store(StoreConfig(self.BUDGET_BYTES))
        self.session = self.store.open_session(counted=True)
        self.chance = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.known: list[tuple[int, bytes]] = []
        self.now = 0.0

    def operate(self) -> None:
        self.now += 0.01
        if self.known and self.chance.random() < 0.5:
            self.look()
        else:
            self.write()
            self.evict()

    def look(self) -> None:
        model, tokens = self.chance.choice(self.known)
        query = Query(self.namespace(model), tokens, len(tokens) // 4)
        match = self.store.lookup(self.session, query, self.now)
        # Every tenth reader forgets its lease, until it lapses.
        if match.lease_id and self.chance.random() < 0.9:
            self.store.release(self.session, [match.lease_id], self.now)

    def write(self) -> None:
        model, before = self.chance.randrange(2), b""
        if self.known and self.chance.random() < 0.5:
            model, before = self.chance.choice(self.known)
            if self.chance.random() < 0.3:
                before = before[: 4 * self.chance.randint(1, len(before) // 4)]
        count = min(2000, 10 + int(self.chance.expovariate(1 / 400)))
        tokens = before + self.numbers.integers(0, 1 << 17, count, dtype=np.uint32).tobytes()
        try:
            reservation_id, pieces = self.reserve(model, tokens)
        except Refused:
            return
        if self.chance.random() < 0.05:
            self.store.abort(self.session, reservation_id, self.now)
            return
        sizes = [512 + piece.rows * self.ROW_BYTES[model] for piece in pieces]
        self.store.commit(self.session, reservation_id, Sizes(sizes), self.now)
        if len(tokens) < 4 * 10_000:
            self.known.append((model, tokens))
            del self.known[:-500]

    def reserve(self, model: int, tokens: bytes) -> tuple[int, Sequence[Piece]]:
        target = Target(self.namespace(model), tokens, 0, 512, self.ROW_BYTES[model], "model")
        while True:
            try:
                reservation = self.store.reserve(self.session, target, self.now)
            except NeedSlab as need:
                self.store.add_slab(need.bytes)
            else:
                return reservation.id, reservation.pieces

    def evict(self) -> None:
        """Random records, with all behind them, as a person or a policy might."""
        catalog = self.store.catalog(self.now)
        while self.store.statistics(self.now).bytes_used > 0.95 * self.BUDGET_BYTES:
            catalog.evict(catalog.behind(self.chance.choice(list(self.store.stored))))

    def namespace(self, model: int) -> bytes:
        return bytes([model]) * len(NAMESPACE)


def test_under_load_free_bytes_stay_useful() -> None:
    """benchmarks/fragmentation.py does the same to a real daemon, and ten times as long."""
    load = Load(seed=0)
    shares = []
    for count in range(1, 10_001):
        load.operate()
        if count % 20 == 0:
            while load.store.compact(lambda source, target: None):
                pass
        if count % 2_000 == 0:
            # Nobody holds a lease for longer than that.
            load.now += 30
            load.store.expire(load.now)
            while load.store.compact(lambda source, target: None):
                pass
            load.store.check()
            found = load.store.statistics(load.now)
            assert found.bytes_used > 0.9 * found.bytes_slabs
            shares.append(found.bytes_useful / found.bytes_free)
    assert min(shares[1:]) >= compaction.USEFUL_SHARE
