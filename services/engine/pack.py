"""From rows of live caches to records in shared memory.

`pack` runs on the MLX thread and leaves nothing that refers to a live cache; `write` runs on a
helper thread, without the GIL and without an MLX operation.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cachestore import record
from engine.kv.codec import CodecPlan
from engine.kv.encoding import convert
from engine.kv.export import host_view
from engine.kv.history import Rows


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Encoded rows [first_token, first_token + rows) of a sequence, all layers.

    `arrays` are (layers, heads, rows, width), in the order of the codec's schema, and own their
    memory together with the MLX arrays that they came from.
    """

    first_token: int
    rows: int
    codec: CodecPlan
    arrays: tuple[npt.NDArray[Any], ...]

    @property
    def end(self) -> int:
        """The token after the last."""
        return self.first_token + self.rows

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


def pack(codec: CodecPlan, layers: Sequence[Rows], first_token: int) -> PackedRows:
    """Encodes and evaluates rows, on the MLX thread.

    `layers` has for each layer its parts (keys, values), each as the arrays that its live cache
    holds, (1, heads, rows, ...), which may be lazy slices. No result shares memory with them.
    """
    rows = layers[0][0][0].shape[2]
    arrays: list[mx.array] = []
    for part in codec.parts:
        place = part.group.parts.index(part.shape)
        first = part.group.first_layer
        held = [layer[place] for layer in layers[first : first + part.group.layers]]
        stacked = [_stack(of_layers) for of_layers in zip(*held, strict=True)]
        encoded = convert(stacked, part.shape.live, part.encoding)
        # Part by part, so that only one is held in full precision.
        mx.eval(encoded)
        arrays += encoded
    views = (
        host_view(array, spec, array.shape)
        for array, (_, spec) in zip(arrays, codec.schema.arrays, strict=True)
    )
    return PackedRows(first_token, rows, codec, tuple(views))


def runs(packed: Sequence[PackedRows]) -> list[list[PackedRows]]:
    """Rows that follow each other, in pieces of one codec."""
    return [list(run) for _, run in itertools.groupby(packed, key=lambda part: part.codec)]


def write(
    packed: Sequence[PackedRows], first_token: int, rows: int, path: bytes, extent: memoryview
) -> int:
    """Writes rows [first_token, first_token + rows) as one record, on a helper thread.

    `packed` are of one codec and follow each other; `path` is what record.paths gives for these
    rows. Returns the record's bytes, which are at most `codec.record_overhead_bytes` and `rows`
    times `codec.row_bytes`. RecordError when the extent is shorter.
    """
    end = first_token + rows
    assert packed[0].first_token <= first_token
    assert end <= packed[-1].end
    layout = record.plan(packed[0].codec.schema, rows)
    if layout.record_bytes > len(extent):
        raise record.RecordError(f"an extent of {len(extent)} bytes for {layout.record_bytes}")
    record.write_header(layout, path, extent)
    targets = layout.views(extent)
    for part in packed:
        begin = max(first_token, part.first_token)
        stop = min(end, part.end)
        if begin >= stop:
            continue
        to = slice(begin - first_token, stop - first_token)
        of = slice(begin - part.first_token, stop - part.first_token)
        for source, target in zip(part.arrays, targets, strict=True):
            np.copyto(target[:, :, to], source[:, :, of])
    return layout.record_bytes


def _stack(layers: Sequence[mx.array]) -> mx.array:
    """The layers in one array that never shares memory with them."""
    if len(layers) == 1:
        # Concatenating one array gives that array back, and mx.contiguous may; gathering copies.
        return mx.take(layers[0], mx.array([0]), axis=0)
    return mx.concatenate(list(layers), axis=0)
