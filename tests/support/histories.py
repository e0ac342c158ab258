"""Rows that tests feed to live caches, and what they become."""

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from engine.kv.encoding import Affine, Encoding
from engine.kv.history import FULL, BatchHistory, Precision
from engine.kv.rotation import Rotation
from tests.support.machines import MACHINE

# A step costs more here than in machines without MLX.
SETTINGS = settings(MACHINE, max_examples=MACHINE.max_examples // 10, stateful_step_count=12)
HEADS = 2
WIDTHS = (64, 128)
PRECISIONS = [
    FULL,
    Precision.affine(8),
    Precision.affine((8, 4), 32),
    Precision.affine((3, 5), 32, Rotation(1)),
]
# Rows of keys and values, (heads, rows, width).
Fed = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]


def precision_id(precision: Precision) -> str:
    def name(encoding: Encoding) -> str:
        if not isinstance(encoding, Affine):
            return "full"
        return f"{encoding.bits}g{encoding.group_size}" + "r" * (encoding.rotation is not None)

    return f"{name(precision.keys)}-{name(precision.values)}"


def draw(seed: int, *shape: int) -> Fed:
    generator = np.random.default_rng(seed)
    keys, values = (
        generator.standard_normal((*shape, width), dtype=np.float32) for width in WIDTHS
    )
    return keys, values


def joined(*parts: Fed) -> Fed:
    keys, values = (np.concatenate(arrays, axis=-2) for arrays in zip(*parts, strict=True))
    return keys, values


def encoded(precision: Precision, rows: Fed) -> list[bytes]:
    """Each array of rows (heads, rows, width) as bytes."""
    arrays = precision.encode(*(mx.array(part)[None] for part in rows))
    return [bytes(np.array(array)) for array in arrays]


def held(cache: BatchHistory, index: int, end: int) -> list[bytes]:
    keys, values = cache.rows(index, 0, end)
    return [bytes(np.array(mx.contiguous(array))) for array in (*keys, *values)]


class Sequences:
    """Feeds a cache of the batch, and keeps what each sequence was fed."""

    def __init__(self, cache: Any, rows: list[Fed]) -> None:
        self.cache = cache
        self.rows = rows

    def feed(self, seed: int, lengths: list[int]) -> None:
        """Rows of unequal number, padded on the right, in chunks of at most four."""
        count = max(lengths)
        padding = [count - length for length in lengths]
        keys, values = draw(seed, len(lengths), HEADS, count)
        if any(padding):
            self.cache.prepare(lengths=lengths, right_padding=padding)
        for first in range(0, count, 4):
            chunk = slice(first, first + 4)
            self.cache.make_mask(keys[:, :, chunk].shape[2])
            self.cache.update_and_fetch(mx.array(keys[:, :, chunk]), mx.array(values[:, :, chunk]))
        if any(padding):
            self.cache.finalize()
        for index, length in enumerate(lengths):
            fed = keys[index, :, :length], values[index, :, :length]
            self.rows[index] = joined(self.rows[index], fed)


def peak_bytes(cache: Any, steps: int) -> int:
    """The most memory above what was held, over steps of a row (4 heads of 128) for each."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    sequences = len(cache.offset.tolist())
    for _ in range(steps):
        new = mx.random.normal((sequences, 4, 1, 128))
        keys, values = cache.update_and_fetch(new, new)
        # What attention would read, gone before the next step.
        mx.eval(keys[1].sum(), values[1].sum(), cache.state[0])
        del keys, values
    return mx.get_peak_memory() - before


def none() -> Fed:
    return draw(0, HEADS, 0)


class BatchMachine(RuleBasedStateMachine):
    """Requests come, are fed, leave and are taken out, in every order, of any cache of a batch.

    Who derives from it sets `sequences` first, and says how others that join are made.
    """

    sequences: Sequences

    def fresh(self, count: int) -> Sequences:
        """A batch of so many empty requests."""
        raise NotImplementedError

    @rule(seed=st.integers(0, 1000), data=st.data())
    def feed(self, seed: int, data: st.DataObject) -> None:
        count = len(self.sequences.rows)
        lengths = data.draw(st.lists(st.integers(1, 70), min_size=count, max_size=count))
        self.sequences.feed(seed, lengths)

    @rule(seed=st.integers(0, 1000), steps=st.integers(1, 20))
    def decode(self, seed: int, steps: int) -> None:
        for step in range(steps):
            self.sequences.feed(seed + step, [1] * len(self.sequences.rows))

    @rule(seed=st.integers(0, 1000), lengths=st.lists(st.integers(0, 90), min_size=1, max_size=3))
    def join(self, seed: int, lengths: list[int]) -> None:
        other = self.fresh(len(lengths))
        if any(lengths):
            # A prompt has a row at least where others have one.
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
        """Taken out one by one and merged again, as requests that move to another batch."""
        cache = self.sequences.cache
        singles = [cache.extract(index) for index in range(len(self.sequences.rows))]
        self.sequences.cache = singles[0].merge(singles)
