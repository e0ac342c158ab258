"""Windows of the batch against mlx-lm's RotatingKVCache, one for each request."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant
from mlx_lm.models.cache import RotatingKVCache

from engine.kv.history import FULL, JoiningKVCache, Precision
from engine.kv.rotating import BatchWindowKVCache, WindowKVCache
from tests.support.histories import (
    HEADS,
    PRECISIONS,
    SETTINGS,
    BatchMachine,
    Fed,
    Sequences,
    draw,
    joined,
    none,
    peak_bytes,
    precision_id,
)
from tests.support.models import gemma3n_config, gemma4_config, tiny_model

WINDOW = 16


class WindowMachine(BatchMachine):
    """The same rows in a batch of windows and in mlx-lm's RotatingKVCache, one for each request.

    After a prefill mlx-lm holds more than the window until the next token; the latest count.
    """

    @initialize(
        which=st.sampled_from(range(len(PRECISIONS))), keep=st.sampled_from([0, 1, 4, WINDOW - 1])
    )
    def begin(self, which: int, keep: int) -> None:
        self.precision, self.keep = PRECISIONS[which], keep
        self.sequences = self.fresh(1)

    def fresh(self, count: int) -> Sequences:
        singles = [WindowKVCache(self.precision, WINDOW, self.keep) for _ in range(count)]
        return Sequences(WindowKVCache.merge(singles), [none() for _ in range(count)])

    @invariant()
    def rows_are_those_of_mlx_lm(self) -> None:
        cache = self.sequences.cache
        for index, rows in enumerate(self.sequences.rows):
            if rows[0].shape[1]:
                expected = self.precision.decode(
                    self.precision.split(self.precision.encode(*latest(rows, self.keep)))
                )
                for ours, theirs in zip(cache.temporal(index), expected, strict=True):
                    assert np.array_equal(np.array(ours), np.array(theirs))

    @invariant()
    def each_token_sees_the_first_rows_and_the_latest(self) -> None:
        cache = self.sequences.cache
        ends = [rows[0].shape[1] for rows in self.sequences.rows]
        for count in (1, 3):
            mask = np.array(cache.make_mask(count, return_array=True))
            for index, end in enumerate(ends):
                seen = [WINDOW - self.keep] * count
                seen = [
                    min(end + n + 1, self.keep) + max(0, min(end + n + 1 - self.keep, most))
                    for n, most in enumerate(seen)
                ]
                assert mask[index, 0].sum(axis=-1).tolist() == seen


def latest(rows: Fed, keep: int) -> tuple[mx.array, mx.array]:
    """What mlx-lm's cache of one request holds after these rows, in order, the last one decoded."""
    cache: Any = RotatingKVCache(WINDOW, keep)
    keys, values = (mx.array(part)[None] for part in rows)
    if keys.shape[2] > 1:
        cache.update_and_fetch(keys[:, :, :-1], values[:, :, :-1])
    cache.update_and_fetch(keys[:, :, -1:], values[:, :, -1:])
    return cache._temporal_order(cache.keys), cache._temporal_order(cache.values)


TestWindow = WindowMachine.TestCase
TestWindow.settings = SETTINGS


@pytest.mark.parametrize("precision", PRECISIONS[1:], ids=precision_id)
@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize(
    "fed", [[], [1], [5], [16], [17], [40], [10, 1, 1], [40, 1, 1, 1], [1] * 37]
)
def test_a_window_is_made_from_mlx_lms(precision: Precision, keep: int, fed: list[int]) -> None:
    source: Any = RotatingKVCache(WINDOW, keep)
    rows = none()
    for seed, count in enumerate(fed):
        new = draw(seed, HEADS, count)
        source.update_and_fetch(*(mx.array(part)[None] for part in new))
        rows = joined(rows, new)
    window = WindowKVCache.from_cache(source, precision)
    assert WindowKVCache.from_cache(window, precision) is window
    assert window.offset == source.offset == sum(fed)
    # The same rows follow in both, far past the wrap.
    for seed in range(100, 100 + 3 * WINDOW):
        new = draw(seed, HEADS, 1)
        for cache in (source, window):
            cache.update_and_fetch(*(mx.array(part)[None] for part in new))
        rows = joined(rows, new)
    assert window.offset == source.offset
    expected = precision.decode(precision.split(precision.encode(*latest(rows, keep))))
    for ours, theirs in zip(window.temporal(), expected, strict=True):
        assert np.array_equal(np.array(ours), np.array(theirs))


@pytest.mark.parametrize("precision", PRECISIONS, ids=precision_id)
@pytest.mark.parametrize("keep", [0, 4])
def test_left_padding_is_not_held(precision: Precision, keep: int) -> None:
    window = BatchWindowKVCache(precision, [0, 0], WINDOW, keep)
    window.prepare(left_padding=[0, 21])
    keys, values = draw(0, 2, HEADS, 50)
    for chunk in (slice(0, 20), slice(20, 23), slice(23, 49), slice(49, 50)):
        window.update_and_fetch(mx.array(keys[:, :, chunk]), mx.array(values[:, :, chunk]))
    assert window.offset.tolist() == [50, 29]
    for index, begin in enumerate((0, 21)):
        rows = latest((keys[index, :, begin:], values[index, :, begin:]), keep)
        expected = precision.decode(precision.split(precision.encode(*rows)))
        for ours, theirs in zip(window.temporal(index), expected, strict=True):
            assert np.array_equal(np.array(ours), np.array(theirs))


def test_a_step_of_a_full_window_copies_nothing() -> None:
    singles = []
    for seed in range(3):
        single = WindowKVCache(Precision.affine((8, 4)), 2000, 4)
        rows = mx.random.normal((1, 4, 2500, 128), key=mx.random.key(seed))
        single.update_and_fetch(rows, rows)
        singles.append(single)
    window = WindowKVCache.merge(singles)
    del singles, single
    mx.eval(window.state[0])
    peak_bytes(window, 1)
    assert peak_bytes(window, 20) < window.nbytes / 20
    window.filter([0, 2])
    peak_bytes(window, 1)
    assert peak_bytes(window, 20) < window.nbytes / 20


def test_unlike_windows_do_not_share_a_batch() -> None:
    with pytest.raises(ValueError, match="window"):
        WindowKVCache.merge([WindowKVCache(FULL, 16), WindowKVCache(FULL, 16, 4)])
    with pytest.raises(ValueError, match="keep"):
        WindowKVCache(FULL, 4, 4)


def test_windows_that_are_merged_take_no_more_than_their_rows() -> None:
    singles = []
    for seed in range(2):
        single = WindowKVCache(FULL, WINDOW)
        for step in range(4 * WINDOW):
            rows = draw(100 * seed + step, HEADS, 1)
            single.update_and_fetch(*(mx.array(part)[None] for part in rows))
        singles.append(single)
    merged = WindowKVCache.merge(singles)
    assert merged.nbytes == sum(single.nbytes for single in singles)


@pytest.mark.parametrize("config", [gemma3n_config, gemma4_config])
def test_layers_that_read_the_rows_of_another_see_what_it_sees(config: Any) -> None:
    """Of several new rows each sees more than the window holds afterwards."""
    model = tiny_model(config(window=WINDOW))
    theirs: list[Any] = model.make_cache()
    ours = [
        WindowKVCache(FULL, cache.max_size, cache.keep)
        if isinstance(cache, RotatingKVCache)
        else JoiningKVCache.of(FULL)
        for cache in theirs
    ]
    assert len(ours) < len(model.layers)
    tokens = np.random.default_rng(0).integers(0, 256, 60)
    for first, end in ((0, 12), (12, 40), (40, 41), (41, 59), (59, 60)):
        chunk = mx.array(tokens[None, first:end])
        found, expected = (model(chunk, cache=caches) for caches in (ours, theirs))
        assert mx.abs(found - expected).max() < 1e-4
        # When the pass is over, what was seen is gone.
        mx.eval([cache.state for cache in ours])
        assert ours[0].keys_and_values()[0].shape[2] == min(end, WINDOW)
