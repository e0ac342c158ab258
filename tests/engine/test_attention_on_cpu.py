"""Attention over plain rows is mlx-lm's, in whichever shapes a CPU is asked for it."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import base, llama
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from engine.kv import on_cpu, routing
from engine.kv.attention import Mask, PackedMatmul
from engine.kv.history import FULL, BatchKVCache, JoiningKVCache
from engine.kv.on_cpu import BLOCK
from engine.kv.rotating import BatchWindowKVCache
from tests.support.models import tiny_llama

OUTER = base.scaled_dot_product_attention

NOISE = {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def routed() -> Iterator[None]:
    """To our attention, which takes any device for a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "default_device", lambda: mx.Device(mx.DeviceType.cpu))
        routing.uninstall()  # what the engines of other tests have left
        with routing.installed(PackedMatmul()):
            yield


def arrays(
    heads: int, kv_heads: int, queries: int, columns: int, value_width: int, dtype: mx.Dtype
) -> list[mx.array]:
    """Queries, keys and values of two sequences, as of a batch whose buffers have room."""
    asked = mx.random.normal((2, heads, queries, 64), dtype, key=mx.random.key(2))
    keys = mx.random.normal((2, kv_heads, columns + 9, 64), dtype, key=mx.random.key(3))
    values = mx.random.normal((2, kv_heads, columns + 9, value_width), dtype, key=mx.random.key(4))
    return [asked, keys[:, :, :columns], values[:, :, :columns]]


def assert_as_mlx_lm(asked: list[Any]) -> None:
    found, expected = llama.scaled_dot_product_attention(*asked), OUTER(*asked)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert mx.abs(found - expected).max() < NOISE[expected.dtype]


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], int]]:
    """What mlx-lm's function is asked for: the queries' shapes and how many columns."""
    seen = []

    def attention(queries: mx.array, keys: Any, *given: Any, **named: Any) -> mx.array:
        seen.append((queries.shape, keys.shape[2]))
        return OUTER(queries, keys, *given, **named)

    monkeypatch.setattr(routing, "_OUTER", attention)
    return seen


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


@pytest.mark.parametrize("mask", masks(1, 1))
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 1), (6, 2), (6, 3), (6, 6), (32, 8)])
@pytest.mark.parametrize(("columns", "value_width"), [(7, 64), (7, 32), (300, 64)])
@pytest.mark.parametrize("dtype", NOISE)
@pytest.mark.parametrize("sinks", [False, True])
def test_single_queries_of_grouped_heads(
    mask: str, heads: int, kv_heads: int, columns: int, value_width: int, dtype: Any, sinks: bool
) -> None:
    given = masks(heads, columns)[mask]
    if isinstance(given, mx.array) and given.dtype != mx.bool_:
        given = given.astype(dtype)
    sunk = mx.arange(float(heads)).astype(dtype) if sinks else None
    rows = arrays(heads, kv_heads, 1, columns, value_width, dtype)
    assert_as_mlx_lm([*rows, KVCache(), 0.1, given, sunk])


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 1), (6, 3), (6, 6)])
@pytest.mark.parametrize(
    ("queries", "columns"),
    [
        (BLOCK, BLOCK),
        (BLOCK + 1, BLOCK + 1),
        (2 * BLOCK, 2 * BLOCK),
        (100, 100),
        (100, 101),
        (100, 400),
        (100, 401),
        (100, 60),  # queries that see nothing: mlx-lm's numbers, whatever they are
    ],
)
@pytest.mark.parametrize("value_width", [64, 32])
@pytest.mark.parametrize("dtype", NOISE)
@pytest.mark.parametrize("sinks", [False, True])
def test_queries_under_a_causal_mask(
    heads: int,
    kv_heads: int,
    queries: int,
    columns: int,
    value_width: int,
    dtype: Any,
    sinks: bool,
) -> None:
    sunk = mx.arange(float(heads)).astype(dtype) if sinks else None
    rows = arrays(heads, kv_heads, queries, columns, value_width, dtype)
    assert_as_mlx_lm([*rows, KVCache(), 0.1, "causal", sunk])


def batch(ends: Sequence[int], count: int, kv_heads: int, dtype: mx.Dtype) -> list[Any]:
    """Keys, values and the cache after `count` more rows of sequences that had so many, and the
    cache as it was before them."""
    caches = []
    for seed, end in enumerate(ends):
        cache: Any = JoiningKVCache()
        if end:
            rows = mx.random.normal((1, kv_heads, end, 64), dtype, key=mx.random.key(seed))
            cache.update_and_fetch(rows, -rows)
        caches.append(cache)
    before, after = (BatchKVCache.merge(caches) for _ in "ab")
    rows = mx.random.normal((len(ends), kv_heads, count, 64), dtype, key=mx.random.key(9))
    return [*after.update_and_fetch(rows, -rows), after, before]


@pytest.mark.parametrize("ends", [[5], [3, 6, 4], [0, 40], [90, 200]])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("kind", ["bool", "added", "of heads"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 1), (6, 3), (6, 6)])
@pytest.mark.parametrize("dtype", NOISE)
def test_sequences_of_different_lengths(
    ends: list[int],
    window: int | None,
    kind: str,
    heads: int,
    kv_heads: int,
    dtype: Any,
    shapes: list[tuple[tuple[int, ...], int]],
) -> None:
    count = 75
    keys, values, cache, before = batch(ends, count, kv_heads, dtype)
    mask = before.make_mask(count, return_array=True, window_size=window)
    if kind != "bool":
        mask = mx.where(mask, mx.array(0, dtype), mx.finfo(dtype).min)
    if kind == "of heads":
        mask = mask + 0.1 * mx.random.normal(
            (heads, 1, mask.shape[-1]), dtype, key=mx.random.key(5)
        )
    asked = mx.random.normal((len(ends), heads, count, 64), dtype, key=mx.random.key(2))
    assert_as_mlx_lm([asked, keys, values, cache, 0.1, mask])
    before, grouping = max(ends), heads // kv_heads
    assert shapes == [
        ((len(ends), kv_heads, grouping * BLOCK, 64), before + BLOCK),
        ((len(ends), kv_heads, grouping * BLOCK, 64), before + 2 * BLOCK),
        ((len(ends), kv_heads, grouping * (count - 2 * BLOCK), 64), before + count),
    ]


@pytest.mark.parametrize("ends", [[0], [0, 0, 0], [40, 3, 0]])
def test_a_prompt_in_blocks_is_mlx_lms(
    ends: list[int], shapes: list[tuple[tuple[int, ...], int]]
) -> None:
    """Each sequence as in a run of its own, in caches of mlx-lm's; prompts padded on the right."""
    model = tiny_llama()
    tokens = mx.random.randint(0, 256, (len(ends), 200), key=mx.random.key(8))
    lengths = [100 - 9 * n for n in range(len(ends))]
    rows = [[JoiningKVCache.of(FULL) for _ in model.layers] for _ in ends]
    for n, end in enumerate(ends):
        if end:
            model(tokens[n : n + 1, :end], cache=rows[n])
    caches = [BatchKVCache.merge(of_layer) for of_layer in zip(*rows, strict=True)]
    for cache in caches:
        cache.prepare(lengths=lengths, right_padding=[100 - length for length in lengths])
    fed = [tokens[n, end : end + 100] for n, end in enumerate(ends)]
    shapes.clear()
    found = model(mx.stack(fed), cache=caches)
    assert max(ends) + BLOCK in {columns for _, columns in shapes}
    for n, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        with routing.installed(None):
            alone = [KVCache() for _ in model.layers]
            expected = model(tokens[n : n + 1, : end + length], cache=alone)
        assert mx.abs(found[n, :length] - expected[0, end:]).max() < 1e-4


@pytest.mark.parametrize("rest", [(1, 1), (75, 1), (1, 80), (80,)])
def test_masks_that_are_spread_over_queries_or_columns(
    rest: tuple[int, ...], shapes: list[tuple[tuple[int, ...], int]]
) -> None:
    keys, values, cache, _ = batch([5, 3], 75, 2, mx.float32)
    mask = mx.random.normal(rest, key=mx.random.key(4))
    asked = mx.random.normal((2, 6, 75, 64), key=mx.random.key(2))
    assert_as_mlx_lm([asked, keys, values, cache, 0.1, mask])
    assert shapes == [(asked.shape, 80)]


@pytest.mark.parametrize("held", ["some", "not ours"])
def test_masks_of_which_nothing_is_known(
    held: str, shapes: list[tuple[tuple[int, ...], int]]
) -> None:
    """Of rows that a model has chosen, and of a cache of mlx-lm's."""
    keys, values, cache, _ = batch([40, 9], 60, 2, mx.float32)
    if held == "some":
        keys, values = keys[:, :, 1:], values[:, :, 1:]
    else:
        cache = KVCache()
        cache.update_and_fetch(keys, values)
        assert cache.size() == keys.shape[2]
    columns = keys.shape[2]
    asked = mx.random.normal((2, 6, 60, 64), key=mx.random.key(2))
    mask = mx.random.uniform(shape=(2, 1, 60, columns), key=mx.random.key(4)) < 0.5
    assert_as_mlx_lm([asked, keys, values, cache, 0.1, mask])
    assert shapes == [(asked.shape, columns)]


@pytest.mark.parametrize("padding", [[0, 0], [40, 0]])
@pytest.mark.parametrize("before", [0, 60])
def test_columns_of_windows_are_in_an_order_of_their_own(
    padding: list[int], before: int, shapes: list[tuple[tuple[int, ...], int]]
) -> None:
    """Whose first row, that of a padded sequence too, is not in the first column."""
    cache = BatchWindowKVCache(FULL, padding, 100)
    rows = mx.random.normal((2, 2, 160, 64), key=mx.random.key(1))
    if before:
        cache.update_and_fetch(rows[:, :, :before], rows[:, :, :before])
    mask = cache.make_mask(100, return_array=True)
    keys, values = cache.update_and_fetch(rows[:, :, 60:], rows[:, :, 60:])
    asked = mx.random.normal((2, 6, 100, 64), key=mx.random.key(3))
    assert_as_mlx_lm([asked, keys, values, cache, 0.1, mask])
    assert shapes == [(asked.shape, before + 100)]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_only_a_cpu_is_asked_another_way(
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    shapes: list[tuple[tuple[int, ...], int]],
) -> None:
    rows = mx.random.normal((2, 2, 70, 64))
    mx.eval(rows)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(getattr(mx.DeviceType, device)))
    masks: list[tuple[int, Any]] = [(1, None), (40, None), (40, "causal"), (17, "causal")]
    for length, mask in masks:
        asked = mx.random.normal((2, 6, length, 64))
        llama.scaled_dot_product_attention(asked, rows, rows, KVCache(), 0.1, mask)
    single = [((2, 2, 3, 64), 70)] if device == "cpu" else [((2, 6, 1, 64), 70)]
    blocks = [((2, 2, 96, 64), 62), ((2, 2, 24, 64), 70)]
    causal = blocks if device == "cpu" else [((2, 6, 40, 64), 70)]
    assert shapes == [*single, ((2, 6, 40, 64), 70), *causal, ((2, 6, 17, 64), 70)]


@pytest.mark.parametrize(
    ("queries", "columns", "is_in_blocks"),
    [(100, 400, True), (100, 401, False), (BLOCK, BLOCK, False), (BLOCK + 1, BLOCK + 1, True)],
)
def test_blocks_are_asked_where_they_pay(
    queries: int, columns: int, is_in_blocks: bool, shapes: list[tuple[tuple[int, ...], int]]
) -> None:
    given: list[Any] = [*arrays(6, 2, queries, columns, 64, mx.float32), KVCache(), 0.1, "causal"]
    llama.scaled_dot_product_attention(*given)
    assert (shapes != [(given[0].shape, columns)]) is is_in_blocks


@pytest.mark.parametrize(
    ("asked", "rows"),
    [
        ((0, 6, 1, 64), (0, 2, 7, 64)),  # nobody
        ((2, 6, 1, 0), (2, 2, 7, 0)),  # no width
        ((2, 6, 1, 64), (2, 4, 7, 64)),  # not groups
        ((2, 6, 70, 64), (2, 4, 70, 64)),
        ((6, 1, 64), (2, 7, 64)),  # no sequences
        ((6, 70, 64), (2, 70, 64)),
        ((6, 64), (7, 64)),
    ],
)
@pytest.mark.parametrize("mask", [None, "causal", "other"])
def test_odd_shapes_are_mlx_lms_to_refuse(
    asked: tuple[int, ...], rows: tuple[int, ...], mask: str | None
) -> None:
    def answer(attention: Any) -> Any:
        try:
            found = attention(mx.ones(asked), mx.ones(rows), mx.ones(rows), None, 0.1, mask)
        except ValueError as error:
            return str(error)
        return found.shape

    assert answer(llama.scaled_dot_product_attention) == answer(OUTER)


@pytest.mark.parametrize(("queries", "mask"), [(1, None), (70, "causal")])
@pytest.mark.parametrize("values", [(2, 2, 71, 64), (2, 1, 70, 64)])
def test_values_that_are_not_the_keys_are_mlx_lms(
    queries: int, mask: Any, values: tuple[int, ...], shapes: list[tuple[tuple[int, ...], int]]
) -> None:
    asked, keys = mx.ones((2, 6, queries, 64)), mx.ones((2, 2, 70, 64))
    with contextlib.suppress(ValueError):
        llama.scaled_dot_product_attention(asked, keys, mx.ones(values), KVCache(), 0.1, mask)
    assert shapes == [(asked.shape, 70)]


def test_mlx_lms_quantized_rows_go_to_mlx_lm() -> None:
    cache = QuantizedKVCache(group_size=32, bits=4)
    rows = mx.random.normal((1, 2, 70, 64), key=mx.random.key(1))
    held: Any = cache.update_and_fetch(rows, rows)
    for length, mask in ((1, None), (70, "causal")):
        # mlx-lm scales these queries in place.
        asked, again = (mx.random.normal((1, 6, length, 64), key=mx.random.key(2)) for _ in "ab")
        given = [*held, cache, 0.1, mask]
        assert mx.array_equal(on_cpu.attend(OUTER, asked, *given), OUTER(again, *given))
