"""Caches that are made of several, and rows of odd shapes: no small model has all of them."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
)

from engine.kv import kinds
from engine.kv.kinds import NotCacheable
from engine.kv.layout import probe
from engine.kv.live import LiveCaches
from engine.kv.solo import one_row
from tests.support.checkpoints import lossless, save

# Keys and values of the fake layers, by the number of their leaf.
WIDTHS = {0: (8, 0), 1: (8, 16), 3: (16, 8), 4: (0, 8), 5: (8, 8), 6: (64, 64)}


class Nested:
    """Feeds every leaf of its caches rows, or a state, that tell all tokens before apart."""

    def make_cache(self) -> list[Any]:
        made: list[Any] = [
            CacheList(KVCache(), RotatingKVCache(8, 2), ArraysCache(2)),
            ConcatenateKVCache(),
            CacheList(ConcatenateKVCache()),
            ChunkedKVCache(4),
            KVCache(),
        ]
        return made

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        rows = tokens.astype(mx.float32)[:, None, :, None]
        for number, leaf in enumerate(kinds.leaves(cache)):
            if number in WIDTHS:
                if hasattr(leaf, "maybe_trim_front"):
                    leaf.maybe_trim_front()
                keys, values = (mx.sin(rows * (number + 1 + mx.arange(w))) for w in WIDTHS[number])
                leaf.update_and_fetch(keys, values)
            else:
                before = 0 if leaf[0] is None else leaf[0]
                leaf[0] = 0.5 * before + mx.sin(rows[:, 0].sum(axis=1) + mx.arange(3))
        return tokens


def fed(caches: list[Any], tokens: Sequence[int]) -> list[Any]:
    Nested()(mx.array([list(tokens)]), caches)
    mx.eval([leaf.state for leaf in kinds.leaves(caches)])
    return caches


def state(caches: Sequence[Any]) -> list[Any]:
    """Of every leaf: its class, where it is, and what a layer would attend to next."""
    found: list[Any] = []
    for leaf in kinds.leaves(caches):
        arrays = leaf.cache if isinstance(leaf, ArraysCache) else leaf.keys_and_values()
        shown = [None if a is None else np.array(a).tolist() for a in arrays]
        found.append((type(leaf).__name__, getattr(leaf, "offset", None), shown))
    return found


def test_every_leaf_is_found_and_named() -> None:
    layout = probe(LiveCaches(Nested()))
    assert (layout.layers, layout.lists) == (7, (3, None, 1, None, None))
    assert sorted(layer for group in layout.all for layer in group.layers) == [*range(7)]
    assert layout.notes() == [
        "4 x keys and values: rows",
        "1 x window of 8 rows with the first 2: checkpoints",
        "1 x recurrent state: checkpoints",
        "1 x chunks of 4 rows: checkpoints",
    ]


@pytest.mark.parametrize("alone", [False, True], ids=["plain", "one-row"])
@pytest.mark.parametrize("position", [1, 3, 4, 8, 9, 30])
def test_caches_of_several_come_back_as_they_were(position: int, alone: bool) -> None:
    live = LiveCaches(Nested())
    tokens = range(3, 3 + position + 20)
    caches = fed(one_row(live.fresh()) if alone else live.fresh(), tokens[:position])
    saved = save(lossless(live), caches, tokens, position)
    restored = saved.restore()
    assert [type(cache) for cache in restored] == [type(cache) for cache in live.fresh()]
    reference = fed(live.fresh(), tokens[:position])
    for token in tokens[position:]:
        for each in (restored, reference):
            fed(each, [token])
    for found, expected in zip(state(restored), state(reference), strict=True):
        assert found[:2] == expected[:2]
        for one, other in zip(found[2], expected[2], strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                np.testing.assert_allclose(np.array(one), np.array(other), atol=1e-6)


def test_a_list_in_a_list_is_of_no_kind() -> None:
    class Deeper(Nested):
        def make_cache(self) -> list[Any]:
            return [CacheList(CacheList(KVCache()))]

    with pytest.raises(NotCacheable, match="1 CacheList"):
        probe(LiveCaches(Deeper()))
