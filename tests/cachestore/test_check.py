"""Planted contradictions are found a step at a time, and changes in between are none."""

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from cachestore.arena import State
from cachestore.check import LOOKS_PER_STEP, Check
from cachestore.node import Record
from cachestore.store import Store
from cachestore.verify import ATTEMPTS_MAX, verify
from tests.support.stores import RECORD_TOKENS, Bench, tiny_config, write_many

RECORDS = 1000
SLAB_BYTES = 1 << 19
CONVERSATION = range(10 * RECORD_TOKENS)


def large_store(records: int = RECORDS) -> Bench:
    """In one slab, with something of every kind that a check looks at."""
    bench = Bench(Store(tiny_config(slabs=2, slab_bytes=SLAB_BYTES)))
    bench.reserve(range(8))
    bench.now += 40.0
    write_many(bench, records)
    bench.write(CONVERSATION, bytes(32), checkpoints=[3, 20])
    bench.lookup(CONVERSATION, namespace=bytes(32), checkpoints=[])
    bench.lookup(range(50), announce=True)
    bench.reserve(range(8))
    bench.store.catalog(bench.now).pin(records // 2)
    return bench


def middle(bench: Bench) -> Record:
    """With children, and rows behind it."""
    return next(r for r in bench.store.catalog(bench.now).records()[RECORDS // 2 :] if r.parent)


def count_a_token(bench: Bench) -> None:
    next(iter(bench.store._holdings.namespaces.values())).tree.tokens += 1


def count_a_byte_of_a_namespace(bench: Bench) -> None:
    next(iter(bench.store._holdings.namespaces.values())).bytes_used += 1


def end_a_sequence(bench: Bench) -> None:
    middle(bench).marks.add(1)


def move_a_record(bench: Bench) -> None:
    middle(bench).start += 1


def unlink_a_record(bench: Bench) -> None:
    record = middle(bench)
    assert record.parent is not None
    del record.parent.children[record.fork, record.run[:4]]


def hang_a_record_on_another(bench: Bench) -> None:
    one, other = bench.store.catalog(bench.now).records()[-2:]
    other.children[1, one.run[:4]] = one


def share_bytes(bench: Bench) -> None:
    one, other = bench.store.catalog(bench.now).records()[:2]
    one.span = other.span


def forget_a_record(bench: Bench) -> None:
    del bench.store._holdings.inventory.stored[middle(bench).id]


def forget_a_place(bench: Bench) -> None:
    bench.store._holdings.inventory._at.popitem()


def forget_a_length(bench: Bench) -> None:
    lengths = bench.store._holdings.inventory._lengths
    lengths.add(lengths.pop(0) + 1)


def pad(bench: Bench) -> None:
    bench.store._holdings.inventory.bytes_padding += 1


def forget_a_candidate(bench: Bench) -> None:
    bench.store._holdings._policy._candidates.popitem()


def pin_without_a_claim(bench: Bench) -> None:
    bench.store._holdings.inventory.pin(middle(bench))


def forget_a_pin(bench: Bench) -> None:
    bench.store._catalog._pinned.clear()


def forget_a_hole(bench: Bench) -> None:
    arena = bench.store._holdings.arena
    arena._remove_hole(arena._holes[0])


def overlap(bench: Bench) -> None:
    arena = bench.store._holdings.arena
    hole = arena._holes[-1]
    arena._remove_hole(hole)
    arena._add_hole(hole._replace(length=hole.length + 256, offset=hole.offset - 256))


def count_used_bytes(bench: Bench) -> None:
    bench.store._holdings.arena._bytes[State.USED] += 256


def forget_a_reservation(bench: Bench) -> None:
    bench.store._staging._reservations._claims.popitem()


def forget_quarantine(bench: Bench) -> None:
    bench.store._staging._lapsed.clear()


def forget_an_announcement(bench: Bench) -> None:
    bench.store._serving._announcements._of_namespace.clear()


CONTRADICTIONS = [
    count_a_token,
    count_a_byte_of_a_namespace,
    end_a_sequence,
    move_a_record,
    unlink_a_record,
    hang_a_record_on_another,
    share_bytes,
    forget_a_record,
    forget_a_place,
    forget_a_length,
    pad,
    forget_a_candidate,
    pin_without_a_claim,
    forget_a_pin,
    forget_a_hole,
    overlap,
    count_used_bytes,
    forget_a_reservation,
    forget_quarantine,
    forget_an_announcement,
]


@pytest.mark.parametrize("plant", CONTRADICTIONS, ids=lambda plant: plant.__name__)
def test_a_contradiction_in_a_large_store_is_found(plant: Callable[[Bench], None]) -> None:
    bench = large_store()
    check, steps = Check(bench.store), 0
    while not check.over:
        check.step()
        steps += 1
    assert steps > 2
    assert check.problem == ""
    assert bench.store.sound

    plant(bench)
    check = Check(bench.store)
    while not check.over:
        check.step()
    assert check.problem.startswith("the bookkeeping contradicts itself")
    assert not bench.store.sound


def lines_at_once(bench: Bench) -> tuple[int, int]:
    """The most lines of Python, and looks, between one yield of a check and the next."""
    lines = most_lines = most_looks = 0

    def trace(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    checks = bench.store.checks()
    sys.settrace(trace)
    try:
        for looks in checks:
            most_lines, most_looks = max(most_lines, lines), max(most_looks, looks)
            lines = 0
    finally:
        sys.settrace(before)
    return most_lines, most_looks


def test_what_is_done_at_once_does_not_depend_on_how_much_is_held() -> None:
    little, much = lines_at_once(large_store(100)), lines_at_once(large_store(1000))
    assert little == much
    assert much[0] < 200
    assert much[1] < LOOKS_PER_STEP


@pytest.fixture
def bench() -> Bench:
    return large_store(50)


def changes(bench: Bench) -> Iterator[None]:
    """One after the other."""
    store = bench.store
    store.add_slab(256)
    yield
    store.add_slab(256)
    yield
    (retired,) = store.retire_slabs()
    yield
    store.remove_slab(retired)
    yield
    lease = bench.lookup(CONVERSATION[:5], namespace=bytes(32), checkpoints=[]).lease_id
    yield
    store.renew(bench.session, [lease], bench.now)
    yield
    store.release(bench.session, [lease], bench.now)
    yield
    lease = bench.lookup([1] * 50, announce=True).lease_id
    yield
    reservation = bench.reserve([7, 8])
    yield
    bench.commit(reservation)
    yield
    bench.write([7])  # ends inside what is held
    yield
    reservation = bench.reserve([9, 8])
    yield
    store.abort(bench.session, reservation.id, bench.now)
    yield
    store.catalog(bench.now).pin(1)
    yield
    store.catalog(bench.now).unpin(1)
    yield
    catalog = store.catalog(bench.now)
    catalog.evict(catalog.behind(3))
    yield
    bench.now += 40.0
    store.expire(bench.now)
    yield
    store.close_session(bench.session, bench.now)
    yield


def test_after_each_kind_of_change_a_check_begins_anew(bench: Bench) -> None:
    check, kinds = Check(bench.store), 0
    check.step(looks=1)
    for _ in changes(bench):
        kinds += 1
        assert check.attempts == kinds
        check.step(looks=1)
        assert check.attempts == kinds + 1
    assert kinds == 18
    check.step()
    assert (check.over, check.problem) == (True, "")


def test_to_look_on_is_no_change(bench: Bench) -> None:
    store, before = bench.store, bench.store.changes
    store.statistics(bench.now)
    store.expire(bench.now)
    catalog = store.catalog(bench.now)
    assert len(catalog.entries(b"", after=0, limit=5, now=bench.now)) == 5
    assert bench.rows_to_come([1] * 8) == 0
    assert bench.lookup([77777]).rows == 0
    assert store.changes == before


def problems(bench: Bench, meanwhile: Callable[[], object]) -> list[str]:
    """What `verify` says of the bookkeeping; nobody has written the rows themselves."""
    found = []
    for step in verify(bench.store, bench.now, bench.memory):
        found += [text for text in step.problems if not text.startswith("record ")]
        meanwhile()
    return found


def test_verify_checks_a_large_store_in_steps() -> None:
    bench = large_store()
    steps: list[None] = []
    assert problems(bench, lambda: steps.append(None)) == []
    assert len(steps) > 3
    pin_without_a_claim(bench)
    (problem,) = problems(bench, lambda: None)
    assert problem.startswith("the bookkeeping contradicts itself")
    assert bench.store.statistics(bench.now).check_failures == 1


def test_verify_says_so_when_the_store_never_keeps_still() -> None:
    bench = large_store()
    steps: list[None] = []

    def pin_and_unpin() -> None:
        steps.append(None)
        bench.store.catalog(bench.now).pin(1)
        bench.store.catalog(bench.now).unpin(1)

    assert problems(bench, pin_and_unpin) == [
        "the bookkeeping was not checked: the store is too busy for it"
    ]
    assert len(steps) > ATTEMPTS_MAX
    assert bench.store.sound
