"""From records in shared memory to layer caches.

The way has three steps for each block of layers, and each step has its thread:

    allocate   MLX thread      destination buffers, not written to
    copy       helper thread   slab -> buffers, one copy without the GIL; no MLX operation
    decode     MLX thread      one array for each layer and part, evaluated; buffers freed

Blocks bound how long a step keeps the MLX thread from decoding for other requests, and how much
packed memory exists beside the decoded rows. They are independent: while one is copied, another
may be allocated or decoded. Lossless rows stay where they land, so the caches of a block's layers
share memory, which is free when the last of them has joined a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cachestore import record
from engine.kv.codec import CodecPlan, CodecPolicy, PlannedPart
from engine.kv.encoding import convert
from engine.kv.export import host_view, unwritten
from engine.kv.kinds import BY_NAME
from engine.kv.layout import LayerGroup

BLOCK_BYTES: Final = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Source:
    """Rows of one record that belong to a match. `view` begins at the record's first byte.

    `path` is what the record has to say of its rows [0, first_row + rows), as record.paths gives
    it: of the right tokens, in the right place of the right sequence, of the right namespace.
    """

    view: memoryview
    first_row: int
    rows: int
    path: bytes


class Attachment:
    """The rows of one match on their way into caches.

    Made by `plan`. Then, for each of `blocks`, in any order: `allocate`, `copy`, `decode`; then
    `caches`. Views of records are dropped when the last block is copied, or with the attachment
    itself, which may be dropped at any time.
    """

    def __init__(self, rows: int, blocks: "tuple[Block, ...]") -> None:
        self.rows: Final = rows
        self.blocks: Final = blocks

    @property
    def nbytes(self) -> int:
        """Bytes of the caches it makes."""
        return sum(block.nbytes for block in self.blocks)

    def caches(self) -> list[Any]:
        """One cache for each layer, of exactly `rows` rows. Once, on the MLX thread."""
        return [cache for block in self.blocks for cache in block.take_caches()]


def plan(
    policy: CodecPolicy, sources: Sequence[Source], block_bytes: int = BLOCK_BYTES
) -> Attachment:
    """Parses and checks the records; any thread.

    Blocks are ordered by layer, and hold as many layers as make up `block_bytes` of decoded rows,
    but at least one. RecordError when a record is broken, is not laid out as this model's are,
    has fewer rows than its source says, or says that they are others.
    """
    segments: list[Segment] = []
    parsed: record.Record | None = None
    for source in sources:
        parsed = record.read(source.view, like=parsed)
        if not 0 <= source.first_row < source.first_row + source.rows <= parsed.rows:
            raise record.RecordError(
                f"rows [{source.first_row}, {source.first_row + source.rows}) of {parsed.rows}"
            )
        if not parsed.belongs(source.view, source.path):
            raise record.RecordError("rows of other tokens, or of another namespace")
        codec = policy.plan_of(parsed.schema)
        if not segments or segments[-1].codec is not codec:
            segments.append(Segment(codec))
        segments[-1].spans.append((parsed, source))
    if not segments:
        raise record.RecordError("a match of no rows")
    rows = sum(segment.rows for segment in segments)
    blocks = [
        Block(group, layers, tuple(segments))
        for group in policy.codec.layout.groups
        for layers in _cut(group, rows, block_bytes)
    ]
    return Attachment(rows, tuple(blocks))


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive spans of one codec: decoded in one go."""

    codec: CodecPlan
    spans: list[tuple[record.Record, Source]] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return sum(source.rows for _, source in self.spans)


class Block:
    """Some consecutive layers of an attachment: `allocate`, `copy`, `decode`, `take_caches`."""

    def __init__(self, group: LayerGroup, layers: range, segments: tuple[Segment, ...]) -> None:
        self._group = group
        self._layers = layers
        self._segments = segments
        self._rows = sum(segment.rows for segment in segments)
        # For each segment, by the part's name.
        self._landings: list[dict[str, _Landing]] = []
        # Each part's layers, each as the arrays of its live cache.
        self._decoded: dict[str, list[tuple[mx.array, ...]]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of its decoded rows."""
        return len(self._layers) * self._rows * _row_bytes(self._group)

    def allocate(self) -> None:
        """On the MLX thread."""
        self._landings = [
            {
                part.shape.name: _Landing(part, place, self._layers, segment.rows)
                for part, place in _places(segment.codec, self._group)
            }
            for segment in self._segments
        ]

    def copy(self) -> None:
        """On a helper thread. Afterwards this block holds no view of a record."""
        for segment, parts in zip(self._segments, self._landings, strict=True):
            start = 0
            for parsed, source in segment.spans:
                rows = slice(source.first_row, source.first_row + source.rows)
                arrays = [array[:, :, rows] for array in parsed.views(source.view)]
                for landing in parts.values():
                    landing.copy(arrays, start)
                start += source.rows
        self._segments = ()

    def decode(self) -> None:
        """On the MLX thread, after `copy`."""
        landings, self._landings = self._landings, []
        for shape in self._group.parts:
            segments = [parts.pop(shape.name).decode() for parts in landings]
            self._decoded[shape.name] = [_join(pieces) for pieces in zip(*segments, strict=True)]
        mx.eval(self._decoded)

    def take_caches(self) -> list[Any]:
        """On the MLX thread, after `decode`; the block is empty afterwards."""
        decoded, self._decoded = self._decoded, {}
        kind = BY_NAME[self._group.kind]
        return [
            kind.restore(
                self._group.parts,
                {name: layers[index] for name, layers in decoded.items()},
                self._rows,
            )
            for index in range(len(self._layers))
        ]


class _Landing:
    """Where a block's layers of one part of one segment arrive: a buffer for each of its arrays."""

    def __init__(self, part: PlannedPart, place: int, layers: range, rows: int) -> None:
        self._encoding, self._live = part.encoding, part.shape.live
        self._place = place
        # Within the record's array, whose first layer is the group's.
        first = part.group.first_layer
        self._layers = slice(layers.start - first, layers.stop - first)
        self._specs = part.encoding.arrays(part.shape)
        self._shapes = [(len(layers), spec.heads, rows, spec.width) for spec in self._specs]
        # Every byte is written by `copy`: the spans of a segment are all of its rows.
        self._buffers = [unwritten(len(layers) * rows * spec.row_bytes) for spec in self._specs]
        described = zip(self._buffers, self._specs, self._shapes, strict=True)
        self._views = [host_view(buffer, spec, shape) for buffer, spec, shape in described]

    def copy(self, arrays: Sequence[npt.NDArray[Any]], start: int) -> None:
        """Copies rows of a record's arrays to rows [start, ...)."""
        for array, view in zip(arrays[self._place :], self._views, strict=False):
            np.copyto(view[:, :, start : start + array.shape[2]], array[self._layers])

    def decode(self) -> list[tuple[mx.array, ...]]:
        """For each layer the arrays (1, heads, rows, ...) of its live cache, lazy."""
        self._views = []
        described = zip(self._buffers, self._specs, self._shapes, strict=True)
        stacks = [
            buffer.view(getattr(mx, spec.dtype)).reshape(shape) for buffer, spec, shape in described
        ]
        return [
            convert([stack[layer : layer + 1] for stack in stacks], self._encoding, self._live)
            for layer in range(stacks[0].shape[0])
        ]


def _places(codec: CodecPlan, group: LayerGroup) -> list[tuple[PlannedPart, int]]:
    """The parts of a group, each with the place of its first array in a record."""
    places = []
    place = 0
    for part in codec.parts:
        if part.group == group:
            places.append((part, place))
        place += len(part.encoding.arrays(part.shape))
    return places


def _join(pieces: Sequence[tuple[mx.array, ...]]) -> tuple[mx.array, ...]:
    if len(pieces) == 1:
        return pieces[0]
    return tuple(mx.concatenate(list(arrays), axis=2) for arrays in zip(*pieces, strict=True))


def _cut(group: LayerGroup, rows: int, block_bytes: int) -> list[range]:
    """Layers in pieces of at most `block_bytes`, but at least one layer."""
    step = max(1, block_bytes // (rows * _row_bytes(group)))
    layers = range(group.first_layer, group.first_layer + group.layers)
    return [layers[first : first + step] for first in range(0, len(layers), step)]


def _row_bytes(group: LayerGroup) -> int:
    """Bytes of one decoded row of one layer."""
    return sum(shape.heads * shape.width * shape.mlx_dtype.size for shape in group.parts)
