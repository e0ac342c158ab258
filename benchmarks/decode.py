"""How fast a batch decodes over long histories, by how its caches hold them.

    python -m benchmarks.decode [--sizes 8x4096 2x32768] [--weights full 4bit] [--only NAME ...]

The model is of mlx-lm's own class and shaped like one of 8B parameters; weights and histories are
random numbers, put into the caches directly. Sequences are unequal, each three tokens shorter
than the one before, unless the name says "equal" or "no mask".

    KVCache, no mask      mlx-lm's, sequences of one length in one array
    BatchKVCache, mask    mlx-lm's
    full                  ours, in full precision
    8 bits, STRATEGY      ours, quantized, with one of engine.kv.attention.STRATEGIES

Before a quantized cache is measured, its attention is compared with numpy on this device, and a
decode step with one over the same rows dequantized. The first rows, "writes alone", say whether
writing a step's rows copies a cache. "peak" is what a step needs beyond what was held before it.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from benchmarks.measure import Columns, flags, mebibytes, progress, publish, record, seconds
from engine import backend

backend.prepare()

import mlx.core as mx  # noqa: E402
from mlx import nn  # noqa: E402

from benchmarks.histories import (  # noqa: E402
    Contender,
    Shape,
    Size,
    contenders,
    ours,
    random_model,
    row_bytes,
)
from engine.kv import routing  # noqa: E402
from engine.kv.attention_check import AttentionCheckFailed, Geometry, check  # noqa: E402
from engine.kv.columns import CAPACITY_SHARE_MAX  # noqa: E402
from engine.kv.encoding import Affine, Lossless  # noqa: E402
from engine.kv.history import FULL, Precision  # noqa: E402

SIZES = ("1x4096", "8x4096", "32x4096", "2x32768", "8x32768", "1x100000")
WEIGHTS = ("full", "4bit")
STEPS_WARM = 3
MASKED, UNMASKED = "BatchKVCache, mask", "KVCache, no mask"
# Of logits, relative: what is noise between two ways to compute the same. It is 0.013 for
# bfloat16 on a CPU; without the mask they are 0.2 off, with query heads mixed up 1.3.
NOISE = {mx.float32: 0.02, mx.float16: 0.03, mx.bfloat16: 0.06}
# What would leave less of the device's memory is not tried: CUDA may page instead of failing.
MEMORY_SHARE_MAX = 0.95


@dataclass(frozen=True, slots=True)
class Row:
    """`kv_bytes` are those of the rows themselves, `kv_allocated_bytes` those of their buffers.
    Ratios are tokens per second over those of mlx-lm's caches, same size and weights. A row that
    has no numbers says why in `note`."""

    contender: str
    weights: str
    batch: int
    context: int
    tokens_per_second: float | None = None
    of_masked: float | None = None
    of_unmasked: float | None = None
    step_seconds: float | None = None
    kv_bytes: int | None = None
    kv_allocated_bytes: int | None = None
    peak_bytes: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Dequantized(Lossless):
    """Rows in full precision that have been quantized: what packed ones must be equal to."""

    affine: Affine

    def encode(self, rows: mx.array) -> tuple[mx.array, ...]:
        return (self.affine.decode(self.affine.encode(rows)),)


def decode(model: Any, caches: list[Any], tokens: mx.array, steps: int) -> mx.array:
    """As the engine does: a step is computed while the tokens of the one before are read."""
    for _ in range(steps):
        following = mx.argmax(model(tokens[:, None], cache=caches)[:, -1], axis=-1)
        mx.async_eval(following)
        tokens.tolist()
        tokens = following
    mx.eval(tokens)
    mx.synchronize()
    return tokens


def timed(run: Callable[[], object]) -> tuple[float, int]:
    """Seconds, and the most memory beyond what was held before."""
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    began = time.perf_counter()
    run()
    return time.perf_counter() - began, mx.get_peak_memory() - before


def writes(shape: Shape, context: int, steps: int = 10) -> Iterator[Row]:
    """Whether the writes of a step are in place: one layer, eight sequences or seven of them."""
    size = Size(8, context)
    for precision, name in ((FULL, "full"), (Precision.affine(8), "8 bits")):
        for left in (8, 7):
            contender = Contender(f"writes alone, {name}", ours, precision)
            (cache,) = contender.caches(replace(shape, layers=1), size, 0)
            cache.filter(range(left))
            rows = mx.ones((left, shape.kv_heads, 1, shape.head_dim), shape.dtype)
            write(cache, rows, STEPS_WARM)
            took, peak = timed(partial(write, cache, rows, steps))
            copied = peak / cache.nbytes
            yield Row(
                contender.name + (", one left" if left < size.batch else ""),
                "none",
                left,
                context,
                step_seconds=took / steps,
                kv_bytes=row_bytes(shape, precision) * sum(cache.offset.tolist()),
                kv_allocated_bytes=cache.nbytes,
                peak_bytes=peak,
                note="in place" if copied < 0.1 else f"COPIES {copied:.0%} of the cache",
            )


def write(cache: Any, rows: mx.array, steps: int) -> None:
    for _ in range(steps):
        cache.update_and_fetch(rows, rows)
        mx.eval(cache.state[0])


def wrong(model: Any, shape: Shape, contender: Contender) -> str:
    """Why this contender is not to be measured on this device, if so."""
    if contender.strategy is None or contender.precision == FULL:
        return ""
    keys, values = contender.precision.keys, contender.precision.values
    assert isinstance(keys, Affine)
    assert isinstance(values, Affine)
    width = shape.head_dim
    geometry = Geometry(shape.heads, shape.kv_heads, width, width, shape.dtype, keys, values)
    try:
        check(contender.strategy, geometry)
    except AttentionCheckFailed as error:
        return f"WRONG: {error}"
    rounded = Precision(Dequantized(keys), Dequantized(values))
    try:
        found, expected = (
            logits(model, shape, one).astype(mx.float32)
            for one in (contender, replace(contender, precision=rounded, strategy=None))
        )
        off = float(mx.linalg.norm(found - expected) / mx.linalg.norm(expected))
    except Exception as error:  # of a kernel that this device does not have
        return f"WRONG: {type(error).__name__}: {error}"
    progress(f"{contender.name}: logits differ by {off:.2g} from a step over dequantized rows")
    if off < NOISE[shape.dtype]:
        return ""
    return f"WRONG: logits are {off:.2g} off those of a step over dequantized rows"


def logits(model: Any, shape: Shape, contender: Contender) -> mx.array:
    """Of a decode step over short histories through the first layer: noise grows with each."""
    caches = replace(contender, apart=15).caches(replace(shape, layers=1), Size(3, 48), 1)
    layers = model.model.layers
    model.model.layers = layers[:1]
    try:
        with routing.installed(contender.strategy):
            found: mx.array = model(mx.array([[3], [5], [7]]), cache=caches)
    finally:
        model.model.layers = layers
    return found


def measure(model: Any, shape: Shape, contender: Contender, size: Size, steps: int) -> Row:
    """Without its ratios and the kind of weights."""
    caches = contender.caches(shape, size, STEPS_WARM + steps)
    tokens = decode(model, caches, mx.arange(size.batch), STEPS_WARM)
    took, peak = timed(partial(decode, model, caches, tokens, steps))
    rows = sum(contender.lengths(size)) + size.batch * (STEPS_WARM + steps)
    return Row(
        contender.name,
        "",
        size.batch,
        size.context,
        tokens_per_second=size.batch * steps / took,
        step_seconds=took / steps,
        kv_bytes=shape.layers * row_bytes(shape, contender.precision) * rows,
        kv_allocated_bytes=sum(cache.nbytes for cache in caches),
        peak_bytes=peak,
    )


@dataclass(slots=True)
class Table:
    """Measures row by row, so that a run that is cut short leaves what it has."""

    options: argparse.Namespace
    title: str
    shape: Shape
    memory_bytes: int | None
    began: float = field(default_factory=time.monotonic)
    rows: list[Row] = field(default_factory=list)
    wrong: dict[str, str] = field(default_factory=dict)

    def check(self, model: Any) -> None:
        """Which contenders are wrong on this device, and why."""
        for one in contenders(self.options.only, self.options.sizes[0]):
            self.wrong[one.name] = wrong(model, self.shape, one)

    def add(self, row: Row) -> None:
        row = replace(
            row, of_masked=self._ratio(row, MASKED), of_unmasked=self._ratio(row, UNMASKED)
        )
        self.rows.append(row)
        print(" | ".join(show(row) for show in COLUMNS.values()), flush=True)
        record(self.options, self.title, self.rows)

    def _ratio(self, row: Row, name: str) -> float | None:
        for peer in (*self.rows, row):
            same = (peer.weights, peer.batch, peer.context) == (row.weights, row.batch, row.context)
            if same and peer.contender == name and peer.tokens_per_second:
                return row.tokens_per_second and row.tokens_per_second / peer.tokens_per_second
        return None

    def measure(self, model: Any, weights: str) -> None:
        for size in self.options.sizes:
            for one in contenders(self.options.only, size):
                none = Row(one.name, weights, size.batch, size.context)
                try:
                    why = self.wrong.get(one.name) or self._not_tried(one, size)
                    row = replace(none, note=why) if why else self._measured(model, one, size)
                except Exception as error:  # memory, or no such kernel: the others still can
                    row = replace(none, note=f"failed: {type(error).__name__}: {error}"[:300])
                mx.clear_cache()
                self.add(replace(row, weights=weights))

    def _measured(self, model: Any, one: Contender, size: Size) -> Row:
        with routing.installed(one.strategy):
            return measure(model, self.shape, one, size, self.options.steps)

    def _not_tried(self, one: Contender, size: Size) -> str:
        if self.options.seconds and time.monotonic() - self.began > self.options.seconds:
            return f"skipped: {self.options.seconds} s were over"
        needed = mx.get_active_memory() + kv_bytes_max(self.shape, one, size)
        if self.memory_bytes and needed > MEMORY_SHARE_MAX * self.memory_bytes:
            return f"skipped: needs {mebibytes(needed)} of {mebibytes(self.memory_bytes)}"
        return ""


def kv_bytes_max(shape: Shape, contender: Contender, size: Size) -> int:
    """What buffers may come to, and two layers in full precision for what is made of them."""
    spare = CAPACITY_SHARE_MAX if contender.make is ours else 1
    buffers = spare * shape.layers * row_bytes(shape, contender.precision)
    return int((buffers + 2 * row_bytes(shape, FULL)) * size.batch * size.context)


def _or_dash(value: Any, show: Callable[[Any], str]) -> str:
    return "-" if value is None else show(value)


COLUMNS: Columns = {
    "caches": lambda row: row.contender,
    "weights": lambda row: row.weights,
    "size": lambda row: f"{row.batch} x {row.context}",
    "tokens/s": lambda row: _or_dash(row.tokens_per_second, "{:.1f}".format),
    "of masked": lambda row: _or_dash(row.of_masked, "{:.2f}".format),
    "of no mask": lambda row: _or_dash(row.of_unmasked, "{:.2f}".format),
    "step": lambda row: _or_dash(row.step_seconds, seconds),
    "KV": lambda row: _or_dash(row.kv_bytes, mebibytes),
    "allocated": lambda row: _or_dash(row.kv_allocated_bytes, mebibytes),
    "peak": lambda row: _or_dash(row.peak_bytes, mebibytes),
    "note": lambda row: row.note,
}


def parsed() -> argparse.Namespace:
    parser = flags(__doc__)
    add = parser.add_argument
    add("--sizes", type=Size.parse, nargs="+", default=[Size.parse(size) for size in SIZES])
    add("--weights", choices=WEIGHTS, nargs="+", default=list(WEIGHTS))
    add("--only", nargs="+", default=[], metavar="NAME", help="caches whose name contains one")
    add("--steps", type=int, default=20, help="that are timed (20)")
    add("--seconds", type=float, help="what is not begun by then is skipped")
    add("--dtype", choices=("float32", "float16", "bfloat16"), help="float32 on a CPU")
    shape = Shape(mx.bfloat16)
    for name in ("layers", "hidden", "heads", "kv-heads", "head-dim", "intermediate", "vocabulary"):
        add(f"--{name}", type=int, default=getattr(shape, name.replace("-", "_")))
    options = parser.parse_args()
    if options.small:
        options.sizes, options.steps = [Size(2, 300), Size(1, 64)], 3
        options.layers, options.hidden, options.intermediate, options.vocabulary = 2, 128, 256, 288
        options.heads, options.kv_heads, options.head_dim = 4, 2, 64
    return options


def main() -> None:
    options = parsed()
    device = backend.describe()
    backend.apply_memory_limits(backend.memory_limits(device))
    dtype = options.dtype or ("float32" if device.name == "cpu" else "bfloat16")
    shape = Shape(
        getattr(mx, dtype),
        options.layers,
        options.hidden,
        options.heads,
        options.kv_heads,
        options.head_dim,
        options.intermediate,
        options.vocabulary,
    )
    tuned = [f"{name}={value}" for name, value in os.environ.items() if name.startswith("MLX_")]
    title = ", ".join(["decode", dtype, device.device_name, f"{options.steps} steps", *tuned])
    table = Table(options, title, shape, device.working_set_bytes)
    print(title, " | ".join(COLUMNS), sep="\n", flush=True)
    for row in writes(shape, options.sizes[0].context):
        table.add(row)
    progress("drawing weights")
    model = random_model(shape)
    table.check(model)
    for weights in sorted(options.weights, key=WEIGHTS.index):
        if weights == "4bit":
            nn.quantize(model, group_size=64, bits=4)
            mx.eval(model.parameters())
            mx.clear_cache()
        table.measure(model, dtype if weights == "full" else weights)
    publish(options, title, COLUMNS, table.rows)


if __name__ == "__main__":
    main()
