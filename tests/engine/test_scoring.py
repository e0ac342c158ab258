"""Scores of policies on a tiny model, against mlx-lm's own caches and numpy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from engine.kv.layout import CacheLayout, probe
from engine.kv.live import LiveCaches
from engine.kv.names import plan_named
from engine.scoring import FULL, Policy, Prefix, Score, StorePolicy, Window, cut, score
from engine.shelf import always
from tests.support.caches import sliced
from tests.support.models import gemma3_config, qwen3_next_config, tiny_llama, tiny_model
from tests.support.zoo import animal

PREFIX, SCORED, COUNT = 280, 12, 3  # more than a record of rows
BITS = {"q8": 8, "q4": 4}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(heads=4, kv_heads=2, head_dim=64, layers=2)


@pytest.fixture(scope="module")
def of(model: Any) -> CacheLayout:
    return probe(LiveCaches(model))


@pytest.fixture(scope="module")
def windows() -> list[Window]:
    text = np.random.default_rng(3).integers(0, 250, 400).tolist()
    return cut([], text, PREFIX, SCORED, COUNT)


@dataclass(frozen=True)
class Live:
    """mlx-lm's quantized cache, fed the prefix's rows: another policy than the store's."""

    bits: int
    name: str = "live"

    def bytes_per_token(self, rows: int) -> float:
        return 1.0

    def caches(self, prefix: Prefix) -> list[Any]:
        made: list[Any] = [QuantizedKVCache(64, self.bits) for _ in prefix.rows]
        for cache, ((keys,), (values,)) in zip(made, prefix.rows, strict=True):
            cache.update_and_fetch(keys, values)
        return made


def stored(of: CacheLayout, *names: str) -> list[Policy]:
    return [StorePolicy(name, always(plan_named(name, of, "--codec"))) for name in names]


def scores(
    model: Any, of: CacheLayout, windows: list[Window], policies: Sequence[Policy]
) -> dict[str, Score]:
    found = score(LiveCaches(model), of, windows, policies, step=64)
    return {row.policy: row for row in found}


def test_full_precision_comes_first_and_a_lossless_store_changes_nothing(
    model: Any, of: CacheLayout, windows: list[Window]
) -> None:
    found = scores(model, of, windows, stored(of, "none"))
    assert list(found) == [FULL, "none"]
    full, none = found[FULL], found["none"]
    assert (full.mean_kl, full.flip_rate, full.ratio) == (0, 0, 1)
    assert none.mean_kl == pytest.approx(0, abs=1e-6)
    assert none.flip_rate == 0
    assert none.perplexity == pytest.approx(full.perplexity, rel=1e-5)
    assert (full.tokens, full.windows, full.prefix_tokens) == (COUNT * SCORED, COUNT, PREFIX)
    assert none.bytes_per_token == full.bytes_per_token == 2 * 2 * 2 * 64 * 4


@pytest.mark.parametrize("name", BITS)
def test_scores_are_those_of_rows_that_mlx_itself_quantized(
    model: Any, of: CacheLayout, windows: list[Window], name: str
) -> None:
    row = scores(model, of, windows, stored(of, name))[name]
    surprises, divergences, flips = [], [], []
    for window in windows:
        full, through = make_prompt_cache(model), make_prompt_cache(model)
        model(mx.array([window.prefix]), cache=full)
        layers = sliced([(cache.keys, cache.values) for cache in full], 0, PREFIX)
        for cache, layer in zip(through, layers, strict=True):
            cache.update_and_fetch(*(quantized(part, BITS[name]) for part in layer))
        expected, got = (logprobs(model, caches, window) for caches in (full, through))
        surprises += [-got[place, token] for place, token in enumerate(window.rest[1:])]
        divergences += list((np.exp(expected) * (expected - got)).sum(-1))
        flips += list(expected.argmax(-1) != got.argmax(-1))
    assert row.perplexity == pytest.approx(math.exp(np.mean(surprises)), rel=1e-4)
    assert row.mean_kl == pytest.approx(np.mean(divergences), rel=0.02, abs=1e-7)
    assert row.flip_rate == pytest.approx(np.mean(flips))
    assert row.mean_kl > 0
    assert row.kl_error is not None
    assert row.kl_error > 0


def quantized(rows: mx.array, bits: int) -> mx.array:
    packed = mx.quantize(rows, group_size=64, bits=bits)
    return mx.dequantize(*packed, group_size=64, bits=bits)


def logprobs(model: Any, caches: list[KVCache], window: Window) -> Any:
    logits = np.array(model(mx.array([window.rest[:-1]]), cache=caches)[0], np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_fewer_bits_are_worse(model: Any, of: CacheLayout, windows: list[Window]) -> None:
    found = scores(model, of, windows, stored(of, "q8", "q4"))
    assert found["q4"].mean_kl > 10 * found["q8"].mean_kl
    assert found["q4"].ratio > found["q8"].ratio > 3


def test_a_live_cache_is_one_more_policy(
    model: Any, of: CacheLayout, windows: list[Window]
) -> None:
    found = scores(model, of, windows, [Live(bits=8), *stored(of, "q8")])
    # The scored tokens' own rows are quantized too.
    assert 0 < found["live"].mean_kl < 10 * found["q8"].mean_kl


def test_a_live_cache_after_the_store_finds_the_rows_as_they_were(
    model: Any, of: CacheLayout, windows: list[Window]
) -> None:
    """A policy's model run appends to its own caches, never to the prefix."""
    first = scores(model, of, windows, stored(of, "q4"))
    later = scores(model, of, windows, [Live(4), *stored(of, "q8", "none", "q4")])
    assert later["q4"] == first["q4"]


def test_first_tokens_that_are_kept_are_lossless(
    model: Any, of: CacheLayout, windows: list[Window]
) -> None:
    plan = plan_named("turbo1", of, "--codec")
    kept = [StorePolicy(f"{n} kept", always(plan, n)) for n in (0, 4, PREFIX)]
    found = scores(model, of, windows, [*kept, *stored(of, "turbo1")])
    assert found["0 kept"].mean_kl == found["turbo1"].mean_kl > found["4 kept"].mean_kl
    assert found[f"{PREFIX} kept"].mean_kl == pytest.approx(0, abs=1e-6)
    full, turbo = found[FULL].bytes_per_token, found["turbo1"].bytes_per_token
    expected = (4 * full + (PREFIX - 4) * turbo) / PREFIX
    assert found["4 kept"].bytes_per_token == pytest.approx(expected)


HYBRIDS = {
    # Two of the widths of a head for 3 windows of 16 rows, and the same for all rows of the other.
    "windows": (gemma3_config(), 2 * 64 * 4 * (3 * 16 / PREFIX + 1)),
    # Three recurrent layers: a convolution's 3 inputs, and 32 x 32 for each of 4 heads.
    "recurrent": (qwen3_next_config(), None),
    "in a list": (None, None),
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_layers_that_are_no_rows_are_scored_too(windows: list[Window], name: str) -> None:
    config, expected = HYBRIDS[name]
    model = animal("falcon_h1") if config is None else tiny_model(config)
    layout = probe(LiveCaches(model))
    assert layout.checkpointed
    found = scores(model, layout, windows, stored(layout, "none", "q8"))
    full, none, q8 = (found[policy] for policy in (FULL, "none", "q8"))
    assert none.mean_kl == pytest.approx(0, abs=1e-6)
    assert none.flip_rate == 0
    assert none.bytes_per_token == full.bytes_per_token
    if expected is not None:
        assert full.bytes_per_token == pytest.approx(expected)
    assert q8.mean_kl > 0
    assert q8.ratio > 1


@pytest.mark.parametrize(("tokens", "count"), [(400, 3), (293, 1), (305, 2), (304, 1), (2000, 24)])
def test_windows_reach_from_end_to_end_and_score_nothing_twice(tokens: int, count: int) -> None:
    text = list(range(tokens))
    made = cut([7], text, PREFIX, SCORED, count if tokens == 400 else 24)
    assert len(made) == count
    assert made[0].prefix[:2] == (7, 0)
    scored = [token for window in made for token in window.rest[1:]]
    assert len(scored) == len(set(scored)) == count * SCORED
    for window in made:
        assert len(window.prefix) == 1 + PREFIX
        whole = (*window.prefix[1:], *window.rest)
        assert whole == tuple(range(whole[0], whole[0] + PREFIX + 1 + SCORED))
    if count > 1:
        assert scored[-1] == tokens - 1


def test_a_text_that_is_too_short_has_no_window() -> None:
    assert cut([], list(range(PREFIX + SCORED)), PREFIX, SCORED, 4) == []
