"""What the KV flags come to: refused with a name and a remedy, or done, and said."""

import argparse
from collections import Counter
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import CacheList, ChunkedKVCache, ConcatenateKVCache, _BaseCache

from engine.config import EngineConfig, parse_listen
from engine.flags import ConfigError
from engine.kv import live, routing
from engine.kv.attention import PackedMatmul
from engine.kv.history import JoiningKVCache, LateKVCache, QuantizedKVCache
from engine.kv.live import LiveCaches
from engine.kv.rotating import WindowKVCache
from engine.kvconfig import KvConfig, read_bits
from tests.support.models import (
    deepseek_config,
    gemma3_config,
    llama_config,
    mamba2_config,
    qwen3_next_config,
    tiny_model,
)
from tests.support.zoo import animal

LISTEN = parse_listen("127.0.0.1:0")


@pytest.fixture(autouse=True)
def routed() -> Any:
    with routing.installed(PackedMatmul()):
        yield


def choose(config: dict[str, Any], kv: KvConfig, rotate: bool = False) -> LiveCaches:
    return live.choose(tiny_model(config), kv, rotate)


def kinds(caches: LiveCaches) -> dict[str, int]:
    return dict(Counter(type(cache).__name__ for cache in caches.fresh()))


@pytest.mark.parametrize(
    ("kv", "named"),
    [
        ({"bits": (7, 8)}, "--kv-bits 7: no such bits; use 2, 3, 4, 5, 6 or 8"),
        ({"bits": (8, 16)}, "--kv-bits 16: no such bits"),
        ({"bits": (8, 8), "group_size": 48}, "--kv-group-size 48: no such group; use 32"),
        ({"group_size": 64}, "--kv-group-size would have no effect.*add --kv-bits"),
        ({"quantized_start": 5}, "--quantized-kv-start would have no effect.*add --kv-bits"),
        ({"max_size": 4}, "--max-kv-size 4: .*use at least 5"),
        ({"bits": (8, 8), "quantized_start": 5, "max_size": 64}, "leave one of the two out"),
    ],
)
def test_what_no_model_can_have(kv: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        KvConfig(**kv)


@pytest.mark.parametrize("max_batch", [None, 2])
def test_a_batch_is_quantized_or_not(max_batch: int | None) -> None:
    late = KvConfig((8, 8), quantized_start=100)
    with pytest.raises(ConfigError, match="--quantized-kv-start 100 needs --max-batch 1"):
        EngineConfig("m", LISTEN, kv=late, max_batch=max_batch)
    assert EngineConfig("m", LISTEN, kv=late, max_batch=1).kv is late


@pytest.mark.parametrize(
    ("text", "bits"), [("none", None), ("8", (8, 8)), ("8,4", (8, 4)), ("2,6", (2, 6))]
)
def test_bits_are_read(text: str, bits: tuple[int, int] | None) -> None:
    assert read_bits(text) == bits


@pytest.mark.parametrize("text", ["", "8,", "8,4,2", "eight", "-8", "8.0", "²", "None"])
def test_bits_that_are_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="none of none, N and K,V"):
        read_bits(text)


@pytest.mark.parametrize(
    ("config", "kv", "rotate", "named"),
    [
        (llama_config(head_dim=80), KvConfig((8, 8)), False, r"--kv-group-size 64: .*\[80\]"),
        (llama_config(head_dim=96), KvConfig((8, 8)), False, "--kv-group-size 64: .*use 32"),
        (llama_config(head_dim=72), KvConfig((8, 8)), True, "--kv-rotate: .*head size 72"),
        (mamba2_config(), KvConfig((8, 8)), False, "--kv-bits: no layer .*2 ArraysCache"),
        (mamba2_config(), KvConfig(max_size=64), False, "--max-kv-size: .*2 ArraysCache"),
        (deepseek_config(3), KvConfig((8, 8), 32), False, "--kv-bits: no layer .*its rows itself"),
    ],
    ids=["80", "96", "72-rotated", "recurrent", "recurrent-bounded", "latent"],
)
def test_what_this_model_cannot_have(
    config: dict[str, Any], kv: KvConfig, rotate: bool, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        choose(config, kv, rotate)


def test_full_precision_without_flags() -> None:
    caches = choose(llama_config(), KvConfig())
    assert kinds(caches) == {JoiningKVCache.__name__: 2}


def test_all_plain_layers_are_quantized() -> None:
    caches = choose(llama_config(layers=3), KvConfig((8, 4), 32), rotate=True)
    assert kinds(caches) == {QuantizedKVCache.__name__: 3}
    assert caches.notes() == ["3 x KVCache: keys 8 bits, values 4 bits, groups of 32, rotated"]


def test_windows_of_a_model_are_quantized_too() -> None:
    caches = choose(gemma3_config(window=16), KvConfig((8, 8)))
    assert kinds(caches) == {WindowKVCache.__name__: 3, QuantizedKVCache.__name__: 1}
    assert caches.notes() == [
        "3 x RotatingKVCache: keys 8 bits, values 8 bits, groups of 64, the first 0 and latest "
        "rows of 16",
        "1 x KVCache: keys 8 bits, values 8 bits, groups of 64",
    ]


def test_plain_layers_are_bounded() -> None:
    caches = choose(gemma3_config(window=16), KvConfig(max_size=64))
    assert kinds(caches) == {WindowKVCache.__name__: 4}
    assert caches.notes() == [
        "3 x RotatingKVCache: full precision, the first 0 and latest rows of 16",
        "1 x KVCache: full precision, the first 4 and latest rows of 64",
    ]


def test_layers_in_a_list_are_quantized_and_not_bounded() -> None:
    model = animal("falcon_h1")
    caches = live.choose(model, KvConfig((8, 8), 32), rotate=False)
    assert caches.notes() == [
        "2 x ArraysCache: as mlx-lm has it (recurrent state, not rows of tokens)",
        "2 x KVCache: keys 8 bits, values 8 bits, groups of 32",
    ]
    assert [type(cache) for cache in caches.fresh()] == [CacheList, CacheList]
    with pytest.raises(ConfigError, match=r"--max-kv-size: .*2 CacheList"):
        live.choose(model, KvConfig(max_size=64), rotate=False)


def test_a_late_start_says_where() -> None:
    caches = choose(llama_config(), KvConfig((8, 8), quantized_start=100))
    assert kinds(caches) == {LateKVCache.__name__: 2}
    assert caches.notes() == [
        "2 x KVCache: keys 8 bits, values 8 bits, groups of 64, from 100 tokens on (full precision "
        "before)"
    ]


def test_layers_without_rows_stay_as_they_are() -> None:
    caches = choose(qwen3_next_config(), KvConfig((8, 8)))
    assert kinds(caches) == {"RecurrentCache": 3, QuantizedKVCache.__name__: 1}
    assert caches.notes() == [
        "3 x ArraysCache: as mlx-lm has it (recurrent state, not rows of tokens)",
        "1 x KVCache: keys 8 bits, values 8 bits, groups of 64",
    ]


@pytest.mark.parametrize(
    ("cache", "why"),
    [
        (ChunkedKVCache(16), "rows that leave by chunks; only plain ones and windows can be"),
        (ConcatenateKVCache(), "rows that run in no batch; only plain ones and windows can be"),
        (_BaseCache(), "unknown here"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_kinds_say_why_they_stay(cache: Any, why: str) -> None:
    class Model:
        layers = (None,)

        def make_cache(self) -> list[Any]:
            return [cache]

    (note,) = LiveCaches(Model()).notes()
    assert note.startswith(f"1 x {type(cache).__name__}: as mlx-lm has it ({why}")


class Bypassing:
    """A llama whose first layer computes on its keys itself, as some models do."""

    def __init__(self) -> None:
        self._model = tiny_model(llama_config(layers=3))

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        logits: mx.array = self._model(inputs, cache=cache)
        keys: mx.array = cache[0].keys_and_values()[0]
        return logits + 0 * keys.sum()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def test_a_layer_that_reads_its_rows_itself_stays_in_full_precision() -> None:
    caches = live.choose(Bypassing(), KvConfig((8, 8)), rotate=False)
    assert [type(cache) for cache in caches.fresh()] == [
        JoiningKVCache,
        QuantizedKVCache,
        QuantizedKVCache,
    ]
    assert caches.notes() == [
        "1 x KVCache: full precision (it computes on its rows itself: AttributeError)",
        "2 x KVCache: keys 8 bits, values 8 bits, groups of 64",
    ]
