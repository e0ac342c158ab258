import json
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from engine.kv.encoding import PartShape
from engine.kv.kinds import NotCacheable, PlainKV
from engine.kv.layout import LayerGroup, probe
from engine.kv.live import LiveCaches
from tests.support.models import (
    gemma3_config,
    llama4_config,
    mamba2_config,
    mistral_config,
    qwen3_config,
    qwen3_next_config,
    tiny_llama,
    tiny_model,
)


class FakeModel:
    """Layers given by (heads, key width, value width, dtype), or None: a cache never used."""

    def __init__(self, *layers: tuple[int, int, int, mx.Dtype] | None, cache: type = KVCache):
        self.layers = layers
        self.cache = cache

    def make_cache(self) -> list[Any]:
        return [self.cache() for _ in self.layers]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        rows = tokens.shape[1]
        for geometry, layer in zip(self.layers, cache, strict=True):
            if geometry is not None:
                heads, key_width, value_width, dtype = geometry
                layer.update_and_fetch(
                    mx.zeros((1, heads, rows, key_width), dtype),
                    mx.zeros((1, heads, rows, value_width), dtype),
                )
        return tokens


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_llama_is_one_group(kv_heads: int, dtype: mx.Dtype) -> None:
    layout = probe(LiveCaches(tiny_llama(kv_heads=kv_heads, head_dim=32, layers=3, dtype=dtype)))
    name = str(dtype).removeprefix("mlx.core.")
    parts = (PartShape("keys", kv_heads, 32, name), PartShape("values", kv_heads, 32, name))
    assert layout.groups == (LayerGroup(PlainKV(*parts), (0, 1, 2)),)
    assert layout.layers == 3


@pytest.mark.parametrize("config", [mistral_config(), qwen3_config()])
def test_its_like_are_cacheable(config: dict[str, Any]) -> None:
    assert probe(LiveCaches(tiny_model(config))).layers == config["num_hidden_layers"]


@pytest.mark.parametrize(
    ("config", "notes"),
    [
        (qwen3_config(), ["2 x keys and values: rows"]),
        (gemma3_config(), ["1 x keys and values: rows", "3 x window of 16 rows: checkpoints"]),
        (mamba2_config(), ["2 x recurrent state: checkpoints"]),
        (qwen3_next_config(), ["1 x keys and values: rows", "3 x recurrent state: checkpoints"]),
        (llama4_config(), ["1 x keys and values: rows", "3 x chunks of 16 rows: checkpoints"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_each_kind_of_layer_is_said(config: dict[str, Any], notes: list[str]) -> None:
    layout = probe(LiveCaches(tiny_model(config)))
    assert layout.notes() == notes
    assert layout.checkpointed == (len(layout.states) > 0)


def test_a_subclass_is_another_kind() -> None:
    class OwnCache(KVCache):
        pass

    with pytest.raises(NotCacheable, match="2 OwnCache"):
        probe(LiveCaches(FakeModel((1, 8, 8, mx.float32), (1, 8, 8, mx.float32), cache=OwnCache)))


def test_layers_of_one_shape_are_grouped() -> None:
    small, large = (1, 32, 32, mx.float32), (2, 64, 32, mx.float16)
    layout = probe(LiveCaches(FakeModel(small, small, large, small)))
    assert [group.layers for group in layout.groups] == [(0, 1, 3), (2,)]
    assert layout.groups[1].parts == (
        PartShape("keys", 2, 64, "float16"),
        PartShape("values", 2, 32, "float16"),
    )


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (None, "did not use its cache"),
        ((1, 0, 0, mx.float32), "keys and values of a layer are empty"),
        ((1, 8, 8, mx.int32), "int32"),
    ],
)
def test_what_cannot_be_stored_is_refused(
    layer: tuple[int, int, int, mx.Dtype] | None, reason: str
) -> None:
    with pytest.raises(NotCacheable, match=reason):
        probe(LiveCaches(FakeModel((1, 8, 8, mx.float32), layer)))


def test_no_layers_is_not_cacheable() -> None:
    with pytest.raises(NotCacheable):
        probe(LiveCaches(FakeModel()))


def test_the_description_tells_geometries_apart() -> None:
    small, large = (1, 8, 8, mx.float32), (2, 8, 8, mx.float32)
    geometries = [
        (small, large, small, large),
        (small, large, large, small),
        ((1, 8, 8, mx.float32),),
        ((1, 8, 8, mx.float16),),
        ((2, 8, 8, mx.float32),),
        ((1, 16, 8, mx.float32),),
        ((1, 8, 16, mx.float32),),
        ((1, 8, 8, mx.float32), (1, 8, 8, mx.float32)),
    ]
    described = {
        json.dumps(probe(LiveCaches(FakeModel(*layers))).describe()) for layers in geometries
    }
    assert len(described) == len(geometries)
