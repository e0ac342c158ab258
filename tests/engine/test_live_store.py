"""Quantized live caches and the store: the same bytes on both sides, whoever asks."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cachestore import record
from cachestore.client import Client
from engine import model as loading
from engine.kv import live
from engine.kv.history import QuantizedKVCache
from engine.kvconfig import KvConfig
from tests.support.daemons import Cachestore, short_directory, start_cachestore
from tests.support.engines import InProcess, assert_same, in_process
from tests.support.models import llama_config, qwen3_next_config, save_tiny_model

LAYERS = 2
CYCLES = 10
# Codes, scales and biases of keys and then of values, (layers, heads, rows, ...).
Arrays = list[Any]


def prompt(seed: int, length: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 256, length)]


@pytest.fixture(scope="module")
def model() -> Any:
    with short_directory() as directory:
        yield save_tiny_model(directory / "model", llama_config(layers=LAYERS))


@pytest.fixture
def store() -> Any:
    with short_directory() as directory, start_cachestore(directory, budget="64MiB") as made:
        yield made


def stored(store: Cachestore, engine: InProcess, tokens: list[int], rows: int) -> Arrays:
    """The arrays of rows [0, rows) of a path, joined, by a client of our own."""
    with Client.connect(store.socket) as client:
        namespace = engine.prefix.status.namespace
        lease = client.lookup(namespace, np.array(tokens, "<u4").tobytes(), rows)
        assert lease.rows == rows
        parts = []
        for span in lease.spans:
            view = client.record(span)
            cut = slice(span.first_row, span.first_row + span.rows)
            parts.append([a[:, :, cut].copy() for a in record.read(view).views(view)])
        client.release([lease.id])
    return [np.concatenate(arrays, axis=2) for arrays in zip(*parts, strict=True)]


# Of scales and biases, as records hold them.
DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "uint16"}


@pytest.mark.parametrize(
    ("dtype", "rotate"),
    [("float32", False), ("float32", True), ("float16", True), ("bfloat16", False)],
)
def test_ten_cycles_leave_the_bytes_as_they_are(
    dtype: str, rotate: bool, store: Cachestore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Store, attach, extend, store, restart."""
    live_dtype = getattr(mx, dtype)
    model = save_tiny_model(tmp_path / "model", llama_config(layers=LAYERS), dtype=live_dtype)
    # On a CPU models compute in float32, for speed alone.
    monkeypatch.setattr(loading, "_to_float32", lambda _: False)
    tokens, before = prompt(0, 100), Arrays()
    kv = KvConfig((8, 4))
    for cycle in range(CYCLES):
        with in_process(model, store.socket, kv=kv, kv_rotate=rotate) as engine:
            geometries = engine.on_worker(lambda core: live.geometries(core.caches))
            assert {geometry.dtype for geometry in geometries} == {live_dtype}
            reply = engine.ask(tokens, max_tokens=3)
            engine.settle()
            rows = len(tokens)
            assert reply.done.usage.cached_tokens == (len(before[0][0, 0]) if before else 0)
            now = stored(store, engine, [*tokens, 0], rows)
            for old, new in zip(before, now, strict=False):
                assert np.array_equal(old, new[:, :, : old.shape[2]])
            before = now
            tokens = tokens + prompt(cycle + 1, 30)
    assert {array.dtype.name for array in before} == {"uint32", DTYPES[dtype]}


def test_a_hit_decodes_behind_the_stored_bytes(model: Path, store: Cachestore) -> None:
    tokens = prompt(0, 300)
    with in_process(model, store.socket, kv=KvConfig((8, 8))) as engine:
        engine.ask(tokens, max_tokens=1)
        engine.settle()
        arrays = stored(store, engine, tokens, 299)
        hit = engine.ask(tokens, max_tokens=1)
        assert hit.done.usage.cached_tokens == 299

        def alone(core: Any) -> Any:
            made = [
                QuantizedKVCache.of(
                    core.caches.precisions[n], [mx.array(a[n : n + 1]) for a in arrays], 299
                )
                for n in range(LAYERS)
            ]
            logits = core.caches.model(mx.array([[tokens[-1]]]), cache=made)[0, -1]
            return np.array(logits - mx.logsumexp(logits))

        expected = engine.on_worker(alone)
    # One row is computed, from the same codes: no more than float noise, and a code of that row.
    assert np.abs(hit.logprobs[0] - expected).max() < 2e-3


REPLY = 80  # more than a window holds
POLICIES: dict[str, dict[str, Any]] = {
    "full": {},
    "lossless": {"cache_codec": "none"},
    "4 in the store": {"cache_codec": "q4"},
    "4 in the store, rotated": {"cache_codec": "q4", "kv_rotate": True},
    "turbo": {"cache_codec": "turbo3"},
    "turbo, first kept": {"cache_codec": "turbo3", "turbo_keep_first": 4},
    "8": {"kv": KvConfig((8, 8))},
    "8,4": {"kv": KvConfig((8, 4))},
    "8,4 in small groups": {"kv": KvConfig((8, 4), 32)},
    "8,4 rotated": {"kv": KvConfig((8, 4)), "kv_rotate": True},
    "bounded": {"kv": KvConfig(max_size=64)},
    "bounded, 8,4": {"kv": KvConfig((8, 4), max_size=64)},
}
# Rows that are packed already are stored as they are, those of windows too.
LOSSLESS = [POLICIES["lossless"]]
LOSSLESS += [each for each in POLICIES.values() if "kv" in each and each["kv"].bits]


def test_a_prefix_of_another_policy_is_no_hit(model: Path, store: Cachestore) -> None:
    tokens = prompt(0, 300)
    namespaces = set()
    for settings in POLICIES.values():
        with in_process(model, store.socket, **settings) as engine:
            first = engine.ask(tokens, max_tokens=REPLY)
            engine.settle()
            again = engine.ask(tokens, max_tokens=REPLY)
            namespaces.add(engine.prefix.status.namespace)
        assert first.done.usage.cached_tokens == 0
        assert again.done.usage.cached_tokens == 299
        if settings in LOSSLESS:
            assert_same(again, first, 1e-5)
    assert len(namespaces) == len(POLICIES)


def test_what_is_not_cached_yet_says_so_and_generates(model: Path, store: Cachestore) -> None:
    late = KvConfig((8, 8), quantized_start=40)
    with in_process(model, store.socket, kv=late, max_batch=1) as engine:
        assert "2 LateKVCache" in engine.prefix.status.not_cached_reason
        asked = [engine.submit(prompt(n, 30 + 20 * n), max_tokens=60) for n in range(3)]
        for request in asked:
            reply = engine.finish(request)
            assert len(reply.tokens) == 60
            assert reply.done.usage.cached_tokens == 0


def test_start_says_what_each_kind_of_layer_has(
    store: Cachestore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = save_tiny_model(tmp_path / "model", qwen3_next_config())
    with caplog.at_level("INFO"), in_process(model, store.socket, kv=KvConfig((8, 4), max_size=64)):
        said = [line.partition(": ") for line in caplog.messages]
    assert [line for what, _, line in said if what == "live caches"] == [
        "3 x ArraysCache: as mlx-lm has it (recurrent state, not rows of tokens)",
        "1 x KVCache: keys 8 bits, values 4 bits, groups of 64, the first 4 and latest rows of 64",
    ]
    stored = [line for what, _, line in said if what == "layers in the store"]
    assert [line.rpartition(": ")[2] for line in stored] == ["checkpoints", "checkpoints"]
