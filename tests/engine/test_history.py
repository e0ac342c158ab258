"""Caches of the batch against plain lists of rows."""

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from mlx_lm.models.cache import KVCache

from engine.kv.columns import CAPACITY_SHARE_MAX
from engine.kv.history import (
    FULL,
    BatchKVCache,
    JoiningKVCache,
    Precision,
    QuantizedKVCache,
)
from engine.kvconfig import AFFINE_BITS
from tests.support.histories import (
    HEADS,
    PRECISIONS,
    SETTINGS,
    BatchMachine,
    Fed,
    Sequences,
    draw,
    encoded,
    held,
    none,
    peak_bytes,
    precision_id,
)


class HistoryMachine(BatchMachine):
    """Requests come, are fed, leave and are taken back, in every order."""

    @initialize(which=st.sampled_from(range(len(PRECISIONS))))
    def begin(self, which: int) -> None:
        self.precision = PRECISIONS[which]
        self.sequences = self.fresh(1)
        self.kept: Any = None

    def one(self) -> Any:
        kind = JoiningKVCache if self.precision == FULL else QuantizedKVCache
        return kind.of(self.precision)

    def fresh(self, count: int) -> Sequences:
        merged = self.one().merge([self.one() for _ in range(count)])
        return Sequences(merged, [none() for _ in range(count)])

    def end(self, rows: Fed) -> int:
        return int(rows[0].shape[1])

    @rule()
    def split(self) -> None:
        """mlx-lm copies a batch to split it; either half is written to afterwards."""
        self.kept = Sequences(copy.deepcopy(self.sequences.cache), list(self.sequences.rows))

    @rule(count=st.integers(1, 20))
    def trim(self, count: int) -> None:
        count = min(count, *(self.end(rows) for rows in self.sequences.rows))
        assert self.sequences.cache.trim(count) == count
        self.sequences.rows = [
            (keys[:, : keys.shape[1] - count], values[:, : values.shape[1] - count])
            for keys, values in self.sequences.rows
        ]

    @invariant()
    def every_sequence_has_its_own_rows(self) -> None:
        for sequences in filter(None, (self.sequences, self.kept)):
            ends = [self.end(rows) for rows in sequences.rows]
            assert sequences.cache.offset.tolist() == ends
            assert sequences.cache.size() == max(ends)
            for index, rows in enumerate(sequences.rows):
                if ends[index]:
                    assert held(sequences.cache, index, ends[index]) == encoded(
                        self.precision, rows
                    )

    @invariant()
    def masks_end_where_sequences_do(self) -> None:
        ends = [self.end(rows) for rows in self.sequences.rows]
        for count in (1, 3):
            mask = self.sequences.cache.make_mask(count, return_array=True)
            columns = np.arange(max(ends) + count)
            for index, end in enumerate(ends):
                expected = columns <= end + np.arange(count)[:, None]
                assert (np.array(mask[min(index, len(mask) - 1), 0]) == expected).all()

    @invariant()
    def beyond_the_ends_everything_is_finite(self) -> None:
        for array in self.sequences.cache.state[0]:
            assert mx.isfinite(array.astype(mx.float32)).all().item()


TestHistory = HistoryMachine.TestCase
TestHistory.settings = SETTINGS


@pytest.mark.parametrize("precision", PRECISIONS[1:], ids=precision_id)
def test_a_quantized_cache_is_made_from_mlx_lms(precision: Precision) -> None:
    source: Any = KVCache()
    assert QuantizedKVCache.from_cache(source, precision).empty()
    rows = draw(1, HEADS, 70)
    source.update_and_fetch(*(mx.array(part)[None] for part in rows))
    made = QuantizedKVCache.from_cache(source, precision)
    assert QuantizedKVCache.from_cache(made, precision) is made
    assert made.offset == 70
    expected = precision.decode(precision.split(precision.encode(*source.keys_and_values())))
    for ours, theirs in zip(made.dequantize(), expected, strict=True):
        assert np.array_equal(np.array(ours), np.array(theirs))


@pytest.mark.parametrize("bits", [*AFFINE_BITS, (3, 6), (5, 2)], ids=str)
@pytest.mark.parametrize(
    ("widths", "group_size"),
    [
        ((64, 64), 64),
        ((96, 96), 32),
        ((128, 128), 128),
        ((256, 256), 128),
        ((192, 128), (64, 128)),
        ((96, 256), (32, 64)),
    ],
)
def test_a_quantized_cache_of_any_bits_and_widths(
    bits: int | tuple[int, int], widths: tuple[int, int], group_size: int | tuple[int, int]
) -> None:
    cache = QuantizedKVCache(bits, group_size)
    rows = [mx.random.normal((1, HEADS, 9, width), key=mx.random.key(width)) for width in widths]
    cache.update_and_fetch(*(part[:, :, :5] for part in rows))
    cache.update_and_fetch(*(part[:, :, 5:] for part in rows))
    pairs = [pair if isinstance(pair, tuple) else (pair, pair) for pair in (bits, group_size)]
    for found, part, b, size in zip(cache.dequantize(), rows, *pairs, strict=True):
        packed = mx.quantize(part, group_size=size, bits=b)
        expected = mx.dequantize(*packed, group_size=size, bits=b)
        assert mx.abs(found - expected).max() < 1e-6


@pytest.mark.parametrize("precision", PRECISIONS, ids=precision_id)
@pytest.mark.parametrize("prepared", [False, True])
def test_left_padding_is_not_held(precision: Precision, prepared: bool) -> None:
    cache = BatchKVCache(precision, [0, 0] if prepared else [0, 3])
    if prepared:
        cache.prepare(left_padding=[0, 3])
    keys, values = draw(0, 2, HEADS, 5)
    for chunk in (slice(0, 2), slice(2, 5)):
        cache.update_and_fetch(mx.array(keys[:, :, chunk]), mx.array(values[:, :, chunk]))
    assert cache.offset.tolist() == [5, 2]
    assert held(cache, 0, 5) == encoded(precision, (keys[0], values[0]))
    assert held(cache, 1, 2) == encoded(precision, (keys[1, :, 3:], values[1, :, 3:]))
    with pytest.raises(ValueError, match="empty"):
        cache.prepare(left_padding=[1, 0])


def test_unlike_caches_do_not_share_a_batch() -> None:
    with pytest.raises(ValueError, match="precision"):
        BatchKVCache.merge([QuantizedKVCache(8), QuantizedKVCache(4)])


# Codes, and a scale and a bias of float32 for each group of 64, of keys and of values.
WIDE_ROW_BYTES = 2 * 4 * (128 + 2 * 2 * 4)


def wide(rows: int, sequences: int = 1) -> Any:
    """A batch that a copy of would show."""
    shape = (1, 4, rows, 128)
    ones = [
        QuantizedKVCache.of(
            Precision.affine(8),
            Precision.affine(8).encode(mx.random.normal(shape), mx.random.normal(shape)),
            rows,
        )
        for _ in range(sequences)
    ]
    cache = BatchKVCache.merge(ones)
    mx.eval(cache.state[0])
    return cache


def test_a_step_copies_nothing() -> None:
    cache = wide(2000, sequences=3)
    peak_bytes(cache, 1)  # grows
    assert peak_bytes(cache, 20) < cache.nbytes / 20
    cache.filter([0, 1])
    peak_bytes(cache, 1)
    assert peak_bytes(cache, 20) < cache.nbytes / 20


def test_growth_is_a_matter_of_once() -> None:
    cache = wide(1000)
    peak_bytes(cache, 1)
    capacity = cache.nbytes
    assert peak_bytes(cache, 240) < capacity / 4
    assert cache.nbytes == capacity
    assert cache.nbytes <= CAPACITY_SHARE_MAX * 1241 * WIDE_ROW_BYTES


def test_a_join_and_a_leave_move_one_sequence() -> None:
    cache = wide(2000, sequences=8)
    peak_bytes(cache, 1)
    whole = cache.nbytes
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    cache.filter([0, 1, 7, 3, 4, 5, 6])
    mx.eval(cache.state[0])
    assert cache.nbytes == whole
    other = wide(1500)
    cache.extend(other)
    mx.eval(cache.state[0])
    assert cache.nbytes == whole
    assert mx.get_peak_memory() - before < 0.6 * whole
    assert cache.offset.tolist() == [2001] * 7 + [1500]


def test_capacity_that_is_not_used_is_given_back() -> None:
    cache = wide(2000, sequences=4)
    cache.filter([2])
    assert cache.nbytes <= CAPACITY_SHARE_MAX * 2000 * WIDE_ROW_BYTES


def test_nothing_is_left_of_whoever_was_there_before() -> None:
    """A probability of zero times a value that is no number is no number."""
    rows = draw(3, 8, HEADS, 300)
    cache = BatchKVCache(FULL, [0] * 8)
    cache.update_and_fetch(*(mx.array(part) * (mx.nan if part is rows[1] else 1) for part in rows))
    clean = BatchKVCache(FULL, [0])
    clean.update_and_fetch(*(mx.array(part[:1, :, :10]) for part in rows))
    cache.filter(range(7))
    cache.extend(clean)
    keys, values = cache.keys_and_values()
    assert keys.shape[0] == 8
    assert mx.isfinite(values[7]).all().item()
    assert not mx.isfinite(values[6]).any().item()


def test_buffers_are_shown_and_replaced_in_full_precision_only() -> None:
    cache = BatchKVCache(FULL, [0, 0])
    assert not hasattr(cache, "keys")
    cache.update_and_fetch(mx.ones((2, 1, 3, 32)), mx.ones((2, 1, 3, 64)))
    assert cache.keys.shape[2] == cache._columns.capacity
    cache.values = mx.zeros_like(cache.values)
    cache.keys = mx.depends(cache.keys, cache.values)
    keys, values = cache.update_and_fetch(mx.ones((2, 1, 1, 32)), mx.ones((2, 1, 1, 64)))
    assert keys.min() == 1
    assert (values[:, :, :3].max(), values[:, :, 3:].min()) == (0, 1)
    packed = QuantizedKVCache(8, 32)
    packed.update_and_fetch(mx.ones((1, 1, 3, 32)), mx.ones((1, 1, 3, 64)))
    assert not hasattr(packed, "keys")
