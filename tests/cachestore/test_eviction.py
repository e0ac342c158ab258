import time

import pytest

from cachestore.eviction import Candidate, LeastRecentlyUsed
from cachestore.extent import Extent
from cachestore.node import Record, Span
from cachestore.store import Store
from cachestore.tree import Tree
from tests.support.stores import NAMESPACE, OTHER_NAMESPACE, Bench, packed, tiny_config
from tests.support.whole import whole


def add(tree: Tree, policy: LeastRecentlyUsed, ids: list[int]) -> Record:
    """Store a sequence whose missing end is one record."""
    walk = tree.walk(packed(ids))
    run = packed(ids[walk.depth :])
    record_id = 1 + tree.records
    extent = Extent(1, 256 * record_id, 256, record_id)
    record = tree.insert(
        walk.end, walk.offset, run, Span(record_id, extent, 1, 0, len(ids) - walk.depth)
    )
    if walk.path:
        policy.settle(walk.path[-1])
    policy.use([*walk.path, record])
    whole(policy.checks(list(tree)))
    return record


def evict(tree: Tree, policy: LeastRecentlyUsed) -> Candidate | None:
    victim = policy.victim()
    if victim is not None:
        assert isinstance(victim, Record)
        policy.forget(victim)
        above = tree.remove(victim)
        if above is not None:
            policy.settle(above)
    whole(policy.checks(list(tree)))
    return victim


def test_the_least_recently_used_leaf_goes_first_and_then_what_carried_it() -> None:
    tree, policy = Tree(NAMESPACE), LeastRecentlyUsed()
    trunk = add(tree, policy, [1, 2])
    old, new = add(tree, policy, [1, 2, 3]), add(tree, policy, [1, 2, 4])
    assert [evict(tree, policy) for _ in range(4)] == [old, new, trunk, None]


def test_using_a_path_makes_all_of_it_recent() -> None:
    tree, policy = Tree(NAMESPACE), LeastRecentlyUsed()
    trunk, leaf, other = (add(tree, policy, ids) for ids in ([1], [1, 2], [9]))
    policy.use([trunk, leaf])
    whole(policy.checks(list(tree)))
    assert [evict(tree, policy) for _ in range(3)] == [other, leaf, trunk]


def test_half_of_a_record_never_goes() -> None:
    tree, policy = Tree(NAMESPACE), LeastRecentlyUsed()
    shared = add(tree, policy, [1, 2, 3, 4])
    branch = add(tree, policy, [1, 2, 9])
    # [3, 4] is the older leaf, but alone it would free nothing.
    assert [evict(tree, policy), evict(tree, policy)] == [branch, shared]


def test_a_pinned_record_stays_until_it_is_unpinned() -> None:
    tree, policy = Tree(NAMESPACE), LeastRecentlyUsed()
    old, new = add(tree, policy, [1]), add(tree, policy, [2])
    old.pins += 1
    policy.settle(old)
    assert evict(tree, policy) is new
    assert evict(tree, policy) is None
    old.pins -= 1
    policy.settle(old)
    assert evict(tree, policy) is old


def test_order_goes_over_all_namespaces() -> None:
    bench = Bench(Store(tiny_config(slabs=1, slab_bytes=768)))
    bench.write([1, 2, 3, 4])
    bench.write([1, 2, 3, 4], OTHER_NAMESPACE)
    bench.write([5, 6, 7, 8])
    assert bench.peek([1, 2, 3, 4]) == 4
    bench.write([9])
    assert bench.peek([1, 2, 3, 4], OTHER_NAMESPACE) == 0
    assert bench.peek([1, 2, 3, 4]) == bench.peek([5, 6, 7, 8]) == 4


def test_a_hot_prefix_survives_a_scan_of_one_off_prompts() -> None:
    bench = Bench(Store(tiny_config(slabs=8)))
    hot = list(range(1000, 1020))
    bench.write(hot)
    for one_off in range(200):
        bench.write([one_off] * 6)
        assert bench.peek([*hot, 7]) == len(hot)
    assert bench.store.statistics(bench.now).evictions > 300
    bench.store.check()


@pytest.mark.parametrize("others", [1, 2, 3, 4])
def test_an_old_sequence_gives_its_end_back_piece_by_piece(others: int) -> None:
    bench = Bench(Store(tiny_config(slabs=1)))
    old = list(range(16))
    bench.write(old)
    for first in range(100, 100 + others):
        bench.write([first])
    assert bench.peek(old) == 16 - 4 * others
    bench.store.check()


@pytest.mark.slow
def test_a_victim_among_many_costs_no_scan() -> None:
    def seconds_for_victims(leaves: int) -> float:
        tree, policy = Tree(NAMESPACE), LeastRecentlyUsed()
        for first in range(leaves):
            span = Span(first + 1, Extent(1, 256 * first, 256, first + 1), 1, 0, 1)
            policy.use([tree.insert(tree.walk(b"").end, 0, packed([first]), span)])
        start = time.perf_counter()
        for _ in range(500):
            victim = policy.victim()
            assert isinstance(victim, Record)
            policy.forget(victim)
            tree.remove(victim)
        return time.perf_counter() - start

    few = min(seconds_for_victims(1_000) for _ in range(3))
    many = min(seconds_for_victims(50_000) for _ in range(3))
    assert many < 10 * few
