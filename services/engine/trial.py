"""What a codec does to rows of a cache: bytes, error and time, measured on random rows.

Rows go the way of production: packed piece by piece into records, and out of them layer by layer.
The originals are gone before anything is decoded; what is decoded is compared with the same rows,
made again from their seed.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from engine.kv.codec import CodecPlan
from engine.kv.encoding import PartShape
from engine.kv.kinds import PlainKV
from engine.kv.layout import CacheLayout, LayerGroup
from engine.shelf import RECORD_ROWS, Shelf, always, row_bytes

# A long run is measured in chunks of this much full precision: it is held packed and decoded.
CHUNK_BYTES: Final = 128 << 20
# What is shorter is run several times: single times would be mostly noise.
SHORT_TOKENS: Final = 4096
RUNS_MAX: Final = 8
OUTLIER_CHANNELS: Final = 4
OUTLIER_SCALE: Final = 10.0
_FLOAT32_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """The cache that is measured: `layers` plain ones, keys and values alike."""

    layers: int
    heads: int
    head_dim: int
    dtype: str
    # Some channels, the same in every row, are ten times larger than the others.
    outliers: bool = False

    @property
    def layout(self) -> CacheLayout:
        parts = tuple(
            PartShape(name, self.heads, self.head_dim, self.dtype) for name in ("keys", "values")
        )
        return CacheLayout((LayerGroup(PlainKV(*parts), tuple(range(self.layers))),))

    @property
    def row_elements(self) -> int:
        return 2 * self.layers * self.heads * self.head_dim

    @property
    def row_bytes(self) -> int:
        return self.row_elements * self._part.mlx_dtype.size

    def rows(self, span: range) -> list[tuple[mx.array, mx.array]]:
        """Keys and values of each layer, (1, heads, rows, head_dim); lazy, and the same for the
        same span."""
        scale = self._scale()
        return [
            (self._rows(span, layer, 0, scale), self._rows(span, layer, 1, scale))
            for layer in range(self.layers)
        ]

    @property
    def _part(self) -> PartShape:
        return self.layout.groups[0].parts[0]

    def _rows(self, span: range, layer: int, place: int, scale: mx.array) -> mx.array:
        key = mx.random.key((span.start * self.layers + layer) * 2 + place)
        rows = mx.random.normal((1, self.heads, len(span), self.head_dim), key=key)
        return (rows * scale).astype(self._part.mlx_dtype)

    def _scale(self) -> mx.array:
        scale = mx.ones(self.head_dim)
        if self.outliers:
            channels = mx.random.permutation(self.head_dim, key=mx.random.key(0))
            scale[channels[:OUTLIER_CHANNELS]] = OUTLIER_SCALE
        return scale


@dataclass(frozen=True, slots=True)
class Found:
    """One codec at one length. Errors are those of decoded elements, cosines those of rows.

    `ratio`: bytes of the cache in its own dtype to those of the packed rows. `record_bytes` has
    tokens and headers too. Times are medians where a length is run more than once; rates are
    full-precision bytes by the time. `peak_bytes`: what MLX held at most beside what it held
    before; for decoding that is the caches, and the packed rows of a few layers. Of a run in
    several `chunks` it is that of one.
    """

    codec: str
    dtype: str
    tokens: int
    bytes: int
    ratio: float
    ratio_float32: float
    mean_error: float
    max_error: float
    squared_error: float
    cosine: float
    encode_ms: float
    decode_ms: float
    encode_gb_per_second: float
    decode_gb_per_second: float
    peak_bytes: int
    record_bytes: int
    chunks: int


@dataclass(slots=True)
class _Sums:
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    record_bytes: int = 0
    peak_bytes: int = 0
    error: float = 0.0
    squared_error: float = 0.0
    max_error: float = 0.0
    cosine: float = 0.0


def measure(name: str, codec: CodecPlan, shape: Shape, tokens: int) -> Found:
    """Runs `tokens` rows of `shape` through `codec`; on the MLX thread."""
    # The first use of a kernel pays for its making.
    _chunk(codec, shape, range(min(tokens, RECORD_ROWS)), _Sums())
    step = max(1, CHUNK_BYTES // (shape.row_bytes * RECORD_ROWS)) * RECORD_ROWS
    chunks = [range(first, min(first + step, tokens)) for first in range(0, tokens, step)]
    repeats = max(1, min(RUNS_MAX, SHORT_TOKENS // tokens))
    runs = [_run(codec, shape, chunks) for _ in range(repeats)]
    sums = runs[0]
    encode_seconds = statistics.median(run.encode_seconds for run in runs)
    decode_seconds = statistics.median(run.decode_seconds for run in runs)
    elements = tokens * shape.row_elements
    full_bytes = tokens * shape.row_bytes
    packed_bytes = tokens * row_bytes(codec)
    return Found(
        codec=name,
        dtype=shape.dtype,
        tokens=tokens,
        bytes=packed_bytes,
        ratio=full_bytes / packed_bytes,
        ratio_float32=elements * _FLOAT32_BYTES / packed_bytes,
        mean_error=sums.error / elements,
        max_error=sums.max_error,
        squared_error=sums.squared_error / elements,
        cosine=sums.cosine / (elements // shape.head_dim),
        encode_ms=1e3 * encode_seconds,
        decode_ms=1e3 * decode_seconds,
        encode_gb_per_second=full_bytes / encode_seconds / 1e9,
        decode_gb_per_second=full_bytes / decode_seconds / 1e9,
        peak_bytes=sums.peak_bytes,
        record_bytes=sums.record_bytes,
        chunks=len(chunks),
    )


def _run(codec: CodecPlan, shape: Shape, chunks: Sequence[range]) -> _Sums:
    sums = _Sums()
    for chunk in chunks:
        _chunk(codec, shape, chunk, sums)
    return sums


def _chunk(codec: CodecPlan, shape: Shape, chunk: range, sums: _Sums) -> None:
    shelf = Shelf(always(codec), len(chunk))
    spans = [range(chunk.start + span.start, chunk.start + span.stop) for span in shelf.spans]
    for span in spans:
        layers = shape.rows(span)
        mx.eval(layers)
        with _Meter() as meter:
            shelf.put([((keys,), (values,)) for keys, values in layers])
        sums.encode_seconds += meter.seconds
        sums.peak_bytes = max(sums.peak_bytes, meter.peak_bytes)
    del layers
    sums.record_bytes += shelf.record_bytes
    with _Meter() as meter:
        caches = shelf.caches()
    sums.decode_seconds += meter.seconds
    sums.peak_bytes = max(sums.peak_bytes, meter.peak_bytes)
    for held, span in zip(shelf.spans, spans, strict=True):
        _compare(caches, held, shape.rows(span), sums)


def _compare(
    caches: Sequence[Any], held: range, originals: Sequence[Sequence[mx.array]], sums: _Sums
) -> None:
    """Adds the errors of rows `held` of the caches."""
    totals: Any = mx.zeros(3)
    largest: Any = mx.array(0.0)
    for cache, layer in zip(caches, originals, strict=True):
        for part, original in zip((cache.keys, cache.values), layer, strict=True):
            expected = original.astype(mx.float32)
            decoded = part[:, :, held.start : held.stop].astype(mx.float32)
            error = mx.abs(decoded - expected)
            lengths = mx.linalg.norm(decoded, axis=-1) * mx.linalg.norm(expected, axis=-1)
            cosines = (decoded * expected).sum(-1) / lengths
            totals += mx.stack([error.sum(), error.square().sum(), cosines.sum()])
            largest = mx.maximum(largest, error.max())
    mx.eval(totals, largest)
    error_sum, squared_sum, cosine_sum = totals.tolist()
    sums.error += error_sum
    sums.squared_error += squared_sum
    sums.cosine += cosine_sum
    sums.max_error = max(sums.max_error, largest.item())


class _Meter:
    """Time of a block, and the most that MLX held in it beyond what it held before."""

    def __enter__(self) -> "_Meter":
        mx.synchronize()
        self._held = mx.get_active_memory()
        mx.reset_peak_memory()
        self._begin = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        mx.synchronize()
        self.seconds = time.perf_counter() - self._begin
        self.peak_bytes = mx.get_peak_memory() - self._held
