"""Attention over packed rows: each strategy, beside MLX's fused attention over full precision.

    python -m benchmarks.packed_attention [--shape smollm2 8b] [--batch 1 8]
        [--history 300 1024 4096] [--queries 1 64] [--bits 8 4] [--dtype float32]
        [--strategy packed-matmul dequantize] [--runs 5]

One call of attention, as a layer makes it: behind a history, with room for a quarter more of it
in the packed buffers; one query is a decode step, several are a causal piece of a prompt. Full
precision gets the same rows, dequantized before and no longer than they are. `error` is the
largest distance from it in float32, which says that a strategy is right on this device. `peak`
is memory beyond what is held before the call. Calls are made in a chain, each of which has the
queries that the one before gave, as layers are.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.measure import Columns, flags, mebibytes, median, progress, publish, seconds
from engine import backend

backend.prepare()

import mlx.core as mx  # noqa: E402

from engine.kv.attention import STRATEGIES, Call, PackedHistory, Strategy, attend  # noqa: E402
from engine.kv.encoding import Affine  # noqa: E402

GROUP_SIZE = 64
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
# Calls in one chain: enough that a GPU is not measured waiting for its host.
CHAIN = {"cpu": 1, "metal": 16, "cuda": 16}
FULL_PRECISION = "full precision"


@dataclass(frozen=True, slots=True)
class Shape:
    heads: int
    kv_heads: int
    width: int


SHAPES = {"smollm2": Shape(9, 3, 64), "8b": Shape(32, 8, 128)}


@dataclass(frozen=True, slots=True)
class Layer:
    shape: str
    batch: int
    history_tokens: int
    queries: int
    bits: int


@dataclass(frozen=True, slots=True)
class Row:
    """`seconds`: median of a call. `ratio`: of full precision's time, in the same run."""

    layer: Layer
    dtype: str
    strategy: str
    seconds: float
    ratio: float
    error: float
    peak_bytes: int
    history_bytes: int


# From queries to what is attended.
Attention = Callable[[mx.array], mx.array]


def attentions(
    layer: Layer, dtype: mx.Dtype, strategies: list[str]
) -> tuple[dict[str, Attention], mx.array, int]:
    """Full precision and each strategy; queries in float32; bytes of the packed rows."""
    shape = SHAPES[layer.shape]
    columns = layer.history_tokens
    scale = shape.width**-0.5
    mask: Any = "causal" if layer.queries > 1 else None
    encoding = Affine(layer.bits, GROUP_SIZE)
    histories = []
    rows = []
    for _ in range(2):
        capacity = (layer.batch, shape.kv_heads, columns + columns // 4, shape.width)
        codes, scales, biases = encoding.encode(mx.random.normal(capacity).astype(dtype))
        histories.append(PackedHistory((codes, scales, biases), encoding, columns))
        rows.append(mx.contiguous(encoding.dequantize(histories[-1])[:, :, :columns]))
    queries = mx.random.normal((layer.batch, shape.heads, layer.queries, shape.width))
    mx.eval(histories, rows, queries)

    def full_precision(asked: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(asked, *rows, scale=scale, mask=mask)

    def packed(strategy: Strategy, asked: mx.array) -> mx.array:
        keys, values = histories
        return attend(strategy, Call(asked, keys, values, scale, mask))

    found: dict[str, Attention] = {FULL_PRECISION: full_precision}
    found |= {name: partial(packed, STRATEGIES[name]) for name in strategies}
    used = sum(array.nbytes for history in histories for array in history)
    return found, queries, used * columns // histories[0].capacity


def exact(attention: Attention, queries: mx.array) -> mx.array:
    """In float32 on the CPU: a GPU may round it."""
    with mx.stream(mx.cpu):
        found = attention(queries)
        mx.eval(found)
    return found


def measure_layer(
    layer: Layer, dtype: str, strategies: list[str], chain: int, runs: int
) -> Iterator[Row]:
    found, wide, history_bytes = attentions(layer, DTYPES[dtype], strategies)
    queries = wide.astype(DTYPES[dtype])
    expected = exact(found[FULL_PRECISION], queries.astype(mx.float32))
    errors, peaks = {}, {}
    # These calls also warm up: kernels are compiled on first use.
    for name, attention in found.items():
        given = attention(queries).astype(mx.float32)
        errors[name] = float(mx.abs(given - expected).max())
        peaks[name] = peak(attention, queries)
    times: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(runs):
        for name, attention in found.items():
            times[name].append(chained(attention, queries, chain))
    for name in found:
        taken = median(times[name])
        yield Row(
            layer,
            dtype,
            name,
            taken,
            taken / median(times[FULL_PRECISION]),
            errors[name],
            peaks[name],
            history_bytes,
        )


def peak(attention: Attention, queries: mx.array) -> int:
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(attention(queries))
    mx.synchronize()
    return int(mx.get_peak_memory() - before)


def chained(attention: Attention, queries: mx.array, calls: int) -> float:
    """Seconds of a call."""
    mx.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        queries = attention(queries)
    mx.eval(queries)
    mx.synchronize()
    return (time.perf_counter() - began) / calls


COLUMNS: Columns = {
    "shape": lambda row: row.layer.shape,
    "batch": lambda row: f"{row.layer.batch}",
    "history": lambda row: f"{row.layer.history_tokens}",
    "queries": lambda row: f"{row.layer.queries}",
    "bits": lambda row: f"{row.layer.bits}",
    "strategy": lambda row: row.strategy,
    "time": lambda row: seconds(row.seconds),
    "of full": lambda row: f"{row.ratio:.2f}",
    "error": lambda row: f"{row.error:.1e}",
    "peak": lambda row: mebibytes(row.peak_bytes),
    "packed rows": lambda row: mebibytes(row.history_bytes),
}


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--history", type=int, nargs="+", default=[300, 1024, 4096])
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4])
    parser.add_argument(
        "--strategy", nargs="+", choices=STRATEGIES, default=["packed-matmul", "dequantize"]
    )
    parser.add_argument("--dtype", choices=DTYPES, help="float32 on a CPU, else bfloat16")
    parser.add_argument("--runs", type=int, default=5, help="of which the median (5)")
    options = parser.parse_args()
    device = backend.describe()
    backend.apply_memory_limits(backend.memory_limits(device))
    if options.small:
        options.batch, options.history, options.queries, options.runs = [2], [300], [1, 5], 1
    dtype = options.dtype or ("float32" if device.name == "cpu" else "bfloat16")
    mx.random.seed(0)
    rows: list[Row] = []
    for layer in (
        Layer(shape, batch, history, queries, bits)
        for shape in options.shape
        for batch in options.batch
        for history in options.history
        for queries in options.queries
        for bits in options.bits
    ):
        progress(str(layer))
        rows += measure_layer(layer, dtype, options.strategy, CHAIN[device.name], options.runs)
    publish(options, f"{device.device_name}, {dtype}, groups of {GROUP_SIZE}", COLUMNS, rows)


if __name__ == "__main__":
    main()
