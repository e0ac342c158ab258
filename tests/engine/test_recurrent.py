"""Recurrent state: rows that join and leave, empty slots, and what no snapshot may hold."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine import pack
from engine.kv import kinds
from engine.kv.codec import CodecPolicy
from engine.kv.kinds import NotCacheable
from engine.kv.layout import CacheLayout, LayerGroup
from engine.kv.recurrent import RecurrentCache
from engine.kv.states import ArrayShape, Recurrent
from tests.support.checkpoints import save

SLOTS = (ArrayShape((3, 8), "bfloat16"), None, ArrayShape((4,), "int64"))
LAYOUT = CacheLayout((), (LayerGroup(Recurrent(SLOTS), (0,)),))


def cache(seed: int, rows: int = 1) -> RecurrentCache:
    made = RecurrentCache(3)
    made[0] = mx.random.normal((rows, 3, 8), key=mx.random.key(seed)).astype(mx.bfloat16)
    made[2] = mx.arange(4 * rows, dtype=mx.int64).reshape(rows, 4) + seed
    return made


def arrays(of: Any) -> list[Any]:
    return [None if a is None else np.array(a.astype(mx.float32)) for a in of.cache]


def assert_same(one: Any, other: Any) -> None:
    for a, b in zip(arrays(one), arrays(other), strict=True):
        assert (a is None and b is None) or np.array_equal(a, b)


def test_rows_of_a_batch_keep_to_themselves() -> None:
    singles = [cache(seed) for seed in range(4)]
    batch = RecurrentCache.merge(singles[:2])
    batch.extend(RecurrentCache.merge(singles[2:]))
    for index, single in enumerate(singles):
        assert_same(batch.extract(index), single)
    batch.filter(mx.array([3, 0]))
    assert_same(batch.extract(0), singles[3])
    assert_same(batch.extract(1), singles[0])
    assert batch[0].dtype == mx.bfloat16
    assert batch[2].dtype == mx.int64


def test_an_empty_row_joins_as_zeros() -> None:
    batch = RecurrentCache.merge([RecurrentCache(3), cache(1)])
    assert batch[1] is None
    assert not np.array(batch[2])[0].any()
    assert_same(batch.extract(1), cache(1))


def test_empty_rows_are_counted() -> None:
    empty = RecurrentCache.merge([RecurrentCache(3) for _ in range(2)])
    assert empty.batch_size == 2
    assert empty.empty()
    assert empty.extract(1).cache == [None, None, None]
    empty.extend(RecurrentCache.merge([cache(5)]))
    assert_same(empty.extract(2), cache(5))


def test_only_the_first_slot_may_be_empty() -> None:
    made = RecurrentCache(2)
    made[1] = mx.ones((1, 3))
    assert not made.empty()
    assert_same(RecurrentCache.merge([made, made]).extract(1), made)


def test_states_of_different_shapes_do_not_share_a_batch() -> None:
    other = cache(1)
    other[2] = other[2][:, :1]
    with pytest.raises(ValueError, match="shape"):
        RecurrentCache.merge([cache(0), other])


@pytest.mark.parametrize("index", [0, 2])
def test_an_empty_slot_comes_back_empty_and_a_dtype_as_it_was(index: int) -> None:
    policy = CodecPolicy.of(LAYOUT)
    batch = RecurrentCache.merge([cache(seed) for seed in range(3)])
    # Padding that is still to come, or was: of the batch, not of the state.
    batch.prepare(lengths=[1, 2, 3])
    batch.left_padding = mx.array([2, 0, 1])
    (restored,) = save(policy, [batch], range(9), 9, index).restore()
    assert type(restored) is RecurrentCache
    assert restored.lengths is None
    assert restored.left_padding is None
    assert_same(restored, cache(index))
    assert [None if a is None else a.dtype for a in restored.cache] == [mx.bfloat16, None, mx.int64]


def test_a_snapshot_does_not_follow_the_state() -> None:
    policy = CodecPolicy.of(LAYOUT)
    live = cache(3)
    mx.eval(live.state)
    packed = pack.pack_checkpoint(policy, kinds.snapshot(LAYOUT, [live], 0), 4)
    before = [array.tobytes() for array in packed.arrays]
    for slot in (0, 2):
        live[slot][...] = mx.zeros_like(live[slot])
        mx.eval(live[slot])
    assert [array.tobytes() for array in packed.arrays] == before


def more_arrays(live: RecurrentCache) -> None:
    live[1] = mx.ones((1, 2))


def no_array(live: RecurrentCache) -> None:
    live[0] = None


def another_shape(live: RecurrentCache) -> None:
    live[2] = live[2][:, :2]


def another_dtype(live: RecurrentCache) -> None:
    live[0] = live[0].astype(mx.float32)


@pytest.mark.parametrize("change", [more_arrays, no_array, another_shape, another_dtype])
def test_a_state_that_is_not_as_it_was_at_load_is_not_stored(change: Any) -> None:
    live = cache(0)
    kinds.snapshot(LAYOUT, [live], 0)
    change(live)
    with pytest.raises(NotCacheable, match="at load"):
        kinds.snapshot(LAYOUT, [live], 0)


@pytest.mark.parametrize("array", [mx.ones((1, 3), mx.complex64), mx.ones((1, 0))])
def test_what_no_record_can_hold_is_refused(array: mx.array) -> None:
    with pytest.raises(NotCacheable, match="a state of a layer"):
        ArrayShape.of(array)
