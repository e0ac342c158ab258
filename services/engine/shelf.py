"""Records in this process's own memory: rows go the way through the store, without a store.

For tools that ask what a codec does to rows. Packing, the bytes of records and attaching are those
of the engine; the memory that the daemon would share is ordinary memory here.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from cachestore import record
from engine import attach, pack
from engine.attach import Attachment, Source
from engine.kv.codec import CodecPlan, CodecPolicy, plan_codec
from engine.kv.history import Rows
from engine.kv.kinds import Snapshot

# As many as a record of the daemon has, and as many as the engine packs at once.
RECORD_ROWS: Final = 256
_PAGE_BYTES: Final = 4096


class Shelf:
    """Room for `rows` rows: `put` once for each of `spans`, in order, and `put_state` where layers
    are not rows; then `attachment` or `caches`, any number of times. On the MLX thread."""

    def __init__(self, policy: CodecPolicy, rows: int) -> None:
        runs = [
            (codec, range(first, min(first + RECORD_ROWS, run.stop)))
            for codec, run in policy.runs(rows, range(rows))
            for first in range(run.start, run.stop, RECORD_ROWS)
        ]
        self.spans: Final = [span for _, span in runs]
        self._policy = policy
        self._codecs = [codec for codec, _ in runs]
        # Whose rows they are is not asked here.
        tokens, self._position = bytes(rows * record.TOKEN_BYTES), rows
        self._paths = record.paths(b"", tokens, [*self.spans, range(rows - 1, rows)])
        self._checkpoint: Source | None = None
        self._extents = [_touched(record.plan(codec.schema, len(span))) for codec, span in runs]
        self._sources: list[Source] = []

    def put(self, layers: Sequence[Rows]) -> None:
        """Packs and writes the next span's rows; `layers` as for pack.pack."""
        number = len(self._sources)
        span, path, extent = self.spans[number], self._paths[number], self._extents[number]
        packed = pack.pack(self._codecs[number], layers, span)
        written = pack.write([packed], span.start, len(span), path, extent)
        self._sources.append(Source(extent[:written], 0, len(span), path))

    def put_state(self, snapshot: Snapshot) -> None:
        """Packs and writes what layers without rows hold behind all rows."""
        packed = pack.pack_checkpoint(self._policy, snapshot, self._position)
        extent = memoryview(bytearray(packed.nbytes))
        pack.write_checkpoint(packed, self._paths[-1], extent)
        self._checkpoint = Source(extent, 0, 1, self._paths[-1])

    @property
    def record_bytes(self) -> int:
        """All that is held: rows, their tokens, headers."""
        return sum(len(source.view) for source in self._sources)

    def attachment(self) -> Attachment:
        """All that was put."""
        return attach.plan(self._policy, self._sources, self._checkpoint)

    def caches(self) -> list[Any]:
        """One cache for each layer, of all that was put."""
        attachment = self.attachment()
        for block in attachment.blocks:
            block.allocate()
            block.copy()
            block.decode()
        return attachment.caches()


def always(codec: CodecPlan, keep_first: int = 0) -> CodecPolicy:
    """Rows are encoded however few they are, but for the first ones that are kept lossless."""
    return CodecPolicy(codec, plan_codec("none", codec.layout), 0, keep_first)


def row_bytes(codec: CodecPlan) -> int:
    """Bytes of one row of all layers, its token aside."""
    return codec.row_bytes - record.TOKEN_BYTES


def state_bytes(policy: CodecPolicy, position: int) -> int:
    """Bytes of what layers without rows hold at a position."""
    return policy.checkpoint(position).schema.row_bytes - record.TOKEN_BYTES


def _touched(layout: record.Record) -> memoryview:
    """Memory for a record, its pages there already, as those of a slab in use are."""
    extent = bytearray(layout.record_bytes)
    np.frombuffer(extent, np.uint8)[::_PAGE_BYTES] = 0
    return memoryview(extent)
