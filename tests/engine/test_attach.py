"""Rows from live caches through records and back, with bytearrays standing for slabs."""

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

from cachestore.record import TOKEN_BYTES
from engine import attach, pack
from engine.attach import Source
from engine.kv.codec import CodecPlan, CodecPolicy
from engine.kv.encoding import Affine, PartShape
from engine.kv.history import Precision, QuantizedKVCache
from engine.kv.kinds import PlainKV
from engine.kv.layout import CacheLayout, LayerGroup, probe
from engine.kv.live import LiveCaches
from engine.kv.rotation import Rotation
from tests.support.caches import (
    Layer,
    complete,
    layout,
    packed,
    random_layers,
    sliced,
    spans,
    store,
)
from tests.support.models import tiny_llama

# (groups, heads, dtype)
GEOMETRIES = [
    (((3, 64, 64),), 1, "float32"),
    (((1, 64, 64),), 1, "float32"),
    (((2, 64, 32),), 2, "bfloat16"),
    (((2, 96, 64), (1, 64, 128)), 3, "float16"),
    (((2, 80, 64),), 3, "bfloat16"),
]
geometries = pytest.mark.parametrize(
    "geometry", [layout(*groups, heads=heads, dtype=dtype) for groups, heads, dtype in GEOMETRIES]
)


@pytest.fixture(scope="module")
def helper() -> Iterator[ThreadPoolExecutor]:
    """A thread that is not the one of MLX."""
    with ThreadPoolExecutor(1) as executor:
        yield executor


def random_cuts(rows: int, seed: int) -> list[int]:
    chosen = random.Random(seed)
    return [*sorted(chosen.sample(range(1, rows), min(4, rows - 1))), rows]


def assert_holds(caches: Sequence[KVCache], expected: Sequence[Layer]) -> None:
    """Bit for bit, and not a row more."""
    for cache, layer in zip(caches, expected, strict=True):
        assert isinstance(cache, KVCache)
        keys, values, offset = cache.state
        assert offset == layer[0].shape[2]
        for found, rows in zip((keys, values), layer, strict=True):
            assert (found.shape, found.dtype) == (rows.shape, rows.dtype)
            assert bits(found) == bits(rows)


def bits(array: mx.array) -> bytes:
    return bytes(memoryview(mx.contiguous(array)).cast("B"))  # type: ignore[arg-type]


def through_codec(codec: CodecPlan, layers: Sequence[Layer]) -> list[Layer]:
    """What MLX itself makes of each layer's rows."""
    encodings = {
        (layer, part.shape.name): part.encoding
        for part in codec.parts
        for layer in part.group.layers
    }

    def one(encoding: object, rows: mx.array) -> mx.array:
        if not isinstance(encoding, Affine):
            return rows
        group_size, bits = encoding.group_size, encoding.bits
        codes, scales, biases = mx.quantize(rows, group_size=group_size, bits=bits)
        return mx.dequantize(codes, scales, biases, group_size=group_size, bits=bits)

    return [
        (one(encodings[layer, "keys"], keys), one(encodings[layer, "values"], values))
        for layer, (keys, values) in enumerate(layers)
    ]


@geometries
@pytest.mark.parametrize("name", ["none", "q8", "q4"])
@pytest.mark.parametrize("seed", range(4))
def test_round_trip(
    geometry: CacheLayout, name: str, seed: int, helper: ThreadPoolExecutor
) -> None:
    policy = CodecPolicy.of(geometry, name)
    layers = random_layers(geometry, rows=50, seed=seed)
    records = store(packed(policy.codec, layers), random_cuts(50, seed), helper)
    for stop in (1, 17, 49, 50):
        attachment = attach.plan(policy, spans(records, stop))
        assert attachment.rows == stop
        expected = through_codec(policy.codec, sliced(layers, 0, stop))
        assert_holds(complete(attachment, helper), expected)


@geometries
@pytest.mark.parametrize("seed", range(4))
def test_spans_begin_inside_records(
    geometry: CacheLayout, seed: int, helper: ThreadPoolExecutor
) -> None:
    """A path through records that were cut and committed at different places."""
    policy = CodecPolicy.of(geometry, "q8")
    layers = random_layers(geometry, rows=60, seed=seed)
    every = packed(policy.codec, layers)
    one = store(every, random_cuts(60, seed), helper)
    other = store(every, random_cuts(60, seed + 100), helper)
    chosen = random.Random(seed)
    sources: list[Source] = []
    position = 0
    while position < 60:
        stored = next(
            stored
            for stored in chosen.choice((one, other))
            if stored.first_token <= position < stored.first_token + stored.rows
        )
        first = position - stored.first_token
        rows = chosen.randint(1, stored.rows - first)
        sources.append(stored.source(first, rows))
        position += rows
    caches = complete(attach.plan(policy, sources), helper)
    assert_holds(caches, through_codec(policy.codec, layers))


@geometries
def test_codecs_may_change_along_a_path(geometry: CacheLayout, helper: ThreadPoolExecutor) -> None:
    policy = CodecPolicy.of(geometry, "q8")
    layers = random_layers(geometry, rows=40)
    records = [
        *store(packed(policy.lossless, sliced(layers, 0, 10)), [6, 10], helper),
        *store(packed(policy.codec, sliced(layers, 10, 30), 10), [16, 30], helper),
        *store(packed(policy.lossless, sliced(layers, 30, 40), 30), [40], helper),
    ]
    encoded = through_codec(policy.codec, sliced(layers, 10, 30))
    pieces = zip(sliced(layers, 0, 10), encoded, sliced(layers, 30, 40), strict=True)
    expected = [
        (
            mx.concatenate([keys for keys, _ in layer], axis=2),
            mx.concatenate([values for _, values in layer], axis=2),
        )
        for layer in pieces
    ]
    assert_holds(complete(attach.plan(policy, spans(records, 40)), helper), expected)


@geometries
def test_blocks_may_be_small_and_in_any_order(
    geometry: CacheLayout, helper: ThreadPoolExecutor
) -> None:
    policy = CodecPolicy.of(geometry, "q8")
    layers = random_layers(geometry, rows=20)
    records = store(packed(policy.codec, layers), [8, 20], helper)
    attachment = attach.plan(policy, spans(records, 19), block_bytes=1)
    assert len(attachment.blocks) == geometry.layers
    for block in attachment.blocks:
        block.allocate()
    for block in reversed(attachment.blocks):
        helper.submit(block.copy).result()
        block.decode()
    expected = through_codec(policy.codec, sliced(layers, 0, 19))
    assert attachment.nbytes == sum(part.nbytes for layer in expected for part in layer)
    assert_holds(attachment.caches(), expected)


@pytest.mark.parametrize(("codec", "blocks"), [("none", 2), ("q8", 7)])
def test_blocks_are_larger_where_nothing_is_decoded(
    codec: str, blocks: int, helper: ThreadPoolExecutor
) -> None:
    geometry = layout((7, 64, 64), heads=2)
    policy = CodecPolicy.of(geometry, codec)
    layers = random_layers(geometry, rows=20)
    records = store(packed(policy.codec, layers), [20], helper)
    of_layer = sum(part.nbytes for part in layers[0])
    attachment = attach.plan(policy, spans(records, 20), block_bytes=of_layer)
    assert len(attachment.blocks) == blocks
    assert_holds(complete(attachment, helper), through_codec(policy.codec, layers))


@pytest.mark.parametrize("piece_bytes", [1, attach.PIECE_BYTES])
def test_threads_share_a_block(
    piece_bytes: int, helper: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "PIECE_BYTES", piece_bytes)
    geometry = layout((2, 64, 64), heads=2)
    policy = CodecPolicy.of(geometry, "none")
    layers = random_layers(geometry, rows=60)
    records = store(packed(policy.codec, layers), range(1, 61), helper)
    attachment = attach.plan(policy, spans(records, 60))
    (block,) = attachment.blocks
    block.allocate()
    with ThreadPoolExecutor(4) as helpers:
        shares = [helpers.submit(block.copy) for _ in range(4)]
    assert sum(share.result() for share in shares) == block.nbytes
    block.decode()
    assert_holds(attachment.caches(), layers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_lossless_is_bit_for_bit(dtype: str, helper: ThreadPoolExecutor) -> None:
    geometry = layout((2, 8, 8), heads=1, dtype=dtype)
    policy = CodecPolicy.of(geometry, "none")
    extremes = [1e5, 1e-30, -1e5, -0.0, float("inf"), float("nan"), 1e-45, 3.3895e38]
    rows = mx.broadcast_to(mx.array(extremes), (1, 1, 5, 8)).astype(
        geometry.groups[0].parts[0].mlx_dtype
    )
    layers = [(rows, rows), (rows, rows)]
    records = store(packed(policy.codec, layers), [2, 5], helper)
    assert_holds(complete(attach.plan(policy, spans(records, 5)), helper), layers)


# The largest value of each dtype's own that is asked for, and the least.
EXTREMES = {"float32": (1e5, 1e-30), "bfloat16": (1e5, 1e-30), "float16": (6e4, 6e-8)}


@pytest.mark.parametrize("rotation", [None, Rotation(1)], ids=["plain", "rotated"])
@pytest.mark.parametrize("dtype", EXTREMES)
def test_what_a_live_cache_made_of_extremes_is_bit_for_bit(
    dtype: str, rotation: Rotation | None, helper: ThreadPoolExecutor
) -> None:
    precision = Precision.affine((8, 4), 64, rotation)
    shapes = [
        PartShape(name, 1, 64, dtype, encoding)
        for name, encoding in (("keys", precision.keys), ("values", precision.values))
    ]
    policy = CodecPolicy.of(CacheLayout((LayerGroup(PlainKV(*shapes), (0,)),)), "none")
    signs = mx.where(mx.arange(5 * 64) % 3 == 0, -1, 1).reshape(1, 1, 5, 64)
    large, small = (signs * mx.full((1, 1, 5, 64), value) for value in EXTREMES[dtype])
    live = QuantizedKVCache.of(precision)
    for rows in (large, small, mx.where(signs > 0, large, small)):
        live.update_and_fetch(*[rows.astype(shapes[0].mlx_dtype)] * 2)
    records = store(pack.pack(policy.codec, [live.rows(0, 0, 15)], range(15)), [4, 15], helper)
    (restored,) = complete(attach.plan(policy, spans(records, 15)), helper)
    assert restored.precision == precision
    for part, expected in zip(restored.rows(0, 0, 15), live.rows(0, 0, 15), strict=True):
        assert [array.dtype for array in part] == [mx.uint32, *[shapes[0].mlx_dtype] * 2]
        assert [bits(array) for array in part] == [bits(array) for array in expected]


@pytest.mark.parametrize("name", ["none", "q8", "q4"])
def test_rows_outside_the_match_never_show(name: str, helper: ThreadPoolExecutor) -> None:
    geometry = layout((2, 64, 64), dtype="bfloat16")
    policy = CodecPolicy.of(geometry, name)
    poison = mx.where(mx.arange(30)[:, None] < 20, 0, mx.nan).astype(mx.bfloat16)
    layers = [(keys + poison, values + poison) for keys, values in random_layers(geometry, rows=30)]
    records = store(packed(policy.codec, layers), [12, 30], helper)
    caches = complete(attach.plan(policy, spans(records, 20)), helper)
    assert_holds(caches, through_codec(policy.codec, sliced(layers, 0, 20)))
    for cache in caches:
        assert mx.isfinite(cache.keys).all()
        assert mx.isfinite(cache.values).all()


@pytest.mark.parametrize("name", ["none", "q8", "q4"])
@geometries
def test_packed_rows_do_not_follow_the_live_cache(
    geometry: CacheLayout, name: str, helper: ThreadPoolExecutor
) -> None:
    """Slices that begin at row 0 of a single head are contiguous: nothing forces a copy."""
    policy = CodecPolicy.of(geometry, name)
    live = []
    for keys, values in random_layers(geometry, rows=30):
        cache: Any = KVCache()
        cache.update_and_fetch(keys, values)
        live.append(cache)
    expected = [(mx.array(cache.keys), mx.array(cache.values)) for cache in live]
    mx.eval(expected)
    taken = packed(policy.codec, sliced([(c.keys, c.values) for c in live], 0, 256))
    for cache in live:
        for part in (cache.keys, cache.values):
            part[...] = mx.zeros_like(part)
            mx.eval(part)
    records = store(taken, [256], helper)
    caches = complete(attach.plan(policy, spans(records, 256)), helper)
    assert_holds(caches, through_codec(policy.codec, expected))


def test_packing_a_row_does_not_depend_on_its_neighbours() -> None:
    geometry = layout((3, 64, 96), heads=2, dtype="float16")
    codec = CodecPolicy.of(geometry, "q8").codec
    layers = random_layers(geometry, rows=40)
    whole = packed(codec, layers)
    for start, stop in ((0, 1), (7, 8), (5, 33), (39, 40)):
        part = packed(codec, sliced(layers, start, stop), start)
        assert (part.first_token, part.rows) == (start, stop - start)
        for some, all_rows in zip(part.arrays, whole.arrays, strict=True):
            assert np.array_equal(some, all_rows[:, :, start:stop])


def test_only_the_packed_copy_remains() -> None:
    geometry = layout((8, 64, 64), heads=4)
    codec = CodecPolicy.of(geometry, "q8").codec
    layers = random_layers(geometry, rows=2000)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    taken = packed(codec, sliced(layers, 100, 1900), 100)
    keys_bytes = 8 * 4 * 1800 * 64 * 4
    assert mx.get_peak_memory() - before < 1.01 * (keys_bytes + taken.nbytes)
    assert taken.nbytes == 1800 * (codec.row_bytes - TOKEN_BYTES)
    assert mx.get_active_memory() - before < 1.01 * taken.nbytes + 10_000
    del taken
    assert mx.get_active_memory() - before < 10_000


def test_decoding_holds_the_packed_rows_of_one_block_at_most(helper: ThreadPoolExecutor) -> None:
    geometry = layout((8, 64, 64), heads=4)
    policy = CodecPolicy.of(geometry, "q8")
    layers = random_layers(geometry, rows=1000)
    records = store(packed(policy.codec, layers), [1000], helper)
    del layers
    before = mx.get_active_memory()
    attachment = attach.plan(policy, spans(records, 1000), block_bytes=1)
    mx.reset_peak_memory()
    caches = complete(attachment, helper)
    assert mx.get_active_memory() - before < 1.01 * attachment.nbytes
    assert mx.get_peak_memory() - before < 1.4 * attachment.nbytes
    assert sum(cache.nbytes for cache in caches) == attachment.nbytes


RECORD_ROWS = 8
SAME_CUTS, OTHER_CUTS = 1e-5, 2e-4


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (4, 2), (3, 3)])
@pytest.mark.parametrize("name", ["none", "q8", "q4"])
def test_a_hit_equals_a_miss(
    name: str, heads: int, kv_heads: int, helper: ThreadPoolExecutor
) -> None:
    """At every offset: the rest behind attached rows gives the logits that it gives behind the
    same rows in mlx-lm's own cache, and, without a codec, those of prefilling everything."""
    model = tiny_llama(heads=heads, kv_heads=kv_heads, layers=3)
    policy = CodecPolicy.of(probe(LiveCaches(model)), name, min_quantize_tokens=0)
    tokens = mx.random.randint(0, 250, (1, 3 * RECORD_ROWS + 2), key=mx.random.key(7))
    length = tokens.shape[1]
    cold = make_prompt_cache(model)
    cold_logits = model(tokens, cache=cold)
    layers = sliced([(cache.keys, cache.values) for cache in cold], 0, length)
    cuts = [*range(RECORD_ROWS, length, RECORD_ROWS), length]
    records = store(packed(policy.codec, layers), cuts, helper)
    for stop in range(1, length):
        reference = make_prompt_cache(model)
        for cache, (keys, values) in zip(
            reference, through_codec(policy.codec, sliced(layers, 0, stop)), strict=True
        ):
            cache.update_and_fetch(keys, values)
        expected = model(tokens[:, stop:], cache=reference)
        caches = complete(attach.plan(policy, spans(records, stop)), helper)
        logits = model(tokens[:, stop:], cache=caches)
        assert mx.abs(logits - expected).max() <= SAME_CUTS
        if name == "none":
            assert mx.abs(logits - cold_logits[:, stop:]).max() <= OTHER_CUTS
        assert [cache.offset for cache in caches] == [length] * 3
