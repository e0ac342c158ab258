"""Codecs q8 and q4: the only difference from a lossless store is the codec's own error, once."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from cachestore import record
from cachestore.client import Client
from tests.support.daemons import Cachestore, short_directory, start_cachestore
from tests.support.engines import InProcess, Reply, assert_same, in_process
from tests.support.models import llama_config, save_tiny_model

LAYERS, HEADS, WIDTH = 2, 2, 64
BITS = {"q8": 8, "q4": 4}


@dataclass
class Served:
    codec: str
    store: Cachestore
    engine: InProcess


@pytest.fixture(scope="module", params=BITS)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with short_directory() as directory:
        config = llama_config(heads=4, kv_heads=HEADS, head_dim=WIDTH, layers=LAYERS)
        model = save_tiny_model(directory / "model", config)
        with (
            start_cachestore(directory, budget="256MiB") as store,
            in_process(model, store.socket, cache_codec=request.param) as engine,
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


def decoded_caches(records: list[tuple[str, list[Any]]]) -> list[KVCache]:
    """The oracle: each part dequantized by MLX's own function, joined, in mlx-lm's own caches."""
    parts: list[list[mx.array]] = [[], []]
    for codec, arrays in records:
        if codec == "none":
            keys, values = (mx.array(array) for array in arrays)
        else:
            keys, values = (
                mx.dequantize(
                    *(mx.array(a) for a in arrays[i : i + 3]), group_size=64, bits=BITS[codec]
                )
                for i in (0, 3)
            )
        parts[0].append(keys)
        parts[1].append(values)
    keys, values = (mx.concatenate(part, axis=2) for part in parts)
    caches = []
    for layer in range(LAYERS):
        cache = KVCache()
        cache.state = (keys[layer : layer + 1], values[layer : layer + 1], keys.shape[2])
        caches.append(cache)
    return caches


def oracle(served: Served, tokens: list[int], cached: int, max_tokens: int = 4) -> Reply:
    """mlx-lm's own generation behind the stored bytes, decoded."""
    records = stored_records(served, tokens, cached)
    return served.engine.alone(tokens[cached:], max_tokens, cache=lambda _: decoded_caches(records))


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
        assert {name for name, _ in stored_records(served, tokens, length - 1)} == {codec}


def test_what_is_held_lossless_stays_so_and_later_turns_are_encoded(served: Served) -> None:
    tokens = prompt(2100, 240)
    served.engine.ask(tokens, max_tokens=1)
    served.engine.settle()
    longer = tokens + prompt(2001, 30)
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
