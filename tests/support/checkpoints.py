"""Snapshots and rows of live caches, through the bytes of records, into fresh caches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from cachestore import record
from engine import attach, pack
from engine.attach import Source
from engine.kv import kinds
from engine.kv.codec import CodecPolicy
from engine.kv.history import sliced
from engine.kv.layout import CacheLayout, probe
from engine.kv.live import LiveCaches
from tests.support.caches import NAMESPACE
from tests.support.cores import PackedState

TOLERANCE = 1e-4


def lossless(live: LiveCaches) -> CodecPolicy:
    return CodecPolicy.of(probe(live), "none")


def path_at(tokens: Sequence[int], position: int) -> bytes:
    """What a checkpoint at this position has to say of itself."""
    return _path(tokens, range(position - 1, position))


def _path(tokens: Sequence[int], rows: range) -> bytes:
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    return record.paths(NAMESPACE, packed, [rows])[0]


@dataclass(frozen=True, slots=True)
class Saved:
    """Everything of one request at one position, as a daemon would hold it."""

    policy: CodecPolicy
    position: int
    rows: tuple[Source, ...]
    checkpoint: Source | None

    def restore(self) -> list[Any]:
        """Fresh caches of the model."""
        attachment = attach.plan(self.policy, self.rows, self.checkpoint)
        for block in attachment.blocks:
            block.allocate()
            block.copy()
            block.decode()
        assert attachment.rows == self.position
        return attachment.caches()


def save(
    policy: CodecPolicy, caches: Sequence[Any], tokens: Sequence[int], position: int, index: int = 0
) -> Saved:
    """Of a request whose live caches are at `position`, alone or at an index of a batch."""
    layout = policy.codec.layout
    taken = kinds.rows(layout, caches, index, 0, position)
    sources = []
    for codec, run in policy.runs(position, range(position)):
        rows = [sliced(leaf, slice(run.start, run.stop)) for leaf in taken]
        packed = pack.pack(codec, rows, run)
        extent = memoryview(bytearray(codec.record_overhead_bytes + len(run) * codec.row_bytes))
        path = _path(tokens, run)
        used = pack.write([packed], run.start, len(run), path, extent)
        sources.append(Source(extent[:used], 0, len(run), path))
    checkpoint = None
    if layout.checkpointed:
        checkpoint = save_checkpoint(policy, caches, tokens, position, index)
    return Saved(policy, position, tuple(sources), checkpoint)


def save_checkpoint(
    policy: CodecPolicy, caches: Sequence[Any], tokens: Sequence[int], position: int, index: int = 0
) -> Source:
    packed = pack.pack_checkpoint(
        policy, kinds.snapshot(policy.codec.layout, caches, index), position
    )
    assert packed.position == position
    extent, path = memoryview(bytearray(packed.nbytes + 64)), path_at(tokens, position)
    used = pack.write_checkpoint(packed, path, extent)
    assert used == packed.nbytes
    return Source(extent[:used], 0, 1, path)


def feed(model: Any, caches: Sequence[Any], *chunks: Sequence[int]) -> mx.array:
    """Logits behind the last token, (vocabulary,), evaluated with the caches."""
    logits = mx.zeros(0)
    for chunk in chunks:
        logits = model(mx.array([list(chunk)]), cache=list(caches))[0, -1]
        mx.eval(logits, [leaf.state for leaf in kinds.leaves(caches)])
    return logits


def flat(state: Any) -> list[Any]:
    """The arrays in it, of MLX or numpy."""
    if isinstance(state, list | tuple):
        return [array for part in state for array in flat(part)]
    return [state] if isinstance(state, mx.array | np.ndarray) else []


class Alone:
    """One sequence that the model computes by itself."""

    def __init__(self, model: Any, layout: CacheLayout, path: Sequence[int]) -> None:
        self._model, self._layout, self._path = model, layout, path
        self._caches = LiveCaches(model).fresh()
        self._fed = 0

    def check(self, packed: PackedState) -> None:
        """Its state is that after exactly so many tokens; positions must ascend."""
        tokens, self._fed = self._path[self._fed : packed.position], packed.position
        feed(self._model, self._caches, tokens)
        expected = kinds.snapshot(self._layout, self._caches, 0).leaves
        arrays = list(zip(flat(packed.state), flat(expected), strict=True))
        assert arrays
        for array, expected_array in arrays:
            expected_numbers = np.array(expected_array)
            np.testing.assert_allclose(array, expected_numbers, TOLERANCE, TOLERANCE)
