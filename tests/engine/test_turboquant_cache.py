"""TurboQuantKVCache: mlx-lm's protocol for one request, over rows in TurboQuant's encoding."""

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

from engine.kv.turboquant import TURBO_BITS, TurboQuant, TurboQuantKVCache
from tests.support.models import tiny_llama


def rows(count: int, seed: int = 0, widths: tuple[int, int] = (64, 64)) -> list[mx.array]:
    keys = [mx.random.key(2 * seed), mx.random.key(2 * seed + 1)]
    return [
        mx.random.normal((1, 2, count, width), key=key)
        for width, key in zip(widths, keys, strict=True)
    ]


def same(a: tuple[mx.array, ...], b: tuple[mx.array, ...]) -> bool:
    return all(bool(mx.array_equal(x, y)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("bits", TURBO_BITS)
def test_rows_are_encoded_once_however_they_arrive(bits: int) -> None:
    keys, values = rows(600, widths=(64, 128))
    cache = TurboQuantKVCache(bits)
    position = 0
    for count in (3, 250, 3, 1, 1, 342):
        piece = slice(position, position + count)
        held = cache.update_and_fetch(keys[:, :, piece], values[:, :, piece])
        position += count
        assert cache.size() == cache.offset == position == held[0].shape[2]
    encoding = TurboQuant(bits, "float32")
    expected = [encoding.decode(encoding.encode(of)) for of in (keys, values)]
    for part, exact in zip(cache.dequantize(), expected, strict=True):
        assert mx.allclose(part, exact, rtol=0, atol=1e-5)
    # Capacity comes in steps of 256, and no growth leaves more than one of them unused.
    assert cache.nbytes <= 1.43 * 2 * 600 * ((64 + 128) * bits // 8 + 4)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_rows_come_back_in_their_dtype(dtype: mx.Dtype) -> None:
    cache = TurboQuantKVCache(3)
    keys, values = (of.astype(dtype) for of in rows(5))
    assert [part.dtype for part in cache.update_and_fetch(keys, values)] == [dtype, dtype]


def test_a_copy_shares_no_mutable_state() -> None:
    cache = TurboQuantKVCache(3)
    cache.update_and_fetch(*rows(5))
    copied = cache.copy()
    before = copied.dequantize()
    mx.eval(before)
    cache.trim(3)
    cache.update_and_fetch(*rows(4, seed=1))
    assert (cache.offset, copied.offset) == (6, 5)
    assert same(copied.dequantize(), before)
    held = cache.dequantize()
    mx.eval(held)
    copied.update_and_fetch(*rows(9, seed=2))
    assert same(cache.dequantize(), held)
    assert TurboQuantKVCache(3).copy().empty()


def test_state_makes_the_same_cache_again() -> None:
    cache = TurboQuantKVCache(2, seed=5)
    cache.update_and_fetch(*(of.astype(mx.bfloat16) for of in rows(7)))
    again = TurboQuantKVCache.from_state(cache.state)
    assert (again.offset, again.encoding) == (7, TurboQuant(2, "bfloat16", 5))
    assert same(again.dequantize(), cache.dequantize())
    assert TurboQuantKVCache.from_state(TurboQuantKVCache(4).state).empty()


def test_trimmed_rows_are_replaced() -> None:
    cache = TurboQuantKVCache(4)
    assert cache.empty()
    assert cache.nbytes == 0
    first, other = rows(10), rows(4, seed=1)
    cache.update_and_fetch(*first)
    assert cache.is_trimmable()
    assert (cache.trim(4), cache.offset) == (4, 6)
    held = cache.update_and_fetch(*other)
    expected = TurboQuantKVCache(4).update_and_fetch(
        *(mx.concatenate([a[:, :, :6], b], axis=2) for a, b in zip(first, other, strict=True))
    )
    assert same(held, expected)
    assert (cache.trim(99), cache.size()) == (10, 0)


def test_masks_are_those_of_a_plain_cache() -> None:
    both: list[Any] = [TurboQuantKVCache(4), KVCache()]
    for each in both:
        each.update_and_fetch(*rows(6))
    for asked in ({"return_array": False}, {"return_array": True}, {"return_array": True, "w": 3}):
        arguments: dict[str, Any] = {"return_array": asked["return_array"]}
        arguments["window_size"] = asked.get("w")
        for length in (1, 4):
            made, expected = (each.make_mask(length, **arguments) for each in both)
            if isinstance(expected, mx.array):
                assert mx.array_equal(made, expected)
            else:
                assert made == expected


class Lossy(KVCache):
    """mlx-lm's cache of rows that went through the encoding one piece at a time."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        encoding = TurboQuant(4, "float32")
        return super().update_and_fetch(
            *(encoding.decode(encoding.encode(of)) for of in (keys, values))
        )


def test_a_model_runs_on_it() -> None:
    model = tiny_llama(head_dim=64)
    tokens = mx.array([[(7 * n) % 256 for n in range(40)]])
    layers = len(make_prompt_cache(model))
    expecting: list[Any] = [Lossy() for _ in range(layers)]
    caches = [TurboQuantKVCache(4) for _ in range(layers)]
    for piece in (slice(0, 30), slice(30, 37), slice(37, 38), slice(38, 39)):
        expected, got = (model(tokens[:, piece], cache=of) for of in (expecting, caches))
        assert mx.abs(got - expected).max() < 1e-3


def test_what_it_cannot_hold_is_said_at_once() -> None:
    for bits in (0, 5, 8):
        with pytest.raises(ValueError, match=r"use one of \(1, 2, 3, 4\)"):
            TurboQuantKVCache(bits)
    for widths in ((72, 64), (64, 72)):
        cache = TurboQuantKVCache(4)
        with pytest.raises(ValueError, match="Hadamard transform, and width 72 has none"):
            cache.update_and_fetch(*rows(3, widths=widths))
        assert cache.empty()
    with pytest.raises(ValueError, match="empty"):
        TurboQuantKVCache(4).dequantize()
