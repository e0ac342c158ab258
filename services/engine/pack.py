"""From rows and snapshots of live caches to records in shared memory.

`pack` and `pack_checkpoint` run on the MLX thread and leave nothing that refers to a live cache;
`write` and `write_checkpoint` run on a helper thread, without the GIL and without an MLX operation.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cachestore import record
from engine.kv.codec import CheckpointPlan, CodecPlan, CodecPolicy, PlannedPart
from engine.kv.encoding import convert
from engine.kv.export import host_view
from engine.kv.history import Rows, sliced
from engine.kv.kinds import Snapshot


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


def pack(codec: CodecPlan, layers: Sequence[Rows], span: range) -> PackedRows:
    """Encodes and evaluates the rows `span` of a sequence, on the MLX thread.

    `layers` has for each leaf of the model its parts (keys, values), each as the arrays that its
    live cache holds, (1, heads, rows, ...), which may be lazy slices; what it has for leaves that
    are state is not looked at. No result shares memory with them.
    """
    encoded = [_encoded(part, layers) for part in codec.parts]
    return PackedRows(span.start, len(span), codec, _views(encoded, codec.schema))


@dataclass(frozen=True, slots=True)
class PackedCheckpoint:
    """The encoded state of all state leaves where `position` tokens had been fed.

    `arrays` are (layers, heads, 1, ...), in the order of the plan's schema; as PackedRows'.
    """

    plan: CheckpointPlan
    arrays: tuple[npt.NDArray[Any], ...]

    @property
    def position(self) -> int:
        return self.plan.position

    @property
    def nbytes(self) -> int:
        """Bytes of its record."""
        return record.plan(self.plan.schema, 1).record_bytes


def pack_checkpoint(policy: CodecPolicy, snapshot: Snapshot, position: int) -> PackedCheckpoint:
    """Encodes and evaluates a snapshot that was taken at `position`, on the MLX thread; as
    `pack`."""
    assert snapshot.position in (None, position)
    plan = policy.checkpoint(position)
    encoded = [
        _encoded(run.part, snapshot.leaves, slice(run.rows.start, run.rows.stop))
        for run in plan.runs
    ]
    return PackedCheckpoint(plan, _views(encoded, plan.schema))


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
    layout = _begun(record.plan(packed[0].codec.schema, rows), path, extent)
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


def write_checkpoint(packed: PackedCheckpoint, path: bytes, extent: memoryview) -> int:
    """Writes a checkpoint as a record, on a helper thread; as `write`.

    `path` is what record.paths gives for the last token before it: its digest is of all others.
    """
    layout = _begun(record.plan(packed.plan.schema, 1), path, extent)
    for source, target in zip(packed.arrays, layout.views(extent), strict=True):
        np.copyto(target, source)
    return layout.record_bytes


def _begun(layout: record.Record, path: bytes, extent: memoryview) -> record.Record:
    """The layout, all of which is written but the arrays' own bytes."""
    if layout.record_bytes > len(extent):
        raise record.RecordError(f"an extent of {len(extent)} bytes for {layout.record_bytes}")
    record.write_header(layout, path, extent)
    return layout


def _encoded(
    part: PlannedPart, layers: Sequence[Rows], rows: slice = slice(None)
) -> list[mx.array]:
    """The arrays (layers, heads, rows, ...) of one part, evaluated, so that only one part at a
    time is held in full precision."""
    place = part.group.parts.index(part.shape)
    held = [sliced(layers[leaf], rows)[place] for leaf in part.group.layers]
    stacked = [_stack(of_layers) for of_layers in zip(*held, strict=True)]
    encoded = list(convert(stacked, part.shape.live, part.encoding))
    mx.eval(encoded)
    return encoded


def _views(encoded: Sequence[Sequence[mx.array]], schema: record.Schema) -> tuple[Any, ...]:
    """The memory of arrays in the order of the schema, in its shapes."""
    arrays = [array for part in encoded for array in part]
    return tuple(
        host_view(array, spec, (len(part.layers), spec.heads, -1, spec.width))
        for array, (part, spec) in zip(arrays, schema.arrays, strict=True)
    )


def _stack(layers: Sequence[mx.array]) -> mx.array:
    """The layers in one array that never shares memory with them."""
    if len(layers) == 1:
        # Concatenating one array gives that array back, and mx.contiguous may; gathering copies.
        return mx.take(layers[0], mx.array([0]), axis=0)
    return mx.concatenate(list(layers), axis=0)
