"""What codecs do to checkpoints: windows are encoded row by row, recurrent state never is."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cachestore.record import RecordError
from engine import attach, pack
from engine.kv import kinds, routing
from engine.kv.attention import PackedMatmul
from engine.kv.codec import CodecError, CodecPolicy, plan_codec
from engine.kv.encoding import Affine, Encoding, Lossless, PartShape
from engine.kv.history import FULL
from engine.kv.kinds import leaves
from engine.kv.layout import CacheLayout, LayerGroup, probe
from engine.kv.live import LiveCaches, choose
from engine.kv.rotating import WindowKVCache
from engine.kv.states import Chunk, Window
from engine.kv.turboquant import TurboQuant
from engine.kvconfig import KvConfig
from tests.support.checkpoints import feed, flat, path_at, save
from tests.support.models import (
    gemma3_config,
    llama4_config,
    llama_config,
    mamba2_config,
    qwen3_next_config,
    tiny_model,
)

TOKENS = tuple(int(t) for t in np.random.default_rng(6).integers(0, 256, 64))
WINDOW = 16
ENCODINGS: dict[str, Encoding] = {
    "none": Lossless(),
    "q8": Affine(8, 64),
    "turbo3": TurboQuant(3, "float32"),
}


@pytest.fixture(scope="module")
def gemma() -> Any:
    return tiny_model(gemma3_config(window=WINDOW))


def windows(caches: list[Any]) -> list[WindowKVCache]:
    found = [leaf for leaf in leaves(caches) if isinstance(leaf, WindowKVCache)]
    assert found
    return found


def rows_of(window: WindowKVCache) -> list[np.ndarray[Any, Any]]:
    """Its arrays, as far as they hold rows."""
    arrays, rows = window.part()
    return [np.array(array[:, :, :rows]) for array in arrays]


def kept_rows(window: WindowKVCache, policy: CodecPolicy, position: int) -> int:
    kind = policy.codec.layout.states[0].kind
    return kind.first_rows(position, policy.keep_first)


@pytest.mark.parametrize("position", [5, 16, 17, 41])
@pytest.mark.parametrize("name", ENCODINGS)
def test_a_window_is_encoded_row_by_row(gemma: Any, name: str, position: int) -> None:
    live = LiveCaches(gemma)
    policy = CodecPolicy.of(probe(live), name, min_quantize_tokens=0)
    caches = live.fresh()
    feed(gemma, caches, TOKENS[:position])
    restored = save(policy, caches, TOKENS, position).restore()
    encoding = ENCODINGS[name]
    for before, after in zip(windows(caches), windows(restored), strict=True):
        assert (after.offset, after.max_size, after.keep) == (position, WINDOW, 0)
        for was, found in zip(rows_of(before), rows_of(after), strict=True):
            expected = encoding.decode(encoding.encode(mx.array(was)))
            assert np.array_equal(found, np.array(expected))


@pytest.mark.parametrize(("position", "encoded"), [(19, False), (20, True), (21, True)])
def test_short_paths_are_lossless(gemma: Any, position: int, encoded: bool) -> None:
    live = LiveCaches(gemma)
    policy = CodecPolicy.of(probe(live), "q8", min_quantize_tokens=20)
    caches = live.fresh()
    feed(gemma, caches, TOKENS[:position])
    restored = save(policy, caches, TOKENS, position).restore()
    for before, after in zip(windows(caches), windows(restored), strict=True):
        assert np.array_equal(rows_of(before)[0], rows_of(after)[0]) != encoded


@pytest.mark.parametrize("max_size", [None, WINDOW])
@pytest.mark.parametrize("position", [3, 5, 16, 17, 18, 19, 41])
def test_the_first_rows_are_kept(position: int, max_size: int | None) -> None:
    """As long as the window has them: with --max-kv-size for ever."""
    config = gemma3_config(window=WINDOW) if max_size is None else llama_config()
    model = tiny_model(config)
    live = LiveCaches(model, config=KvConfig(max_size=max_size))
    policy = CodecPolicy.of(probe(live), "turbo3", min_quantize_tokens=0, keep_first=3)
    caches = live.fresh()
    feed(model, caches, TOKENS[:position])
    restored = save(policy, caches, TOKENS, position).restore()
    for before, after in zip(windows(caches), windows(restored), strict=True):
        held = before._positions([position])[0]
        for was, found in zip(rows_of(before), rows_of(after), strict=True):
            same = (was == found).all(axis=(0, 1, 3))
            assert same[(held >= 0) & (held < 3)].all()
            assert same.sum() <= 3


@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("keep", [0, 4])
def test_no_first_row_is_behind_the_cut(size: int, keep: int) -> None:
    shape = probe(LiveCaches(tiny_model(llama_config()))).groups[0].kind
    kind = Window(shape.keys, shape.values, size, keep)  # type: ignore[attr-defined]
    chunk = Chunk(shape.keys, shape.values, size)  # type: ignore[attr-defined]
    blank = WindowKVCache(FULL, size, keep)
    for position in range(1, 4 * size):
        for tokens in range(3 * size):
            held = blank._positions([position])[0]
            assert len(held) == kind.rows_at(position)
            behind = held[kind.first_rows(position, tokens) :]
            assert (behind >= tokens).all()
            first = position - chunk.rows_at(position)
            cut = chunk.first_rows(position, tokens)
            assert (np.arange(first, position)[cut:] >= tokens).all()
            assert (np.arange(first, position)[:cut] < tokens).all()


@pytest.fixture
def routed() -> Iterator[None]:
    with routing.installed(PackedMatmul()):
        yield


@pytest.mark.usefixtures("routed")
@pytest.mark.parametrize("kv", [KvConfig((8, 4)), KvConfig((8, 8), max_size=WINDOW)])
@pytest.mark.parametrize("position", [5, 17, 41])
def test_what_is_quantized_already_stays_as_it_is(gemma: Any, kv: KvConfig, position: int) -> None:
    live = choose(gemma, kv, rotate=False)
    policy = CodecPolicy.of(probe(live), "none")
    caches = live.fresh()
    feed(gemma, caches, TOKENS[:position])
    saved = save(policy, caches, TOKENS, position)
    restored = saved.restore()
    assert len(windows(restored)) == (3 if kv.max_size is None else 4)
    for before, after in zip(windows(caches), windows(restored), strict=True):
        assert after.precision == before.precision
        assert after.keep == before.keep
        for was, found in zip(rows_of(before), rows_of(after), strict=True):
            assert np.array_equal(was, found)
    for leaf in leaves(restored):
        held = min(position, getattr(leaf, "max_size", position))
        assert {array.shape[2] for array in flat(leaf.state)} == {held}
    rest = [[token] for token in TOKENS[position:][:20]]
    expected = feed(gemma, caches, *rest)
    assert mx.abs(feed(gemma, saved.restore(), *rest) - expected).max() <= 1e-5


@pytest.mark.parametrize("name", ["q8", "turbo3"])
def test_recurrent_state_is_lossless_whatever_the_codec(name: str) -> None:
    model = tiny_model(qwen3_next_config())
    live = LiveCaches(model)
    policy = CodecPolicy.of(probe(live), name, min_quantize_tokens=0)
    assert {type(part.encoding) for part in policy.codec.states} == {Lossless}
    assert {type(part.encoding) for part in policy.codec.parts} != {Lossless}
    assert policy.codec.notes() == []
    caches = live.fresh()
    feed(model, caches, TOKENS[:21])
    restored = save(policy, caches, TOKENS, 21).restore()
    for before, after in zip(caches[:3], restored[:3], strict=True):
        for was, found in zip(before.cache, after.cache, strict=True):
            assert np.array_equal(np.array(was), np.array(found))


def test_a_codec_for_recurrent_layers_alone_is_an_error() -> None:
    layout = probe(LiveCaches(tiny_model(mamba2_config())))
    plan_codec("q8", layout)
    with pytest.raises(CodecError, match="q8: all layers are recurrent; use --cache-codec none"):
        plan_codec("q8", layout, explicit=True)


def test_chunks_are_encoded_too() -> None:
    model = tiny_model(llama4_config(chunk=WINDOW))
    live = LiveCaches(model)
    policy = CodecPolicy.of(probe(live), "q8", min_quantize_tokens=0)
    caches = live.fresh()
    feed(model, caches, TOKENS[:41])
    restored = save(policy, caches, TOKENS, 41).restore()
    encoding = ENCODINGS["q8"]
    for before, after in zip(caches[:3], restored[:3], strict=True):
        assert (after.offset, after.start_position, after.chunk_size) == (41, 25, WINDOW)
        was = before.keys[:, :, : 41 - before.start_position][:, :, -WINDOW:]
        assert np.array_equal(np.array(after.keys), np.array(encoding.decode(encoding.encode(was))))


def test_the_identity_tells_states_apart() -> None:
    def described(config: dict[str, Any], **kv: Any) -> str:
        return repr(probe(LiveCaches(tiny_model(config), config=KvConfig(**kv))).describe())

    found = [
        described(gemma3_config(window=16)),
        described(gemma3_config(window=17)),
        described(llama_config()),
        described(llama_config(), max_size=16),
        described(llama_config(), max_size=32),
        described(mamba2_config()),
        described(mamba2_config(state_size=32)),
        described(llama4_config(chunk=16)),
        described(llama4_config(chunk=32)),
    ]
    assert len(set(found)) == len(found)


def test_the_policy_of_checkpoints_is_part_of_the_identity(gemma: Any) -> None:
    layout = probe(LiveCaches(gemma))
    policies = [CodecPolicy.of(layout, name) for name in ("none", "q8", "turbo3")]
    policies.append(replace(policies[-1], keep_first=4))
    assert len({repr(policy.describe()) for policy in policies}) == len(policies)


def test_a_checkpoint_of_another_codec_or_a_row_in_its_place_is_refused(gemma: Any) -> None:
    """Both say that they are of the right tokens."""
    layout = probe(LiveCaches(gemma))
    policy = CodecPolicy.of(layout, "none")
    encoding = CodecPolicy.of(layout, "q8", min_quantize_tokens=0)
    caches = LiveCaches(gemma).fresh()
    feed(gemma, caches, TOKENS[:21])
    rows = save(policy, caches, TOKENS, 21).rows
    last = pack.pack(policy.codec, kinds.rows(layout, caches, 0, 20, 21), range(20, 21))
    extent, path = memoryview(bytearray(100_000)), path_at(TOKENS, 21)
    pack.write([last], 20, 1, path, extent)
    other = save(encoding, caches, TOKENS, 21).checkpoint
    for wrong in (other, attach.Source(extent, 0, 1, path)):
        with pytest.raises(RecordError, match="a checkpoint of another layout"):
            attach.plan(policy, rows, wrong)


def test_only_the_packed_copy_remains() -> None:
    """A part at a time is held twice; what is restored is held once."""
    shape = PartShape("keys", 4, 64, "float32"), PartShape("values", 4, 64, "float32")
    layout = CacheLayout((), (LayerGroup(Window(*shape, 512, 0), tuple(range(8))),))
    policy = CodecPolicy.of(layout, "q8", min_quantize_tokens=0)
    live = [WindowKVCache(FULL, 512) for _ in range(8)]
    for cache in live:
        cache.update_and_fetch(*(mx.random.normal((1, 4, 700, 64)) for _ in shape))
        mx.eval(cache.state)
    part_bytes = 8 * 4 * 512 * 64 * 4
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    packed = pack.pack_checkpoint(policy, kinds.snapshot(layout, live, 0), 700)
    payload = sum(array.nbytes for array in packed.arrays)
    assert payload == 2 * part_bytes * (64 + 8) // (4 * 64)
    assert mx.get_peak_memory() - before < 1.05 * (part_bytes + payload)
    assert mx.get_active_memory() - before < 1.01 * payload + 10_000
    mx.reset_peak_memory()
    for cache in live:
        cache.update_and_fetch(*(mx.zeros((1, 4, 1, 64)) for _ in shape))
        mx.eval(cache.state)
    # No row of the window was copied: nobody else refers to it.
    assert mx.get_peak_memory() - before < 1.01 * payload + part_bytes / 16
    del packed
    assert mx.get_active_memory() - before < 20_000
