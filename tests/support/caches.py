"""Layouts and rows made by hand, and records of them in bytearrays that stand for slabs."""

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from cachestore import record
from engine import pack
from engine.attach import Attachment, Source
from engine.kv.codec import CodecPlan
from engine.kv.encoding import PartShape
from engine.kv.history import Rows
from engine.kv.kinds import PlainKV, RowKind, Snapshot
from engine.kv.layout import CacheLayout, LayerGroup, StateGroup
from engine.kv.states import ArrayShape, Recurrent
from engine.pack import PackedRows

# Whose rows the records here are.
NAMESPACE = bytes(range(32))
TOKENS = (7 * np.arange(10_000, dtype="<u4")).tobytes()

# Keys and values of one layer, (1, heads, rows, width).
Layer = tuple[mx.array, mx.array]


def layout(*groups: tuple[int, int, int], heads: int = 2, dtype: str = "float32") -> CacheLayout:
    """Groups are (layers, key width, value width)."""
    made: list[LayerGroup[RowKind]] = []
    first = 0
    for layers, key_width, value_width in groups:
        keys = PartShape("keys", heads, key_width, dtype)
        values = PartShape("values", heads, value_width, dtype)
        made.append(LayerGroup(PlainKV(keys, values), tuple(range(first, first + layers))))
        first += layers
    return CacheLayout(tuple(made))


def hybrid(
    layers: int, every: int, state: Sequence[ArrayShape], heads: int, width: int, dtype: str
) -> CacheLayout:
    """Recurrent layers, but for each `every`-th, which has keys and values."""
    keys, values = (PartShape(name, heads, width, dtype) for name in ("keys", "values"))
    attending = tuple(range(every - 1, layers, every))
    recurrent = tuple(n for n in range(layers) if n not in attending)
    rows: LayerGroup[RowKind] = LayerGroup(PlainKV(keys, values), attending)
    states: StateGroup = LayerGroup(Recurrent(tuple(state)), recurrent)
    return CacheLayout((rows,), (states,))


def random_layers(of: CacheLayout, rows: int, seed: int = 0) -> list[Layer]:
    """Evaluated; no two rows alike."""
    key = mx.random.key(seed)
    layers: list[Layer] = []
    for group in of.groups:
        for _ in group.layers:
            parts = []
            for shape in group.parts:
                key, used = mx.random.split(key)
                rows_of = mx.random.normal((1, shape.heads, rows, shape.width), key=used)
                parts.append((3 * rows_of).astype(shape.mlx_dtype))
            layers.append((parts[0], parts[1]))
    mx.eval(layers)
    return layers


def sliced(layers: Sequence[Layer], start: int, stop: int) -> list[Layer]:
    """Rows [start, stop) of each layer, lazy."""
    return [(keys[:, :, start:stop], values[:, :, start:stop]) for keys, values in layers]


def held(layers: Sequence[Layer]) -> list[Rows]:
    """As live caches in full precision hold them."""
    return [((keys,), (values,)) for keys, values in layers]


def random_rows(of: CacheLayout, rows: int) -> list[Rows]:
    """By leaf, as live caches in full precision hold them, and nothing of those that are state;
    evaluated."""
    leaves = [leaf for group in of.groups for leaf in group.layers]
    taken: list[Rows] = [()] * of.layers
    for leaf, layer in zip(leaves, held(random_layers(of, rows)), strict=True):
        taken[leaf] = layer
    return taken


def random_snapshot(of: CacheLayout, position: int) -> Snapshot:
    """By leaf, nothing of those that are rows; evaluated."""
    taken: list[Rows] = [()] * of.layers
    for group in of.states:
        rows = group.kind.rows_at(position)
        for leaf in group.layers:
            shapes = [(1, part.heads, rows, part.width) for part in group.parts]
            parts = zip(shapes, group.parts, strict=True)
            taken[leaf] = tuple(
                (mx.random.normal(shape, key=mx.random.key(leaf)).astype(part.mlx_dtype),)
                for shape, part in parts
            )
    mx.eval(taken)
    return Snapshot(position, tuple(taken))


def packed(codec: CodecPlan, layers: Sequence[Layer], first_token: int = 0) -> PackedRows:
    """All their rows, which are those from `first_token` on."""
    rows = layers[0][0].shape[2]
    return pack.pack(codec, held(layers), range(first_token, first_token + rows))


def path_of(first_token: int, rows: int) -> bytes:
    """What a record of these rows says of them."""
    return record.paths(NAMESPACE, TOKENS, [range(first_token, first_token + rows)])[0]


@dataclass(frozen=True, slots=True)
class Stored:
    """One record: what a daemon would hold, and where its rows are in the sequence."""

    view: memoryview
    first_token: int
    rows: int

    def source(self, first_row: int, rows: int) -> Source:
        path = path_of(self.first_token, first_row + rows)
        return Source(self.view, first_row, rows, path)


def store(of: PackedRows, cuts: Sequence[int], helper: Executor) -> list[Stored]:
    """Writes records that end at each of `cuts`, which are positions in the sequence."""
    stored = []
    first = of.first_token
    for cut in cuts:
        rows = cut - first
        size = of.codec.record_overhead_bytes + rows * of.codec.row_bytes
        extent = memoryview(bytearray(size + 256))
        path = path_of(first, rows)
        used = helper.submit(pack.write, [of], first, rows, path, extent).result()
        assert used <= size
        stored.append(Stored(extent[:used], first, rows))
        first = cut
    return stored


def spans(records: Sequence[Stored], stop: int) -> list[Source]:
    """Rows [0, stop) as a lookup returns them: the longest span of each record in turn."""
    sources = []
    position = 0
    for stored in records:
        end = min(stored.first_token + stored.rows, stop)
        if end > position >= stored.first_token:
            sources.append(stored.source(position - stored.first_token, end - position))
            position = end
    assert position == stop
    return sources


def complete(attachment: Attachment, helper: Executor) -> list[Any]:
    for block in attachment.blocks:
        block.allocate()
        helper.submit(block.copy).result()
        block.decode()
    return attachment.caches()
