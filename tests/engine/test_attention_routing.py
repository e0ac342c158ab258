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
