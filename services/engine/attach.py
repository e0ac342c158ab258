"""From records in shared memory, of rows and of a checkpoint, to layer caches.

The way has three steps for each block of layers, and each step has its thread:

    allocate   MLX thread      destination buffers, not written to
    copy       helper threads  slab -> buffers, one copy without the GIL; no MLX operation
    decode     MLX thread      one array for each layer and part, evaluated; buffers freed

Blocks bound how long a step keeps the MLX thread from decoding for other requests, and how much
packed memory exists beside the decoded rows. They are independent: while one is copied, another
may be allocated or decoded. Lossless rows stay where they land, so the caches of a block's layers
share memory, which is free when the last of them has joined a batch.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cachestore import record
from engine.kv.codec import CodecPlan, CodecPolicy, PlannedPart
from engine.kv.encoding import PartShape, convert
from engine.kv.export import host_view, unwritten
from engine.kv.layout import CacheLayout, RowGroup, StateGroup

# Of rows that are decoded, which keeps the MLX thread; where live caches hold them as they are
# stored, a block costs it views alone, and the larger it is the fewer are the copies.
BLOCK_BYTES: Final = 32 * 1024 * 1024
_UNDECODED: Final = 4
# Copied in one go: little enough for threads to share a block fairly, and more than Python costs.
PIECE_BYTES: Final = 2 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Source:
    """Rows of one record that belong to a match. `view` begins at the record's first byte.

    `path` is what the record has to say of its rows [0, first_row + rows), as record.paths gives
    it: of the right tokens, in the right place of the right sequence, of the right namespace.

    A checkpoint is the one row of its record, and its path that of the last token before it.
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

    def __init__(self, layout: CacheLayout, rows: int, blocks: "tuple[Block, ...]") -> None:
        self.rows: Final = rows
        self.blocks: Final = blocks
        self._layout = layout

    @property
    def nbytes(self) -> int:
        """Bytes of the caches it makes."""
        return sum(block.nbytes for block in self.blocks)

    def caches(self) -> list[Any]:
        """The model's caches, of exactly `rows` rows. Once, on the MLX thread."""
        leaves = {leaf: cache for block in self.blocks for leaf, cache in block.take_caches()}
        return self._layout.nest([leaves[leaf] for leaf in range(self._layout.layers)])


def plan(
    policy: CodecPolicy,
    sources: Sequence[Source],
    checkpoint: Source | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Attachment:
    """Parses and checks the records; any thread.

    `checkpoint` is that of the position where the sources end, for layouts that need one. Blocks
    hold as many layers of a group as make up `block_bytes` of decoded rows, four times that where
    nothing is decoded, but at least one.
    RecordError when a record is broken, is not laid out as this model's are, has fewer rows than
    its source says, or says that they are others; and for a checkpoint too few or too many.
    """
    layout = policy.codec.layout
    segments = [
        (codec, tuple(Span.of(parsed, source) for _, parsed, source in found))
        for codec, found in itertools.groupby(_parsed(policy, sources), key=lambda each: each[0])
    ]
    if not segments:
        raise record.RecordError("a match of no rows")
    rows = sum(source.rows for source in sources)
    if layout.checkpointed != (checkpoint is not None):
        raise record.RecordError("a checkpoint is missing, or there is no use for one")
    blocks = []
    for group in layout.groups:
        of_group = [Segment(_places(codec.parts, group), spans) for codec, spans in segments]
        layers = _cut(group, rows, block_bytes * _larger(of_group))
        blocks += [Block(group, some, of_group, rows) for some in layers]
    if checkpoint is not None:
        blocks += _state_blocks(policy, checkpoint, rows, block_bytes)
    return Attachment(layout, rows, tuple(blocks))


def _parsed(
    policy: CodecPolicy, sources: Sequence[Source]
) -> Iterator[tuple[CodecPlan, record.Record, Source]]:
    parsed: record.Record | None = None
    for source in sources:
        parsed = _checked(source, parsed)
        yield policy.plan_of(parsed.schema), parsed, source


def _checked(source: Source, like: record.Record | None = None) -> record.Record:
    parsed = record.read(source.view, like=like)
    if not 0 <= source.first_row < source.first_row + source.rows <= parsed.rows:
        raise record.RecordError(
            f"rows [{source.first_row}, {source.first_row + source.rows}) of {parsed.rows}"
        )
    if not parsed.belongs(source.view, source.path):
        raise record.RecordError("rows of other tokens, or of another namespace")
    return parsed


def _state_blocks(
    policy: CodecPolicy, checkpoint: Source, position: int, block_bytes: int
) -> "Iterator[Block]":
    """Of a checkpoint: what it holds of each leaf is like rows, in one segment or two."""
    parsed, wanted = _checked(checkpoint), policy.checkpoint(position)
    if parsed.schema != wanted.schema or parsed.rows != 1:
        raise record.RecordError("a checkpoint of another layout, or of another position")
    places = _first_arrays([run.part for run in wanted.runs])
    runs = list(zip(wanted.runs, places, strict=True))
    for group in policy.codec.layout.states:
        of_group = [(run, place) for run, place in runs if run.part.group == group]
        segments = [
            Segment(
                tuple((run.part, place) for run, place in of_group if run.rows == rows),
                (Span(parsed.views(checkpoint.view), range(len(rows))),),
            )
            for rows in dict.fromkeys(run.rows for run, _ in of_group)
        ]
        rows = group.kind.rows_at(position)
        for layers in _cut(group, rows, block_bytes * _larger(segments)):
            yield Block(group, layers, segments, position)


@dataclass(frozen=True, slots=True)
class Span:
    """Where some rows lie: a record's arrays, which rows of them; or a checkpoint's, whose rows
    are stored as one."""

    arrays: list[npt.NDArray[Any]]
    rows: range

    @classmethod
    def of(cls, parsed: record.Record, source: Source) -> "Span":
        rows = range(source.first_row, source.first_row + source.rows)
        return cls(parsed.views(source.view), rows)


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive spans that are decoded in one go: the parts of one group as all of them have
    them, each with the place of its first array in a record."""

    parts: tuple[tuple[PlannedPart, int], ...]
    spans: tuple[Span, ...]

    @property
    def rows(self) -> int:
        return sum(len(span.rows) for span in self.spans)

    @property
    def placed(self) -> Iterator[tuple[Span, int]]:
        """Each span and the row of the segment where it begins."""
        ends = itertools.accumulate(len(span.rows) for span in self.spans)
        return ((span, end - len(span.rows)) for span, end in zip(self.spans, ends, strict=True))


class Block:
    """Some layers of an attachment: `allocate`, `copy`, `decode`, `take_caches`."""

    def __init__(
        self,
        group: RowGroup | StateGroup,
        layers: range,
        segments: Sequence[Segment],
        position: int,
    ) -> None:
        """`layers` are places in the group's."""
        self._group = group
        self._layers = layers
        self._segments = tuple(segments)
        self._rows = sum(segment.rows for segment in segments)
        self._position = position
        # For each segment, by the part's name.
        self._landings: list[dict[str, _Landing]] = []
        # What is still to be copied. Threads may share the iterator of a list.
        self._pieces: Iterator[tuple[_Landing, Span, int, slice]] = iter(())
        # Each part's layers, each as the arrays of its live cache.
        self._decoded: dict[str, list[tuple[mx.array, ...]]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of its decoded rows."""
        return len(self._layers) * self._rows * _row_bytes(self._group.parts)

    def allocate(self) -> None:
        """On the MLX thread."""
        self._landings = [
            {
                part.shape.name: _Landing(part, place, self._layers, segment.rows)
                for part, place in segment.parts
            }
            for segment in self._segments
        ]
        self._pieces = iter(
            [
                (landing, span, start, layers)
                for segment, parts in zip(self._segments, self._landings, strict=True)
                for span, start in segment.placed
                for landing in parts.values()
                for layers in landing.pieces(len(span.rows))
            ]
        )
        self._segments = ()

    def copy(self) -> int:
        """On helper threads, any number of them at once, which share the work; returns how many
        bytes were this one's. When all have returned, this block holds no view of a record."""
        return sum(
            landing.copy(span, start, layers) for landing, span, start, layers in self._pieces
        )

    def decode(self) -> None:
        """On the MLX thread, after `copy`."""
        landings, self._landings = self._landings, []
        for shape in self._group.parts:
            segments = [parts.pop(shape.name).decode() for parts in landings]
            self._decoded[shape.name] = [_join(pieces) for pieces in zip(*segments, strict=True)]
        mx.eval(self._decoded)

    def take_caches(self) -> Iterator[tuple[int, Any]]:
        """On the MLX thread, after `decode`: leaves and their caches; the block is empty
        afterwards."""
        decoded, self._decoded = self._decoded, {}
        for index, place in enumerate(self._layers):
            parts = {name: layers[index] for name, layers in decoded.items()}
            yield self._group.layers[place], self._group.kind.restore(parts, self._position)


class _Landing:
    """Where a block's layers of one part of one segment arrive: a buffer for each of its arrays."""

    def __init__(self, part: PlannedPart, place: int, layers: range, rows: int) -> None:
        self._encoding, self._live = part.encoding, part.shape.live
        self._place = place
        self._layers = slice(layers.start, layers.stop)
        self._specs = part.encoding.arrays(part.shape)
        self._shapes = [(len(layers), spec.heads, rows, spec.width) for spec in self._specs]
        # Every byte is written by `copy`: the spans of a segment are all of its rows.
        self._buffers = [unwritten(len(layers) * rows * spec.row_bytes) for spec in self._specs]
        described = zip(self._buffers, self._specs, self._shapes, strict=True)
        self._views = [host_view(buffer, spec, shape) for buffer, spec, shape in described]

    def pieces(self, rows: int) -> Iterator[slice]:
        """Layers of so many rows that are copied in one go, as places in the block."""
        step = max(1, PIECE_BYTES // (rows * sum(spec.row_bytes for spec in self._specs)))
        return (slice(first, first + step) for first in range(0, self._shapes[0][0], step))

    def copy(self, span: Span, start: int, layers: slice) -> int:
        """Copies a span's layers to rows [start, ...); returns how many bytes."""
        copied = 0
        held = span.arrays[self._place : self._place + len(self._specs)]
        for array, spec, view in zip(held, self._specs, self._views, strict=True):
            # A checkpoint stores as one row what are several.
            source = array.reshape(*array.shape[:2], -1, spec.width)[self._layers][layers]
            target = view[layers, :, start : start + len(span.rows)]
            np.copyto(target, source[:, :, span.rows.start : span.rows.stop])
            copied += target.nbytes
        return copied

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


def _first_arrays(parts: Sequence[PlannedPart]) -> list[int]:
    """For each part the place of its first array in a record of all of them."""
    counts = [len(part.encoding.arrays(part.shape)) for part in parts]
    return list(itertools.accumulate(counts, initial=0))[:-1]


def _places(parts: Sequence[PlannedPart], group: RowGroup) -> tuple[tuple[PlannedPart, int], ...]:
    """The parts of a group, each with the place of its first array in a record."""
    placed = zip(parts, _first_arrays(parts), strict=True)
    return tuple((part, place) for part, place in placed if part.group == group)


def _join(pieces: Sequence[tuple[mx.array, ...]]) -> tuple[mx.array, ...]:
    if len(pieces) == 1:
        return pieces[0]
    return tuple(mx.concatenate(list(arrays), axis=2) for arrays in zip(*pieces, strict=True))


def _larger(segments: Sequence[Segment]) -> int:
    """How many times as large a block of them may be."""
    as_stored = all(part.encoding == part.shape.live for each in segments for part, _ in each.parts)
    return _UNDECODED if as_stored and len(segments) == 1 else 1


def _cut(group: RowGroup | StateGroup, rows: int, block_bytes: int) -> list[range]:
    """Places of layers in pieces of at most `block_bytes`, but at least one layer."""
    step = max(1, block_bytes // max(1, rows * _row_bytes(group.parts)))
    layers = range(len(group.layers))
    return [layers[first : first + step] for first in range(0, len(layers), step)]


def _row_bytes(parts: Sequence[PartShape]) -> int:
    """Bytes of one decoded row of one layer."""
    return sum(shape.heads * shape.width * shape.mlx_dtype.size for shape in parts)
