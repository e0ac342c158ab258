"""Attention over packed rows against attention in full precision over the same rows dequantized,
written out in numpy."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.attention import (
    DEFAULTS,
    STRATEGIES,
    Call,
    Mask,
    PackedHistory,
    Strategy,
    attend,
)
from engine.kv.encoding import Affine
from engine.kv.rotation import Rotation
from engine.kvconfig import AFFINE_BITS, AFFINE_GROUP_SIZES

Numbers = np.ndarray[Any, np.dtype[np.float64]]

WIDTHS = (64, 96, 128, 256)
BATCH, COLUMNS, CAPACITY = 2, 13, 19
TOLERANCE = 1e-5
KEYS, VALUES = Affine(8, 64), Affine(4, 32)

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)


@dataclass(frozen=True)
class Layer:
    keys: Affine = KEYS
    values: Affine = VALUES
    key_width: int = 64
    value_width: int = 64
    kv_heads: int = 2
    repeats: int = 3
    length: int = 5
    dtype: mx.Dtype = mx.float32

    @property
    def heads(self) -> int:
        return self.kv_heads * self.repeats

    @property
    def scale(self) -> float:
        return float(self.key_width**-0.5)

    def queries(self) -> mx.array:
        # Laid out as models have them.
        shape = (BATCH, self.length, self.heads, self.key_width)
        return random(shape, 1, self.dtype).transpose(0, 2, 1, 3)

    def histories(self) -> tuple[PackedHistory, PackedHistory]:
        return (
            self._history(self.keys, self.key_width, 2),
            self._history(self.values, self.value_width, 3),
        )

    def _history(self, encoding: Affine, width: int, seed: int) -> PackedHistory:
        shape = (BATCH, self.kv_heads, CAPACITY, width)
        codes, scales, biases = encoding.encode(random(shape, seed, self.dtype))
        return PackedHistory((codes, scales, biases), encoding, COLUMNS)

    def call(self, mask: Mask = None, sinks: bool = False) -> Call:
        given_sinks = random((self.heads,), 4, self.dtype) if sinks else None
        return Call(self.queries(), *self.histories(), self.scale, mask, given_sinks)


def random(shape: tuple[int, ...], seed: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def numbers(array: mx.array) -> Numbers:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def dequantized(history: PackedHistory) -> Numbers:
    """(B, KV heads, columns, width), as the rows were before they were rotated."""
    encoding = history.encoding
    rows = mx.dequantize(*history, group_size=encoding.group_size, bits=encoding.bits)
    if encoding.rotation is not None:
        rows = encoding.rotation.undo(rows.astype(mx.float32))
    return numbers(rows)[:, :, : history.columns]


def full_precision(call: Call) -> Numbers:
    mask, sinks = call.mask, call.sinks
    asked, known, told = numbers(call.queries), dequantized(call.keys), dequantized(call.values)
    batch, heads, length, _ = asked.shape
    columns = known.shape[2]
    added = np.zeros((batch, heads, length, columns))
    if isinstance(mask, str):
        added += np.where(np.tri(length, columns, columns - length, dtype=bool), 0, -np.inf)
    elif mask is not None:
        plain = np.array(mask)
        if plain.ndim > 2 and plain.shape[-3] == call.keys.heads:
            plain = plain.repeat(heads // call.keys.heads, axis=-3)
        added += np.where(plain, 0, -np.inf) if plain.dtype == np.bool_ else plain
    attended = np.empty((batch, heads, length, told.shape[-1]))
    for head in range(heads):
        kv_head = head // (heads // call.keys.heads)
        for row in range(batch):
            scores = call.scale * asked[row, head] @ known[row, kv_head].T + added[row, head]
            weights = np.exp(scores)
            total = weights.sum(axis=-1, keepdims=True)
            if sinks is not None:
                total = total + np.exp(numbers(sinks)[head])
            attended[row, head] = weights / total @ told[row, kv_head]
    return attended


def error(layer: Layer, strategy: Strategy, mask: Mask = None, sinks: bool = False) -> float:
    """Largest distance from full precision."""
    call = layer.call(mask, sinks)
    found = attend(strategy, call)
    assert found.dtype == layer.dtype
    expected = full_precision(call)
    assert found.shape == expected.shape
    return float(np.abs(numbers(found) - expected).max())


# --- packings and masks ------------------------------------------------------------------------


@each_strategy
@pytest.mark.parametrize("bits", AFFINE_BITS)
@pytest.mark.parametrize(
    ("group_size", "width"),
    [(size, width) for size in AFFINE_GROUP_SIZES for width in WIDTHS if width % size == 0],
)
def test_every_packing(strategy: Strategy, bits: int, group_size: int, width: int) -> None:
    other = Affine(8 if bits != 8 else 4, 32)
    packing = Affine(bits, group_size)
    for layer in (
        Layer(packing, other, key_width=width, length=1),
        Layer(other, packing, value_width=width),
    ):
        assert error(layer, strategy) < TOLERANCE


# What a mask may have on each axis, of a layer of two KV heads and six query heads.
MASK_SHAPES = {
    "rank 1": (COLUMNS,),
    "one for all": (1, COLUMNS),
    "per query": (5, COLUMNS),
    "rank 3": (1, 5, COLUMNS),
    "per head": (6, 5, COLUMNS),
    "per KV head": (2, 5, COLUMNS),
    "per row": (BATCH, 1, 1, COLUMNS),
    "per row and query": (BATCH, 1, 5, COLUMNS),
    "per head, rank 4": (1, 6, 1, COLUMNS),
    "per row and KV head": (BATCH, 2, 5, COLUMNS),
    "each": (BATCH, 6, 5, COLUMNS),
    "whole queries": (BATCH, 6, 5, 1),
}


def boolean(shape: tuple[int, ...], seed: int = 0) -> mx.array:
    """Everybody sees something."""
    mask = np.random.default_rng(seed).random(shape) < 0.5
    mask[..., -1] = True
    return mx.array(mask)


def added(shape: tuple[int, ...], seed: int = 0) -> mx.array:
    """Some columns are hidden, and the others are worth more or less."""
    return mx.where(boolean(shape, seed), random(shape, seed), -mx.inf)


@each_strategy
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("make", [boolean, added])
@pytest.mark.parametrize("shape", MASK_SHAPES.values(), ids=MASK_SHAPES)
def test_every_mask(strategy: Strategy, shape: tuple[int, ...], make: Any, sinks: bool) -> None:
    assert error(Layer(), strategy, make(shape), sinks) < TOLERANCE


@each_strategy
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("mask", [None, "causal"])
def test_without_an_array(strategy: Strategy, mask: Mask, length: int, sinks: bool) -> None:
    assert error(Layer(length=length), strategy, mask, sinks) < TOLERANCE


rotations = st.sampled_from([None, Rotation(3)])


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    key_width, value_width = draw(st.sampled_from(WIDTHS)), draw(st.sampled_from(WIDTHS))

    def encoding(width: int) -> Affine:
        sizes = [size for size in AFFINE_GROUP_SIZES if width % size == 0]
        return Affine(
            draw(st.sampled_from(AFFINE_BITS)), draw(st.sampled_from(sizes)), draw(rotations)
        )

    return Layer(
        encoding(key_width),
        encoding(value_width),
        key_width,
        value_width,
        kv_heads=draw(st.integers(1, 3)),
        repeats=draw(st.sampled_from([1, 2, 4])),
        length=draw(st.sampled_from([1, 5])),
    )


@st.composite
def masks(draw: st.DrawFn, layer: Layer) -> Mask:
    kind: Mask | Callable[..., mx.array] = draw(st.sampled_from([None, "causal", boolean, added]))
    if not callable(kind):
        return kind
    whole = (BATCH, layer.heads, layer.length, COLUMNS)
    shape = [draw(st.sampled_from([1, size])) for size in whole[:3]] + [COLUMNS]
    return kind(tuple(shape[draw(st.integers(0, 2)) :]), draw(st.integers(0, 3)))


@settings(max_examples=150)
@given(st.data())
def test_any_layer_with_any_mask(data: st.DataObject) -> None:
    layer = data.draw(layers())
    mask, sinks = data.draw(masks(layer)), data.draw(st.booleans())
    for strategy in STRATEGIES.values():
        assert error(layer, strategy, mask, sinks) < TOLERANCE


# Rounding of 16-bit scores and outputs: of some of the last digit, where values are about 1.
@each_strategy
@pytest.mark.parametrize(("dtype", "bound"), [(mx.float16, 4e-3), (mx.bfloat16, 3e-2)])
@pytest.mark.parametrize("rotation", [None, Rotation(3)], ids=["", "rotated"])
def test_16_bits(
    strategy: Strategy, dtype: mx.Dtype, bound: float, rotation: Rotation | None
) -> None:
    encodings = Affine(8, 64, rotation), Affine(4, 32, rotation)
    for length in (1, 5):
        layer = Layer(*encodings, length=length, dtype=dtype)
        for mask in (None, "causal", boolean((COLUMNS,)), added((COLUMNS,))):
            assert 0 < error(layer, strategy, mask, sinks=True) < bound


@each_strategy
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_16_bits_lose_nothing_of_a_long_history(strategy: Strategy, dtype: mx.Dtype) -> None:
    """A mean of many values: the CPU's quantized_matmul adds up in the dtype that it is given,
    where small weights are lost beside a large sum."""
    columns = 2000
    rows = 2 + random((1, 1, columns, 64), 0, dtype)
    encoding = Affine(8, 64)
    codes, scales, biases = encoding.encode(rows)
    history = PackedHistory((codes, scales, biases), encoding, columns)
    for length in (1, 2):
        queries = mx.zeros((1, 1, length, 64), dtype)
        found = attend(strategy, Call(queries, history, history, 1.0))
        expected = dequantized(history)[:, :, : columns - length + 1].mean(axis=2, keepdims=True)
        assert np.abs(numbers(found) - expected).max() < 0.02


# --- what must not matter ----------------------------------------------------------------------


def replaced_beyond(history: PackedHistory, value: float) -> PackedHistory:
    """With these scales and biases where no rows are."""
    codes, *others = history
    for array in others:
        array[:, :, COLUMNS:] = value
    return PackedHistory((codes, others[0], others[1]), history.encoding, COLUMNS)


EACH_KIND: dict[str, Mask] = {
    "none": None,
    "causal": "causal",
    "boolean": boolean((BATCH, 1, 5, COLUMNS)),
    "added": added((BATCH, 1, 5, COLUMNS)),
    "whole queries": mx.ones((5, 1), mx.bool_),
}
each_kind = pytest.mark.parametrize("mask", EACH_KIND.values(), ids=EACH_KIND)


@each_strategy
@each_kind
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("beyond", [mx.nan, mx.inf, 1e30])
def test_nobody_sees_the_capacity(
    strategy: Strategy, mask: Mask, sinks: bool, beyond: float
) -> None:
    call = Layer().call(mask, sinks)
    expected = attend(strategy, call)
    mx.eval(expected)
    call = replace(call, keys=replaced_beyond(call.keys, beyond))
    if np.isfinite(beyond):
        call = replace(call, values=replaced_beyond(call.values, beyond))
    assert mx.array_equal(attend(strategy, call), expected)


@each_strategy
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_a_query_that_sees_nothing_gives_numbers(
    strategy: Strategy, dtype: mx.Dtype, sinks: bool
) -> None:
    call = Layer(dtype=dtype).call(sinks=sinks)
    call = replace(call, queries=30 * call.queries)
    hidden = mx.zeros((BATCH, 1, 5, COLUMNS), mx.bool_)
    for mask in (
        hidden,
        mx.where(hidden, 0, mx.array(-mx.inf)),
        mx.where(hidden, 0, mx.array(mx.finfo(dtype).min)),
    ):
        found = attend(strategy, replace(call, mask=mask))
        # A mean of values, or nothing where there is a sink.
        assert mx.abs(found).max() < 6


@each_strategy
@each_kind
@pytest.mark.parametrize("rotation", [None, Rotation(3)], ids=["", "rotated"])
def test_inputs_stay_as_they_are(strategy: Strategy, mask: Mask, rotation: Rotation | None) -> None:
    call = Layer(Affine(8, 64, rotation), Affine(4, 32, rotation)).call(mask, sinks=True)
    given = [call.queries, *call.keys, *call.values, call.sinks, mask]
    inputs = [array for array in given if isinstance(array, mx.array)]
    before = [np.array(array) for array in inputs]
    mx.eval(attend(strategy, call))
    for array, was in zip(inputs, before, strict=True):
        assert np.array_equal(np.array(array), was)


@each_strategy
@pytest.mark.parametrize("length", [1, 5])
def test_the_first_rows_of_a_larger_batch(strategy: Strategy, length: int) -> None:
    call = Layer(length=length).call()
    whole = attend(strategy, call)
    keys, values = (
        PackedHistory((codes[:1], scales[:1], biases[:1]), history.encoding, COLUMNS)
        for history in (call.keys, call.values)
        for codes, scales, biases in [history]
    )
    first = attend(strategy, replace(call, queries=call.queries[:1], keys=keys, values=values))
    assert mx.allclose(first, whole[:1], atol=1e-6).item()


@each_strategy
def test_the_answer_can_depend_on_the_first_row_alone(strategy: Strategy) -> None:
    """A long history in which one row is like the query."""
    rows = 0.1 * random((1, 2, 300, 64), 0)
    rows[:, :, 0] = 5.0
    history = PackedHistory(Affine(8, 64).encode(rows), Affine(8, 64), 300)
    found = attend(strategy, Call(mx.ones((1, 6, 1, 64)), history, history, 1.0))
    assert mx.allclose(found, mx.full(found.shape, 5.0), atol=1e-3).item()


def test_histories_of_different_lengths_are_an_error() -> None:
    call = Layer().call()
    codes, scales, biases = call.values
    shorter = PackedHistory((codes, scales, biases), call.values.encoding, COLUMNS - 1)
    with pytest.raises(AssertionError):
        replace(call, values=shorter)


def test_each_backend_has_a_default() -> None:
    assert set(DEFAULTS) == {"cpu", "metal", "cuda"}
    assert all(STRATEGIES[strategy.name] == strategy for strategy in DEFAULTS.values())
