"""Windows of the batch against mlx-lm's RotatingKVCache, one for each request."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from mlx_lm.models.cache import RotatingKVCache

from engine.kv.history import FULL, Precision
from engine.kv.rotating import WindowKVCache
from tests.support.histories import (
    HEADS,
    PRECISIONS,
    SETTINGS,
    Fed,
    Sequences,
    draw,
    joined,
    none,
    precision_id,
)

WINDOW = 16


class WindowMachine(RuleBasedStateMachine):
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

    @rule(seed=st.integers(0, 1000), data=st.data())
    def feed(self, seed: int, data: st.DataObject) -> None:
        count = len(self.sequences.rows)
        lengths = data.draw(st.lists(st.integers(1, 40), min_size=count, max_size=count))
        self.sequences.feed(seed, lengths)

    @rule(seed=st.integers(0, 1000), steps=st.integers(1, 20))
    def decode(self, seed: int, steps: int) -> None:
        for step in range(steps):
            self.sequences.feed(seed + step, [1] * len(self.sequences.rows))

    @rule(seed=st.integers(0, 1000), lengths=st.lists(st.integers(0, 40), min_size=1, max_size=3))
    def join(self, seed: int, lengths: list[int]) -> None:
        other = self.fresh(len(lengths))
        if any(lengths):
            other.feed(seed, [max(1, length) for length in lengths])
        self.sequences.cache.extend(other.cache)
        self.sequences.rows += other.rows

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        order = data.draw(st.permutations(range(len(self.sequences.rows))))
        kept = order[: data.draw(st.integers(1, len(order)))]
        self.sequences.cache.filter(kept)
        self.sequences.rows = [self.sequences.rows[index] for index in kept]

    @rule()
    def part(self) -> None:
        cache = self.sequences.cache
        singles = [cache.extract(index) for index in range(len(self.sequences.rows))]
        self.sequences.cache = singles[0].merge(singles)

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
    cache: Any = RotatingKVCache(WINDOW, keep)  # type: ignore[no-untyped-call]
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
    source: Any = RotatingKVCache(WINDOW, keep)  # type: ignore[no-untyped-call]
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


def test_unlike_windows_do_not_share_a_batch() -> None:
    with pytest.raises(ValueError, match="window"):
        WindowKVCache.merge([WindowKVCache(FULL, 16), WindowKVCache(FULL, 16, 4)])
    with pytest.raises(ValueError, match="keep"):
        WindowKVCache(FULL, 4, 4)
