"""Packed histories reach our attention through mlx-lm's, and nothing else does."""

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import base, llama
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from engine.kv import routing
from engine.kv.attention import (
    Call,
    DequantizeLayer,
    Mask,
    PackedDecode,
    PackedHistory,
    PackedMatmul,
    attend,
)
from engine.kv.encoding import Affine
from engine.kv.rotation import Rotation
from tests.support.models import gemma3_config, qwen3_config, tiny_llama, tiny_model

OUTER, INNER = base.scaled_dot_product_attention, base.quantized_scaled_dot_product_attention

KEYS, VALUES = Affine(8, 64, Rotation(3)), Affine(4, 32)


@pytest.fixture(autouse=True)
def routed() -> Iterator[None]:
    routing.uninstall()  # what the engines of other tests have left
    with routing.installed(PackedMatmul()):
        yield
    assert base.scaled_dot_product_attention is llama.scaled_dot_product_attention is OUTER
    assert base.quantized_scaled_dot_product_attention is INNER


class Packed(KVCache):
    """All rows packed anew in each step, in buffers with room."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        super().update_and_fetch(keys, values)
        held: Any = (self.keys, self.values)
        return tuple(
            PackedHistory(encoding.encode(rows), encoding, self.offset)
            for encoding, rows in zip((KEYS, VALUES), held, strict=True)
        )


class Dequantized(KVCache):
    """The same rows for attention in full precision."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        rows = super().update_and_fetch(keys, values)
        return tuple(
            encoding.decode(encoding.encode(part))
            for encoding, part in zip((KEYS, VALUES), rows, strict=True)
        )


def histories(columns: int = 7) -> tuple[PackedHistory, PackedHistory]:
    rows = mx.random.normal((1, 2, 9, 64), key=mx.random.key(1))
    keys, values = (
        PackedHistory(encoding.encode(rows), encoding, columns) for encoding in (KEYS, VALUES)
    )
    return keys, values


def queries(length: int = 1) -> mx.array:
    return mx.random.normal((1, 4, length, 64), key=mx.random.key(2))


@pytest.mark.parametrize(
    ("model", "packed_layers"),
    [
        (tiny_llama(), (0, 1)),
        (tiny_model(qwen3_config()), (0, 1)),
        (tiny_model(gemma3_config(window=64)), (3,)),
    ],
    ids=["llama", "qwen3", "gemma3_text"],
)
def test_each_packed_layer_of_a_model_comes_here(
    model: Any, packed_layers: tuple[int, ...]
) -> None:
    def caches(kind: type[KVCache]) -> list[Any]:
        return [kind() if n in packed_layers else KVCache() for n in range(len(model.layers))]

    packed, expected = caches(Packed), caches(Dequantized)
    for tokens in ([5, 9, 200, 31, 7], [8], [77]):
        with routing.counted() as count:
            found = model(mx.array([tokens]), cache=packed)
        assert count.calls == len(packed_layers)
        assert mx.abs(found - model(mx.array([tokens]), cache=expected)).max() < 2e-4


@pytest.mark.parametrize("module", [base, llama])
def test_called_as_models_do(module: Any) -> None:
    keys, values = histories()
    cases: list[tuple[int, Mask]] = [(1, None), (5, "causal"), (5, mx.zeros((5, 7)))]
    for length, mask in cases:
        found = module.scaled_dot_product_attention(
            queries(length), keys, values, cache=None, scale=0.1, mask=mask
        )
        ours = attend(PackedMatmul(), Call(queries(length), keys, values, 0.1, mask))
        assert mx.array_equal(found, ours)


def test_sinks_come_here() -> None:
    keys, values = histories()
    sinks = mx.array([0.0, 1.0, 2.0, 3.0])
    for cache in (KVCache(), QuantizedKVCache()):
        found = base.scaled_dot_product_attention(
            queries(), keys, values, cache, 0.1, None, sinks=sinks
        )
        ours = attend(PackedMatmul(), Call(queries(), keys, values, 0.1, sinks=sinks))
        assert mx.array_equal(found, ours)


def test_the_inner_function_alone_comes_here() -> None:
    """For code that kept mlx-lm's outer function under a name that nobody can find."""
    keys, values = histories()
    with routing.counted() as count:
        found = OUTER(queries(), keys, values, QuantizedKVCache(), 0.1, None)
    assert count.calls == 1
    assert mx.array_equal(found, attend(PackedMatmul(), Call(queries(), keys, values, 0.1)))


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("mask", [None, "causal"])
def test_what_is_not_packed_is_mlx_lms(length: int, mask: Mask) -> None:
    for cache, heads in ((KVCache(), 4), (QuantizedKVCache(group_size=32, bits=4), 2)):
        rows = mx.random.normal((1, heads, 7, 64), key=mx.random.key(1))
        held = cache.update_and_fetch(rows, rows)
        given = [queries(length), *held, cache, 0.1, mask]
        with routing.counted() as count:
            found = llama.scaled_dot_product_attention(*given)
        assert count.calls == 0
        given[0] = queries(length)
        assert mx.array_equal(found, OUTER(*given))


def masks(heads: int, columns: int) -> dict[str, Mask]:
    """For two sequences, one query each."""
    place = mx.arange(columns)
    return {
        "none": None,
        "causal": "causal",
        "columns": place < 5,
        "columns of one query": (place < 5)[None],
        "sequences": place < mx.array([3, 6])[:, None, None, None],
        "sequences, added": mx.random.normal((2, 1, 1, columns), key=mx.random.key(5)),
        "heads": place < mx.arange(1, heads + 1)[:, None, None],
        "heads, added": mx.random.normal((2, heads, 1, columns), key=mx.random.key(6)),
    }


def single(
    heads: int, kv_heads: int, columns: int, value_width: int, dtype: mx.Dtype
) -> list[mx.array]:
    """Queries, keys and values of two sequences, as of a batch whose buffers have room."""
    asked = mx.random.normal((2, heads, 1, 64), dtype, key=mx.random.key(2))
    keys = mx.random.normal((2, kv_heads, columns + 9, 64), dtype, key=mx.random.key(3))
    values = mx.random.normal((2, kv_heads, columns + 9, value_width), dtype, key=mx.random.key(4))
    return [asked, keys[:, :, :columns], values[:, :, :columns]]


NOISE = {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}


@pytest.mark.parametrize("mask", masks(1, 1))
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 1), (6, 2), (6, 3), (6, 6), (32, 8)])
@pytest.mark.parametrize(("columns", "value_width"), [(7, 64), (7, 32), (300, 64)])
@pytest.mark.parametrize("dtype", NOISE)
@pytest.mark.parametrize("sinks", [False, True])
def test_single_queries_of_grouped_heads_are_as_mlx_lm_has_them(
    mask: str, heads: int, kv_heads: int, columns: int, value_width: int, dtype: Any, sinks: bool
) -> None:
    arrays = single(heads, kv_heads, columns, value_width, dtype)
    given = masks(heads, columns)[mask]
    if isinstance(given, mx.array) and given.dtype != mx.bool_:
        given = given.astype(dtype)
    sunk = mx.arange(float(heads)).astype(dtype) if sinks else None
    asked: list[Any] = [*arrays, KVCache(), 0.1, given, sunk]
    found, expected = llama.scaled_dot_product_attention(*asked), OUTER(*asked)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert mx.abs(found - expected).max() < NOISE[dtype]


@pytest.mark.parametrize(
    ("device", "shapes"),
    [("cpu", [(2, 2, 3, 64), (2, 6, 5, 64)]), ("gpu", [(2, 6, 1, 64), (2, 6, 5, 64)])],
)
def test_single_queries_of_a_kv_head_are_one_product_on_a_cpu_alone(
    monkeypatch: pytest.MonkeyPatch, device: str, shapes: list[tuple[int, ...]]
) -> None:
    asked_for: list[tuple[int, ...]] = []

    def seen(queries: mx.array, *given: Any) -> mx.array:
        asked_for.append(queries.shape)
        return OUTER(queries, *given)

    monkeypatch.setattr(routing, "_OUTER", seen)
    rows = mx.random.normal((2, 2, 7, 64))
    mx.eval(rows)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(getattr(mx.DeviceType, device)))
    for length in (1, 5):
        asked = mx.random.normal((2, 6, length, 64))
        llama.scaled_dot_product_attention(asked, rows, rows, KVCache(), 0.1, None)
    assert asked_for == shapes


@pytest.mark.parametrize(
    ("asked", "rows"),
    [
        ((0, 6, 1, 64), (0, 2, 7, 64)),  # nobody
        ((2, 6, 1, 0), (2, 2, 7, 0)),  # no width
        ((2, 6, 1, 64), (2, 4, 7, 64)),  # not groups
        ((6, 1, 64), (2, 7, 64)),  # no sequences
        ((6, 64), (7, 64)),
    ],
)
def test_odd_shapes_are_mlx_lms_to_refuse(asked: tuple[int, ...], rows: tuple[int, ...]) -> None:
    def answer(attention: Any) -> Any:
        try:
            found = attention(mx.ones(asked), mx.ones(rows), mx.ones(rows), None, 0.1, None)
        except ValueError as error:
            return str(error)
        return found.shape

    assert answer(llama.scaled_dot_product_attention) == answer(OUTER)


def test_mlx_lms_quantized_caches_still_refuse_sinks() -> None:
    cache = QuantizedKVCache()
    rows = mx.zeros((1, 2, 7, 64))
    keys, values = cache.update_and_fetch(rows, rows)
    with pytest.raises(ValueError, match="sinks"):
        base.scaled_dot_product_attention(
            queries(), keys, values, cache, 0.1, None, sinks=mx.zeros(4)
        )


def test_installing_again_changes_the_strategy_alone() -> None:
    first = base.scaled_dot_product_attention
    keys, values = histories()
    seen = []

    class Seen(PackedDecode):
        def attend(self, call: Call) -> mx.array:
            seen.append(call)
            return super().attend(call)

    with routing.installed(DequantizeLayer()), routing.installed(Seen()):
        routing.install(Seen())
        assert base.scaled_dot_product_attention is llama.scaled_dot_product_attention is first
        first(queries(), keys, values, None, 0.1, None)
    assert len(seen) == 1
    first(queries(), keys, values, None, 0.1, None)
    assert len(seen) == 1


def test_models_that_are_imported_later_are_led_here_and_back() -> None:
    name = "mlx_lm.models.helium"
    known = sys.modules.pop(name, None)
    try:
        helium: Any = importlib.import_module(name)
        assert helium.scaled_dot_product_attention is base.scaled_dot_product_attention is not OUTER
        routing.uninstall()
        assert helium.scaled_dot_product_attention is OUTER
    finally:
        sys.modules.pop(name)
        if known is not None:
            sys.modules[name] = known


def test_counts_are_of_their_own_block() -> None:
    keys, values = histories()
    with routing.counted() as all_calls:
        base.scaled_dot_product_attention(queries(), keys, values, None, 0.1, None)
        with routing.counted() as one:
            base.scaled_dot_product_attention(queries(), keys, values, None, 0.1, None)
    base.scaled_dot_product_attention(queries(), keys, values, None, 0.1, None)
    assert (all_calls.calls, one.calls) == (2, 1)
