"""Which checkpoints leave, for room or because a conversation has too many; and with them rows."""

from dataclasses import replace

import pytest

from cachestore.checkpoints import BRANCH_IDLE_SECONDS
from cachestore.store import Store
from tests.support.stores import NAMESPACE, OTHER_NAMESPACE, Bench, tiny_config

# Rows take 256 bytes for four of them, checkpoints 512.
ROOMY = tiny_config(slabs=8, slab_bytes=4096)


@pytest.fixture
def bench() -> Bench:
    return Bench(Store(ROOMY))


def test_rows_that_no_checkpoint_leads_to_leave_first() -> None:
    bench = Bench(Store(tiny_config(slabs=1, slab_bytes=2048)))
    bench.write(range(4), checkpoints=[4])  # 768 bytes, the oldest
    bench.write([*range(4), 50, 51, 52, 53], checkpoints=[])  # 256 without one
    bench.write(range(200, 204), OTHER_NAMESPACE, checkpoints=[4])  # 768
    bench.write(range(300, 304), bytes(32))  # 256, and nothing is left
    assert bench.store.statistics(0.0).evictions == 0
    bench.write(range(400, 404), bytes(32))
    found = bench.store.statistics(0.0)
    assert (found.evictions, found.checkpoints_evicted, found.checkpoints) == (1, 0, 2)
    assert bench.peek(range(4), checkpoints=[]) == 4
    assert bench.peek(range(200, 204), OTHER_NAMESPACE, checkpoints=[]) == 4


def test_checkpoints_leave_by_their_own_last_use_and_take_their_rows_along() -> None:
    bench = Bench(Store(tiny_config(slabs=1, slab_bytes=4096)))
    trunk = list(range(4))
    one, two = [*trunk, 10, 11, 12, 13], [*trunk, 20, 21, 22, 23]
    bench.write(one, checkpoints=[4, 8])  # 256 * 2 + 512 * 2
    bench.write(two, checkpoints=[8])  # 256 + 512, and 1792 are left
    # All of the path of `one` is recent now, but of its checkpoints only the last one was used.
    assert bench.peek(one, checkpoints=[]) == 8
    left = []
    for first in range(300, 380, 4):
        bench.write(range(first, first + 4), OTHER_NAMESPACE)
        entries = bench.store.catalog(0.0).entries(NAMESPACE, 0, 100, 0.0)
        checkpoints = tuple(entry.span.record_id for entry in entries if entry.checkpoint)
        left.append((checkpoints, bench.store.statistics(0.0).evictions))
    # The one at 4 first; then that of `two`, with its rows; then that of `one`, with all before.
    assert left == [
        *([((3, 4, 6), 0)] * 7 + [((4, 6), 0)] * 2 + [((4,), 1)] * 3 + [((), 3)] * 4),
        *(((), evictions) for evictions in range(4, 8)),
    ]
    assert bench.peek(trunk, checkpoints=[]) == 0
    bench.store.check()


def test_what_hangs_on_a_pinned_path_goes_when_it_is_released(bench: Bench) -> None:
    bench.write(range(8), checkpoints=[8])
    extending = bench.reserve(range(12), checkpoints=[12])
    catalog = bench.store.catalog(0.0)
    assert catalog.evict(catalog.everything()).checkpoints == 1
    assert bench.store.statistics(0.0).records == 2
    bench.store.abort(bench.session, extending.id, 0.0)
    bench.store.check()
    # Nothing leads there, so it leaves before anything else.
    assert bench.store.statistics(0.0).records == 2
    assert bench.store.flush() == 2


def test_the_rows_under_a_new_checkpoint_stay_between_reserve_and_commit(bench: Bench) -> None:
    bench.write(range(8), checkpoints=[8])
    again = bench.reserve(range(8), checkpoints=[4])
    bench.store.flush()
    assert bench.commit_all(again).checkpoints == 1
    assert bench.peek(range(8), checkpoints=[]) == 4
    bench.store.check()


def conversation(bench: Bench, turns: int, start: int, reply: int = 0) -> list[int]:
    """Each turn is two tokens, with a checkpoint behind it. The first four are shared."""
    ids = [0, 1, 2, 3]
    for turn in range(turns):
        ids += [100 * start + turn, reply]
        bench.write(ids, checkpoints=[4, len(ids)], conversation_start=5)
    return ids


def test_a_conversation_keeps_a_bounded_number_and_what_it_shares() -> None:
    bench = Bench(Store(replace(ROOMY, checkpoints_max=3)))
    for start in (1, 2):
        ids = conversation(bench, 10, start)
        assert [bench.peek(ids, checkpoints=[]), bench.peek(ids[:5], checkpoints=[])] == [24, 4]
    found = bench.store.statistics(0.0)
    assert (found.checkpoints, found.checkpoints_surplus) == (1 + 3 + 3, 14)
    assert found.checkpoints_evicted == 0


def test_abandoned_replies_are_bounded_and_give_their_rows_back() -> None:
    bench = Bench(Store(replace(ROOMY, checkpoints_max=3)))
    for reply in range(10):
        bench.write([0, 1, 2, 3, 4, *[50 + reply] * 4], checkpoints=[9], conversation_start=5)
        bench.now += BRANCH_IDLE_SECONDS
    found = bench.store.statistics(0.0)
    # The last one and three others.
    assert (found.checkpoints, found.checkpoints_surplus) == (1 + 3, 6)
    # The rows of the first reply that share a record with those before stay.
    assert (found.records, found.tokens, found.evictions) == (2 + 4, 8 + 4 * 4, 6)
    bench.store.check()


@pytest.mark.parametrize("seconds", [5, 20, 100])
def test_fifty_turns_with_abandoned_replies_keep_a_bounded_number(seconds: int) -> None:
    """Every turn forks off the last one right before its reply, as where a template leaves out
    what was thought."""
    bench, most = Bench(Store(tiny_config(slabs=64, slab_bytes=4096))), 8
    ids, held = [0, 1, 2, 3], []
    for turn in range(50):
        ids = [*ids, 10 + turn, 9]
        bench.write(ids, checkpoints=[4, len(ids) - 1, len(ids)], conversation_start=5)
        thinking = [*ids, 100 + turn, 7]
        bench.write(thinking, checkpoints=[len(thinking)], conversation_start=5)
        held.append(bench.store.statistics(bench.now).checkpoints)
        bench.now += seconds
    # The first one, those of the path, of other branches, and of those what is not idle yet.
    recent = -(-int(BRANCH_IDLE_SECONDS) // seconds)
    assert max(held) <= 1 + most + most + recent
    assert held[-1] == max(held)
    bench.store.check()


def test_branches_that_decode_side_by_side_find_their_prompts_at_the_end() -> None:
    """Sub-agents behind one first message, each of which writes its prompt and then its reply."""
    bench = Bench(Store(tiny_config(slabs=64, slab_bytes=4096)))
    first = [0, 1, 2, 3, 4]
    prompts = [[*first, 10 + n, *range(20, 29)] for n in range(8)]
    for turn in range(4):
        for prompt in prompts:
            positions = [4, len(prompt) - 3, len(prompt)]
            bench.write(prompt, checkpoints=positions, conversation_start=5)
        bench.now += 15.0
        for n, prompt in enumerate(prompts):
            # A reply is not computed twice, so it has no rows before its own.
            reply = [*prompt, 50 + turn, *range(60, 66)]
            reservation = bench.reserve(
                reply,
                first_row=len(prompt),
                checkpoints=[len(reply)],
                conversation_start=5,
            )
            bench.commit(reservation)
            prompts[n] = [*reply, 70 + turn, *range(80, 86)]
        # And goes on from its end.
        assert [bench.peek(prompt, checkpoints=[]) for prompt in prompts] == [
            len(prompt) - 7 for prompt in prompts
        ]
    bench.store.check()


def test_leased_ones_do_not_push_out_those_of_their_conversation(bench: Bench) -> None:
    tips = [[0, 1, 2, 3, 4, *[50 + n] * 4] for n in range(12)]
    for tip in tips:
        bench.write(tip, checkpoints=[9], conversation_start=5)
    for tip in tips[:8]:
        assert bench.lookup(tip, checkpoints=[]).rows == 9
    bench.now += BRANCH_IDLE_SECONDS
    # The leases have lapsed by now, but for those that are taken again.
    for tip in tips[:8]:
        assert bench.lookup(tip, checkpoints=[]).rows == 9
    bench.now += 20.0
    bench.write([0, 1, 2, 3, 4, *[99] * 4], checkpoints=[9], conversation_start=5)
    assert [bench.peek(tip, checkpoints=[]) for tip in tips] == [9] * 12


def test_a_long_conversation_does_not_push_out_what_others_share() -> None:
    bench = Bench(Store(replace(ROOMY, checkpoints_max=2)))
    prompt = list(range(12))
    bench.write([*prompt, 20], checkpoints=[4, 8, 12], conversation_start=13)
    ids = [*prompt, 20]
    for turn in range(8):
        ids += [30 + turn]
        bench.write(ids, checkpoints=[len(ids)], conversation_start=13)
    assert bench.peek([*prompt, 99], checkpoints=[]) == 12
    assert bench.store.statistics(0.0).checkpoints == 3 + 2


def test_more_than_the_bound_at_once_stay_until_the_next_commit(bench: Bench) -> None:
    positions = list(range(1, 16))
    bench.write(range(16), checkpoints=positions)
    assert bench.store.statistics(0.0).checkpoints == 15
    bench.write(range(16), checkpoints=[16])
    assert bench.store.statistics(0.0).checkpoints == 1 + 8


def test_one_that_somebody_else_has_just_committed_counts_as_ours() -> None:
    bench = Bench(Store(replace(ROOMY, checkpoints_max=2)))
    bench.write(range(2), checkpoints=[1])
    late = bench.reserve(range(10), checkpoints=[4, 8, 10])
    bench.write(range(4), checkpoints=[4])
    assert bench.commit_all(late).checkpoints == 2
    assert [bench.peek(range(n), checkpoints=[]) for n in (4, 8, 10)] == [4, 8, 10]


def test_what_is_leased_or_pinned_is_never_too_many() -> None:
    bench = Bench(Store(replace(ROOMY, checkpoints_max=2)))
    bench.write(range(4), checkpoints=[1, 2, 3])
    match = bench.lookup(range(4), limit=2, checkpoints=[])
    for position in range(5, 12):
        bench.write(range(position), checkpoints=[position])
    assert bench.store.statistics(0.0).checkpoints == 1 + 1 + 2
    bench.store.check()
    bench.store.release(bench.session, [match.lease_id], bench.now)
    bench.write(range(12), checkpoints=[12])
    assert bench.store.statistics(0.0).checkpoints == 1 + 2
    # The leased one was there until now, and is the least recently used.
    assert bench.peek(range(2), checkpoints=[]) == 1
