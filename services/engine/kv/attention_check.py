"""Whether a strategy of attention is right on this device: tried out before a model is served.

Kernels were found that are wrong without an error, on one backend, for one shape (only the first
of grouped query heads right; rows that do not start at column 0; heads of 64 in whole tiles). So
the engine attends to small packed histories as its batch will, and compares with numpy, at start.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import mlx.core as mx
import numpy as np

from engine.kv.attention import Call, PackedHistory, Strategy, attend
from engine.kv.encoding import Affine
from engine.kv.rotation import Rotation

log = logging.getLogger(__name__)

_Numbers = np.ndarray[Any, np.dtype[np.float32]]

# Values are about 1. GPUs multiply float32 with 10 bits of mantissa where they may; a wrong head
# or a mask that is not heeded is off by about 1.
_TOLERANCE: Final = {mx.float32: 0.02, mx.float16: 0.05, mx.bfloat16: 0.15}
_8_BITS: Final = Affine(8, 64)
_4_BITS: Final = Affine(4, 64)
# Some kernels take another way for longer histories, and some for whole tiles of columns, which
# long histories have (columns.py): there CUDA's product with keys of width 64 is wrong.
_COLUMNS_LONG: Final = 1100
_TILES: Final = 512
_QUERIES_MANY: Final = 64


class AttentionCheckFailed(RuntimeError):
    """A strategy gives wrong numbers on this device; says for what."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a layer is made of. Encodings need no rotation: with and without is checked."""

    heads: int = 6
    kv_heads: int = 2
    key_width: int = 64
    value_width: int = 64
    dtype: mx.Dtype = mx.float32
    keys: Affine = _8_BITS
    values: Affine = _4_BITS


@dataclass(frozen=True, slots=True)
class _Case:
    """`visible` is (B, 1, L, columns), and what the mask says if that is an array."""

    name: str
    call: Call
    visible: np.ndarray[Any, np.dtype[np.bool_]]

    def masked(self, name: str, visible: np.ndarray[Any, np.dtype[np.bool_]]) -> "_Case":
        return _Case(name, replace(self.call, mask=mx.array(visible)), visible)


def check(strategy: Strategy, geometry: Geometry | None = None) -> None:
    """On the MLX thread, in 0.1 s, or 0.5 s for an 8B shape on a CPU. Raises
    AttentionCheckFailed."""
    geometry = geometry or Geometry()
    for case in _cases(geometry):
        _check(strategy, case, _TOLERANCE[geometry.dtype])


def _check(strategy: Strategy, case: _Case, tolerance: float) -> None:
    call = case.call
    inputs = [call.queries, *call.keys, *call.values]
    inputs += [array for array in (call.mask, call.sinks) if isinstance(array, mx.array)]
    before = [_bytes(array) for array in inputs]
    expected = _reference(case)
    what = f"attention over packed rows by {strategy.name}, {case.name}"
    try:
        found = _numbers(attend(strategy, call))
    except Exception as error:  # not implemented on this backend, most likely
        raise AttentionCheckFailed(f"{what}: {type(error).__name__}: {error}") from error
    if [_bytes(array) for array in inputs] != before:
        raise AttentionCheckFailed(f"{what}: its inputs were changed")
    if found.shape != expected.shape:
        raise AttentionCheckFailed(f"{what}: shape {found.shape} instead of {expected.shape}")
    if not np.isfinite(found).all():
        raise AttentionCheckFailed(f"{what}: gives what is no number")
    seeing = case.visible.any(axis=-1, keepdims=True)
    wrong = (np.abs(found - expected) > tolerance) & seeing
    if wrong.any():
        rows, heads = (sorted(set(axis.tolist())) for axis in np.nonzero(wrong)[:2])
        largest = np.abs(found - expected)[wrong].max()
        raise AttentionCheckFailed(
            f"{what}: differs by {largest:.2g} (at most {tolerance} is noise) "
            f"in rows {rows} and heads {heads}"
        )


def first_right(strategies: Iterable[Strategy], geometries: Iterable[Geometry]) -> Strategy:
    """The first that gives right numbers for all of these; the others are logged, with what they
    do wrong. On the MLX thread. Raises AttentionCheckFailed, of the first one, when none does."""
    geometries = list(geometries)
    failures = []
    for strategy in strategies:
        try:
            for geometry in geometries:
                check(strategy, geometry)
        except AttentionCheckFailed as error:
            log.warning("not used, for it is wrong on this device: %s", error)
            failures.append(error)
        else:
            return strategy
    raise failures[0]


def _cases(geometry: Geometry) -> Iterator[_Case]:
    made = _Maker(geometry)
    for length, queries in ((1, "one query"), (5, "five queries")):
        grouped = made.case(f"grouped, {queries}", batch=2, columns=37, length=length)
        yield grouped
        sinks = mx.linspace(-1, 3, geometry.heads).astype(geometry.dtype)
        with_sinks = replace(grouped.call, sinks=sinks)
        yield _Case(f"sinks, {queries}", with_sinks, grouped.visible)
        yield made.case(f"a long history, {queries}", 1, _COLUMNS_LONG, length)
        yield made.case(f"whole tiles, {queries}", 2, _TILES - 10, length, _TILES)
        yield made.masked(f"unequal histories, {queries}", length)
        yield made.filtered(f"a filtered batch, {queries}", length)
    yield made.case("a chunk of a prompt", 1, _TILES - 10, _QUERIES_MANY, _TILES)
    for part, width in (("keys", geometry.key_width), ("values", geometry.value_width)):
        if Rotation.fits(width):
            made = made.rotated(part)
            yield made.case(f"rotated {part}", batch=2, columns=37)


class _Maker:
    """Cases of one geometry, from seeded random numbers."""

    def __init__(self, geometry: Geometry) -> None:
        self._of = geometry
        self._draw = np.random.default_rng(0)

    def rotated(self, part: str) -> "_Maker":
        turned: Any = {part: replace(getattr(self._of, part), rotation=Rotation(seed=7))}
        return _Maker(replace(self._of, **turned))

    def case(
        self, name: str, batch: int, columns: int, length: int = 1, capacity: int = 0
    ) -> _Case:
        """Queries that are the last of their histories, which begin at column 0. Without a capacity
        there are some columns more."""
        of = self._of
        capacity = capacity or columns + columns // 3
        # Of a prompt each query sees one column more than the one before.
        ends = np.arange(columns - length, columns)[:, None]
        visible = np.broadcast_to(np.arange(columns) <= ends, (batch, 1, length, columns))
        call = Call(
            self._rows(batch, of.heads, length, of.key_width),
            self._history(of.keys, of.key_width, batch, columns, capacity),
            self._history(of.values, of.value_width, batch, columns, capacity),
            scale=2 * of.key_width**-0.5,  # peaked: a wrong column is not lost in a mean
            mask="causal",
        )
        return _Case(name, call, visible)

    def masked(self, name: str, length: int) -> _Case:
        """Rows with padding before and after their histories, and one that sees nothing."""
        case = self.case(name, batch=4, columns=41, length=length)
        starts, ends = np.array([(0, 41), (30, 41), (0, 6), (0, 0)]).T[:, :, None, None, None]
        places = np.arange(41)
        visible = (starts <= places) & (places < ends) & case.visible
        return case.masked(name, visible)

    def filtered(self, name: str, length: int) -> _Case:
        """Rows 2 and 1 of a batch of four, in buffers that have one more row."""
        case = self.masked(name, length)

        def kept(array: mx.array) -> mx.array:
            return array[mx.array([2, 1, 0])][:2]

        def kept_of(history: PackedHistory) -> PackedHistory:
            codes, scales, biases = (kept(array) for array in history)
            return PackedHistory((codes, scales, biases), history.encoding, history.columns)

        call = replace(
            case.call,
            queries=kept(case.call.queries),
            keys=kept_of(case.call.keys),
            values=kept_of(case.call.values),
        )
        return _Case(name, call, case.visible).masked(name, case.visible[[2, 1]])

    def _history(
        self, encoding: Affine, width: int, batch: int, columns: int, capacity: int
    ) -> PackedHistory:
        # Sums that lose small numbers show where the numbers do not cancel out.
        rows = 1 + self._rows(batch, self._of.kv_heads, columns, width)
        # Whoever looks beyond the columns sees something large.
        beyond = 10 + self._rows(batch, self._of.kv_heads, capacity - columns, width)
        codes, scales, biases = encoding.encode(mx.concatenate([rows, beyond], axis=2))
        return PackedHistory((codes, scales, biases), encoding, columns)

    def _rows(self, *shape: int) -> mx.array:
        return mx.array(self._draw.normal(size=shape).astype(np.float32)).astype(self._of.dtype)


def _reference(case: _Case) -> _Numbers:
    """Written out in numpy, of the rows as they were before a rotation."""
    call = case.call
    queries = _numbers(call.queries)
    keys, values = (
        np.repeat(
            _numbers(history.encoding.decode(history))[:, :, : history.columns],
            queries.shape[1] // history.heads,
            axis=1,
        )
        for history in (call.keys, call.values)
    )
    scores = call.scale * queries @ keys.swapaxes(-1, -2)
    scores = np.where(case.visible, scores, np.finfo(np.float32).min)
    sinks = None if call.sinks is None else _numbers(call.sinks)[:, None, None]
    largest = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        largest = np.maximum(largest, sinks)
    weights = np.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks - largest)
    attended: _Numbers = weights / total @ values
    return attended


def _numbers(array: mx.array) -> _Numbers:
    return np.array(array.astype(mx.float32))


def _bytes(array: mx.array) -> bytes:
    return np.array(array if array.dtype != mx.bfloat16 else array.view(mx.uint16)).tobytes()
