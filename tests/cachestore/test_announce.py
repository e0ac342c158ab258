"""Who promises rows, and for whom it is worth waiting. Waiting itself is in test_waiting.py."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from cachestore.store import MatchKind, Query, Refused, Store
from tests.support.stores import NAMESPACE, OTHER_NAMESPACE, Bench, packed, tiny_config

PROMPT = range(20)


@pytest.fixture
def bench() -> Bench:
    return Bench(Store(tiny_config()))


@pytest.fixture
def settled(bench: Bench) -> list[float]:
    """When the store has said that waiting may be over."""
    times: list[float] = []
    bench.store.listen(lambda: times.append(bench.now))
    return times


def test_a_promised_miss_has_a_lease_and_others_may_wait_for_it(bench: Bench) -> None:
    assert bench.rows_to_come(PROMPT) == 0
    match = bench.lookup(PROMPT, announce=True)
    assert (match.kind, match.rows, match.spans) == (MatchKind.MISS, 0, ())
    assert match.lease_id
    assert bench.rows_to_come(PROMPT) == 20
    assert bench.rows_to_come(PROMPT, limit=19) == 19
    assert bench.rows_to_come([*range(12), 77]) == 12
    assert bench.rows_to_come(PROMPT, namespace=OTHER_NAMESPACE) == 0
    assert bench.store.statistics(0.0).announced == 1
    assert bench.store.renew(bench.session, [match.lease_id], 0.0) == [True]
    bench.store.check()


def test_for_less_than_a_record_nobody_waits(bench: Bench) -> None:
    bench.lookup(PROMPT, announce=True)
    own = range(100, 110)
    assert bench.rows_to_come([*range(4), *own]) == 4
    assert bench.rows_to_come([*range(3), *own]) == 0
    assert bench.rows_to_come(PROMPT, limit=3) == 0


@pytest.mark.parametrize(("own", "expected"), [(1, 0), (2, 8), (50, 8)])
def test_a_question_does_not_wait_for_a_book(bench: Bench, own: int, expected: int) -> None:
    bench.lookup(PROMPT, announce=True)
    question = [*range(8), *range(100, 100 + own)]
    assert bench.rows_to_come(question) == expected
    assert bench.rows_to_come(question, waited=True) == expected


def test_of_a_book_it_waits_for_the_last_page(bench: Bench) -> None:
    bench.lookup(range(40), announce=True)
    assert bench.rows_to_come([*range(34), 99]) == 34
    bench.write(range(28))
    assert bench.rows_to_come([*range(34), 99]) == 6
    assert bench.rows_to_come(range(33)) == 0


def test_whoever_has_waited_goes_on_for_fewer(bench: Bench) -> None:
    bench.write(range(18))
    bench.lookup(PROMPT, announce=True)
    assert bench.store.statistics(0.0).announced == 1
    assert bench.rows_to_come(PROMPT) == 0
    assert bench.rows_to_come(PROMPT, waited=True) == 2
    bench.write(PROMPT)
    assert bench.rows_to_come(PROMPT, waited=True) == 0


def test_what_is_held_already_is_not_waited_for(bench: Bench) -> None:
    bench.write(range(10))
    bench.lookup(PROMPT, announce=True)
    assert bench.rows_to_come(PROMPT) == 10
    assert bench.rows_to_come([*range(13), 77]) == 0
    bench.lookup(range(10), announce=True)
    assert bench.store.statistics(0.0).announced == 1  # nothing is missing: no promise


def test_a_commit_keeps_a_promise_piece_by_piece(bench: Bench, settled: list[float]) -> None:
    bench.lookup(PROMPT, announce=True)
    bench.write([77])
    assert settled == []
    bench.write(range(8))
    assert len(settled) == 1
    assert bench.rows_to_come(PROMPT) == 12
    bench.write(range(17))
    assert len(settled) == 2
    assert bench.rows_to_come(PROMPT) == 0


def test_rows_that_were_evicted_again_do_not_come_twice(bench: Bench) -> None:
    bench.lookup(PROMPT, announce=True)
    bench.write(PROMPT)
    assert bench.store.flush() == 5
    assert bench.rows_to_come(PROMPT) == 0
    bench.store.check()


@pytest.mark.parametrize(
    "end",
    [
        lambda bench, session, lease: bench.store.release(session, [lease], bench.now),
        lambda bench, session, _: bench.store.close_session(session, bench.now),
        lambda bench, *_: bench.store.expire(bench.now + 30.0),
    ],
    ids=["released", "session ended", "lapsed"],
)
def test_a_promise_ends_with_its_lease(
    bench: Bench, settled: list[float], end: Callable[[Bench, int, int], None]
) -> None:
    session = bench.store.open_session(counted=True)
    match = bench.lookup(PROMPT, session=session, announce=True)
    assert settled == []
    end(bench, session, match.lease_id)
    assert settled
    assert bench.rows_to_come(PROMPT) == 0
    assert bench.store.statistics(0.0).announced == 0
    bench.store.check()


def test_a_promise_can_be_handed_on_without_a_gap(bench: Bench) -> None:
    first = bench.lookup(PROMPT, announce=True)
    bench.lookup(PROMPT, announce=True)
    bench.store.release(bench.session, [first.lease_id], 0.0)
    assert bench.rows_to_come(PROMPT) == 20


def test_the_longest_promise_counts(bench: Bench) -> None:
    bench.lookup(range(10), announce=True)
    bench.lookup(PROMPT, announce=True)
    bench.lookup([*range(5), 77, 78, 79, 80], announce=True)
    assert bench.rows_to_come(PROMPT) == 20


def test_a_session_cannot_promise_without_end() -> None:
    bench = Bench(Store(replace(tiny_config(), max_announced_tokens_per_session=45)))
    leases = [bench.lookup(PROMPT, announce=True).lease_id for _ in range(3)]
    assert all(leases)
    assert bench.store.statistics(0.0).announced == 2
    other = bench.store.open_session(counted=True)
    bench.lookup(PROMPT, session=other, announce=True)
    assert bench.store.statistics(0.0).announced == 3
    bench.store.release(bench.session, leases, 0.0)
    assert bench.store.statistics(0.0).announced == 1
    bench.store.check()


def test_asking_for_what_comes_changes_no_count_and_no_recency(bench: Bench) -> None:
    bench.write(range(10))
    bench.lookup(PROMPT, announce=True)
    before = bench.store.statistics(0.0)
    bench.rows_to_come(PROMPT)
    assert bench.store.statistics(0.0) == before


def test_bad_fields_are_named(bench: Bench) -> None:
    for namespace, tokens, limit, field in (
        (b"short", packed([1]), 1, "namespace"),
        (NAMESPACE, b"", 0, "tokens"),
        (NAMESPACE, packed([1]), 2, "limit"),
    ):
        with pytest.raises(Refused, match=f"^{field} "):
            bench.store.rows_to_come(Query(namespace, tokens, limit), 0.0)


ANNOUNCED = range(40)


@pytest.mark.parametrize(
    ("ids", "limit", "expected"),
    [
        (range(40), 39, 39),
        (range(40), 38, 20),
        ([*range(25), 99], 26, 20),
        ([*range(20), 99], 21, 20),
        ([*range(19), 99], 20, 0),
        (range(20), 19, 0),
    ],
)
def test_an_announcement_is_worth_the_deepest_position_that_is_shared(
    bench: Bench, ids: Sequence[int], limit: int, expected: int
) -> None:
    bench.lookup(ANNOUNCED, announce=True, checkpoints=[20, 39])
    assert bench.rows_to_come(ids, limit, checkpoints=[]) == expected


def test_rows_that_are_held_without_a_checkpoint_are_still_to_come(bench: Bench) -> None:
    bench.write(ANNOUNCED, checkpoints=[10])
    bench.lookup(ANNOUNCED, announce=True, checkpoints=[20, 39])
    assert bench.rows_to_come(ANNOUNCED, checkpoints=[]) == 39 - 10
    # The next one is behind what they share.
    assert bench.rows_to_come([*range(12), 99], checkpoints=[]) == 0
    bench.write(ANNOUNCED, checkpoints=[20])
    assert bench.rows_to_come(ANNOUNCED, checkpoints=[]) == 39 - 20
    bench.write(ANNOUNCED, checkpoints=[39])
    assert bench.rows_to_come(ANNOUNCED, checkpoints=[]) == 0
    bench.store.check()


def test_without_checkpoints_nothing_is_announced(bench: Bench) -> None:
    assert bench.lookup(ANNOUNCED, announce=True, checkpoints=[]).lease_id
    assert bench.store.statistics(0.0).announced == 0
    assert bench.rows_to_come(ANNOUNCED, checkpoints=[]) == 0


def test_a_deeper_checkpoint_of_another_sequence_is_better_than_one_to_come(bench: Bench) -> None:
    bench.lookup(ANNOUNCED, announce=True, checkpoints=[20, 39])
    branch = [*range(25), 90, 91, 92]
    assert bench.rows_to_come(branch, checkpoints=[]) == 20
    bench.write(branch, checkpoints=[27])
    assert bench.rows_to_come(branch, checkpoints=[]) == 0
    assert bench.rows_to_come(ANNOUNCED, checkpoints=[]) == 39


def test_who_parts_from_what_is_held_promises_a_checkpoint_there(bench: Bench) -> None:
    bench.write(PROMPT, checkpoints=[4, 19])
    branch, third = [*range(10), 90, 91], [*range(10), 92, 93]
    match = bench.lookup(branch, announce=True, checkpoints=[11], parting_distance=6)
    assert (match.rows, match.parting) == (4, 10)
    assert bench.rows_to_come(third, checkpoints=[]) == 10 - 4
    bench.write(branch, checkpoints=[10, 11])
    match = bench.lookup(third, announce=True, checkpoints=[11], parting_distance=1)
    assert (match.rows, match.parting) == (10, 0)
    bench.store.check()


def test_who_parts_from_what_is_announced_does_so_too(bench: Bench) -> None:
    bench.lookup(ANNOUNCED, announce=True, checkpoints=[39])
    match = bench.lookup([*range(25), 90, 91], announce=True, checkpoints=[26], parting_distance=8)
    assert (match.rows, match.parting) == (0, 25)
    assert bench.rows_to_come([*range(25), 92], checkpoints=[]) == 25
    bench.store.check()


@pytest.mark.parametrize(("common", "expected"), [(25, 24), (27, 24), (28, 28), (4, 4), (3, 0)])
def test_who_has_a_little_more_in_common_parts_at_the_same_place(
    common: int, expected: int
) -> None:
    bench = Bench(Store(replace(tiny_config(), record_tokens=32)))
    for announced in (False, True):
        ids = [*range(common), 90 + announced, 95]
        if announced:
            bench.lookup(ANNOUNCED, announce=True, checkpoints=[40])
        else:
            bench.write(ANNOUNCED, checkpoints=[40])
        match = bench.lookup(ids, announce=True, checkpoints=[common + 2], parting_distance=2)
        assert match.parting == expected
        bench.store.release(bench.session, [match.lease_id], 0.0)
        bench.store.flush()


@pytest.mark.parametrize(
    ("limit", "checkpoints", "distance", "expected"),
    [
        (26, [26], 15, 25),
        (26, [26], 16, 0),  # too close to what is served
        (26, [15, 26], 11, 0),  # to one that is planned
        (26, [15, 26], 10, 25),
        (22, [], 12, 22),  # no more is asked for
        (26, [25], 1, 0),  # one is planned there
        (26, [], 0, 0),
    ],
)
def test_a_checkpoint_is_taken_only_where_it_is_worth_it(
    bench: Bench, limit: int, checkpoints: list[int], distance: int, expected: int
) -> None:
    bench.write(ANNOUNCED, checkpoints=[10, 39])
    branch = [*range(25), 90, 91]
    match = bench.lookup(
        branch, limit, announce=True, checkpoints=checkpoints, parting_distance=distance
    )
    assert (match.rows, match.parting) == (10, expected)


def test_only_a_promise_can_include_one_more(bench: Bench) -> None:
    query = bench.query(ANNOUNCED, announce=True, parting_distance=8)
    for asked in (query, replace(query, announce=False, checkpointed=True)):
        with pytest.raises(Refused, match=r"^parting_distance "):
            bench.store.lookup(bench.session, asked, 0.0)
