"""The zoo is what it says: every kind of cache, where anything wrong in any of them shows."""

import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import CacheList, make_prompt_cache

from engine.batch import BatchMode
from engine.kv import routing
from engine.kv.attention import PackedMatmul, Strategy
from engine.kv.layout import probe
from engine.kv.live import LiveCaches
from engine.selfcheck import choose_mode
from tests.support.models import VOCABULARY_TOKENS, tiny_model
from tests.support.zoo import HEIRS, METAL_ONLY, WRAPPERS, ZOO, animal

HISTORY_TOKENS = 40
# Far beyond any float noise (law 1: 2e-4).
SHOWS = 1e-2

# How each has to run; those that are not named can be batched.
MODES: dict[str, BatchMode] = {
    # Right padding reaches their recurrent state or their convolution.
    **dict.fromkeys(
        (
            *("mamba", "jamba", "nemotron_h", "rwkv7", "recurrent_gemma", "baichuan_m1"),
            *("bailing_moe_linear", "longcat_flash_ngram", "olmo_hybrid"),
        ),
        BatchMode.PREFILL_ONE,
    ),
    # A mask or an offset of several rows is taken for that of one, or the cache has no `merge`.
    **dict.fromkeys(
        ("gemma2", "gpt_bigcode", "afm7", "minimax_m3_vl", "llama4", "deepseek_v41"),
        BatchMode.ONE_ROW,
    ),
}


def history(seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 256, HISTORY_TOKENS)]


def filled(model: Any, tokens: Sequence[int]) -> list[Any]:
    """The model's caches after these tokens."""
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([tokens]), cache=caches))
    return caches


def leaves(caches: Sequence[Any]) -> list[Any]:
    """Lists of caches flattened."""
    return [
        leaf
        for cache in caches
        for leaf in (cache.caches if isinstance(cache, CacheList) else [cache])
    ]


def next_logprobs(model: Any, caches: list[Any]) -> Any:
    logits = model(mx.array([[5]]), cache=caches)[0, -1].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits))


@pytest.mark.parametrize("name", ZOO)
def test_the_first_token_of_a_history_shows_at_its_end(name: str) -> None:
    model = animal(name)
    tokens = history(0)
    right = next_logprobs(model, filled(model, tokens))
    changed = next_logprobs(model, filled(model, [(tokens[0] + 1) % 256, *tokens[1:]]))
    dropped = next_logprobs(model, filled(model, tokens[1:]))
    assert np.isfinite(right).all()
    assert np.abs(changed - right).max() > SHOWS
    assert np.abs(dropped - right).max() > SHOWS


@pytest.mark.parametrize("name", ZOO)
def test_the_cache_of_another_history_shows_in_any_layer(name: str) -> None:
    model = animal(name)
    right = next_logprobs(model, filled(model, history(0)))
    for index in range(len(leaves(make_prompt_cache(model)))):
        caches, others = filled(model, history(0)), filled(model, history(1))
        vars(leaves(caches)[index]).update(vars(leaves(others)[index]))
        wrong = next_logprobs(model, caches)
        assert np.abs(wrong - right).max() > SHOWS, f"cache {index}"


@pytest.mark.parametrize("name", ZOO)
def test_each_architecture_runs_in_the_batch_as_it_can(name: str) -> None:
    assert choose_mode(animal(name), VOCABULARY_TOKENS) is MODES.get(name, BatchMode.BATCHED)


@pytest.mark.parametrize("name", ZOO)
def test_no_architecture_shows_a_token_later_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or else blocks of a prompt, as a CPU is asked for them (kv/on_cpu.py), would hide some."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.DeviceType.cpu))
    model = animal(name)
    alone = MODES.get(name) is BatchMode.ONE_ROW

    def logits(strategy: Strategy | None) -> Any:
        with routing.installed(strategy):
            rows = [LiveCaches(model).fresh() for _ in range(1 if alone else 2)]
            for n, caches in enumerate(rows):
                mx.eval(model(mx.array([history(n)[: 9 - 4 * n]]), cache=caches))
            layers = list(zip(*rows, strict=True))
            held = rows[0] if alone else [of_rows[0].merge(list(of_rows)) for of_rows in layers]
            tokens = [history(n + 2) + history(n + 4) for n in range(len(rows))]
            return np.array(model(mx.array(tokens), cache=held).astype(mx.float32))

    expected = logits(None)
    assert np.abs(logits(PackedMatmul()) - expected).max() < 1e-3 * np.abs(expected).max()


def wrapped(name: str) -> Any:
    """A model around one of the zoo."""
    text = ZOO[WRAPPERS[name]]()
    return tiny_model({"model_type": name, "text_config": text, "vocab_size": VOCABULARY_TOKENS})


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_model_around_another_is_cached_and_runs_as_that_one(name: str) -> None:
    outer, inner = wrapped(name), animal(WRAPPERS[name])
    assert probe(LiveCaches(outer)) == probe(LiveCaches(inner))
    assert choose_mode(outer, VOCABULARY_TOKENS) is choose_mode(inner, VOCABULARY_TOKENS)


def sources() -> dict[str, str]:
    """Of all architectures of the installed mlx-lm."""
    found = files("mlx_lm.models").iterdir()
    return {m.name[:-3]: m.read_text() for m in found if m.name.endswith(".py")}


def test_no_architecture_with_a_cache_of_its_own_is_forgotten() -> None:
    makes = re.compile(
        r"def make_cache(?:(?!\n    def |\n    @).)*?(?!\bKVCache\()\b[A-Z]\w*Cache(?:List)?\(",
        re.S,
    )
    found = {name for name, source in sources().items() if makes.search(source)}
    assert found <= {*ZOO, *METAL_ONLY}, "new in this mlx-lm"
    assert {"ministral3", "falcon_h1", "llama4"} <= found


def test_no_architecture_with_the_caches_of_another_is_forgotten() -> None:
    """But for what has plain rows, as any model that makes no caches."""
    takes = re.compile(r"\.make_cache\(\)|^class Model\((?!nn\.Module\))", re.M)
    found = {name for name, source in sources().items() if takes.search(source)}
    assert found - ZOO.keys() - {"cache"} == {*WRAPPERS, *HEIRS}
