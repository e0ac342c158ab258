"""Lossy codecs: the only difference from a lossless store is the codec's own error, once."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from cachestore import record
from cachestore.client import Client
from engine.kv.codebook import levels
from engine.kv.rotation import SEED, Rotation
from tests.support.daemons import Cachestore, short_directory, start_cachestore
from tests.support.engines import InProcess, Reply, assert_same, in_process
from tests.support.models import llama_config, save_tiny_model

LAYERS, HEADS, WIDTH = 2, 2, 64
# Rows that the turbo codec keeps: not a multiple of a record's, and over a record's end.
KEEP = 270
# Bits of keys and of values that MLX's own function dequantizes.
BITS = {"q8": (8, 8), "q4": (4, 4), "k8v4": (8, 4)}
SETTINGS: dict[str, dict[str, Any]] = {
    "q8": {},
    "q4": {},
    "k8v4": {},
    "q4 rotated": {"cache_codec": "q4", "kv_rotate": True},
    "turbo3": {},
    "turbo3 kept": {"cache_codec": "turbo3", "turbo_keep_first": KEEP},
}


@dataclass
class Served:
    name: str
    store: Cachestore
    engine: InProcess

    @property
    def codec(self) -> str:
        return str(self.engine.prefix.status.codec)

    @property
    def kept(self) -> int:
        """Rows that are lossless in every path."""
        return KEEP if "kept" in self.name else 0


@pytest.fixture(scope="module", params=SETTINGS)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with short_directory() as directory:
        config = llama_config(heads=4, kv_heads=HEADS, head_dim=WIDTH, layers=LAYERS)
        model = save_tiny_model(directory / "model", config)
        settings = {"cache_codec": request.param} | SETTINGS[request.param]
        with (
            start_cachestore(directory, budget="256MiB") as store,
            in_process(model, store.socket, **settings) as engine,
        ):
            yield Served(request.param, store, engine)


def prompt(seed: int, length: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 256, length)]


def stored_records(served: Served, tokens: list[int], rows: int) -> list[tuple[str, list[Any]]]:
    """Codec and arrays of every record of a path, cut to its span, by a client of our own."""
    found = []
    with Client.connect(served.store.socket) as client:
        namespace = served.engine.prefix.status.namespace
        lease = client.lookup(namespace, np.array(tokens, "<u4").tobytes(), rows)
        assert lease.rows == rows
        for span in lease.spans:
            view = client.record(span)
            cut = slice(span.first_row, span.first_row + span.rows)
            arrays = [array[:, :, cut].copy() for array in record.read(view).views(view)]
            found.append((record.read(view).schema.codec, arrays))
        client.release([lease.id])
    return found


def dequantized(bits: int, arrays: list[Any], *, rotated: bool) -> mx.array:
    codes, scales, biases = (mx.array(array) for array in arrays)
    rows = mx.dequantize(codes, scales, biases, group_size=64, bits=bits)
    return Rotation(SEED).undo(rows) if rotated else rows


def unpacked(bits: int, codes: Any, norms: Any) -> mx.array:
    """TurboQuant as the record format tells it, bit by bit."""
    stream = np.unpackbits(codes, axis=-1, bitorder="little")
    numbers = stream.reshape(*codes.shape[:-1], -1, bits) @ (1 << np.arange(bits))
    positive = np.array(levels(WIDTH, bits)) / np.sqrt(WIDTH)
    directions = mx.array(np.concatenate([positive, -positive])[numbers], mx.float32)
    return Rotation(SEED).undo(directions * mx.array(norms).view(mx.bfloat16))


def decoded(codec: str, arrays: list[Any], *, rotated: bool) -> tuple[mx.array, mx.array]:
    """Keys and values of a record, by other functions than the engine's."""
    if codec == "none":
        return mx.array(arrays[0]), mx.array(arrays[1])
    if codec.startswith("turbo"):
        bits = int(codec[-1])
        return unpacked(bits, *arrays[:2]), unpacked(bits, *arrays[2:])
    keys, values = BITS[codec]
    return (
        dequantized(keys, arrays[:3], rotated=rotated),
        dequantized(values, arrays[3:], rotated=rotated),
    )


def decoded_caches(served: Served, records: list[tuple[str, list[Any]]]) -> list[KVCache]:
    """The oracle: each part decoded, joined, in mlx-lm's own caches."""
    rotated = "rotated" in served.name
    parts = [decoded(codec, arrays, rotated=rotated) for codec, arrays in records]
    keys, values = (mx.concatenate([*part], axis=2) for part in zip(*parts, strict=True))
    caches = []
    for layer in range(LAYERS):
        cache = KVCache()
        cache.state = (keys[layer : layer + 1], values[layer : layer + 1], keys.shape[2])
        caches.append(cache)
    return caches


def oracle(served: Served, tokens: list[int], cached: int, max_tokens: int = 4) -> Reply:
    """mlx-lm's own generation behind the stored bytes, decoded."""
    records = stored_records(served, tokens, cached)
    return served.engine.alone(
        tokens[cached:], max_tokens, cache=lambda _: decoded_caches(served, records)
    )


@pytest.mark.parametrize("length", [256, 257, 300, 511, 700])
@pytest.mark.parametrize("asked", ["exact", "prefix", "supersequence", "lcp"])
def test_a_hit_is_the_decoded_bytes_and_a_prefill_of_the_rest(
    served: Served, length: int, asked: str
) -> None:
    tokens = prompt(length, length)
    served.engine.ask(tokens)
    served.engine.settle()
    request = {
        "exact": tokens,
        "prefix": tokens + prompt(1, 5),
        "supersequence": tokens[: length - 30],
        "lcp": tokens[: length - 50] + [(t + 1) % 256 for t in tokens[length - 50 : length - 40]],
    }[asked]
    reply = served.engine.ask(request)
    cached = reply.done.usage.cached_tokens
    assert cached >= length - 50
    assert_same(reply, oracle(served, request, cached), 2e-4)


def test_short_paths_are_lossless_and_long_ones_encoded(served: Served) -> None:
    for length, codec in ((20, "none"), (255, "none"), (256, served.codec)):
        tokens = prompt(10 + length, length)
        served.engine.ask(tokens)
        served.engine.settle()
        expected = codec if length > served.kept else "none"
        assert {name for name, _ in stored_records(served, tokens, length - 1)} == {expected}


def test_what_is_held_lossless_stays_so_and_later_turns_are_encoded(served: Served) -> None:
    tokens = prompt(2100, 240)
    more = 30 if not served.kept else 90
    served.engine.ask(tokens, max_tokens=1)
    served.engine.settle()
    longer = tokens + prompt(2001, more)
    reply = served.engine.ask(longer, max_tokens=1)
    served.engine.settle()
    assert reply.done.usage.cached_tokens == 240
    records = stored_records(served, longer, len(longer) - 1)
    assert (records[0][0], records[-1][0]) == ("none", served.codec)
    again = served.engine.ask(longer)
    assert_same(again, oracle(served, longer, len(longer) - 1), 2e-4)


def test_fetched_rows_are_never_encoded_again(served: Served) -> None:
    tokens = prompt(3000, 300)
    served.engine.ask(tokens, max_tokens=8)
    served.engine.settle()
    before = stored_records(served, tokens, 299)
    for turn in range(3):
        tokens = tokens + prompt(3001 + turn, 40)
        served.engine.ask(tokens, max_tokens=8)
        served.engine.settle()
    after = stored_records(served, tokens[:300], 299)
    assert len(after) == len(before)
    for (_, old), (_, new) in zip(before, after, strict=True):
        for a, b in zip(old, new, strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_first_rows_are_lossless_to_the_row(served: Served) -> None:
    tokens = prompt(5000, 700)
    served.engine.ask(tokens, max_tokens=1)
    served.engine.settle()
    records = stored_records(served, tokens, 699)
    lossless = sum(arrays[0].shape[2] for codec, arrays in records if codec == "none")
    assert lossless == served.kept
    # Behind a beginning that it shares, a path stores only its own rows.
    before = served.store.stats().tokens
    other = tokens[:200] + prompt(5001, 300)
    assert served.engine.ask(other, max_tokens=1).done.usage.cached_tokens == 200
    served.engine.settle()
    assert served.store.stats().tokens == before + 300
    reply = served.engine.ask(other)
    assert reply.done.usage.cached_tokens == 499
    assert_same(reply, oracle(served, other, 499), 2e-4)


def test_rows_whose_prefix_the_store_lost_are_not_written(served: Served) -> None:
    # The rows came decoded from a store that has gone: encoding them again would add an error.
    with short_directory() as directory, start_cachestore(directory) as other:
        tokens = prompt(4000, 300)
        served.engine.ask(tokens)
        served.engine.settle()
        link = served.engine.engine.link
        assert link is not None
        request_id = served.engine.submit(tokens + prompt(4001, 40), max_tokens=200)
        served.engine.next_event(request_id)
        served.engine.settle()
        before = served.engine.prefix.status.writes_dropped
        client, link._client = link._client, other.client()
        try:
            reply = served.engine.finish(request_id)
            served.engine.settle()
        finally:
            link._client.close()
            link._client = client
        assert reply.done.usage.cached_tokens == 300
        assert other.stats().tokens == 0
        assert served.engine.prefix.status.writes_dropped == before + 1
