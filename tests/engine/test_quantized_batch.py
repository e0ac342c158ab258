"""Quantized histories in a batch: at every step, in every layer, attention over a row's own packed
bytes. Free runs are never compared: a neighbour's float noise moves codes."""

import itertools
import os
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import RotatingKVCache

from engine import smollm2
from engine.batch import Batch, BatchMode, BatchShape
from engine.config import PrefillStep
from engine.kv import live, routing
from engine.kv.attention import STRATEGIES, PackedDecode, PackedMatmul
from engine.kv.history import Precision
from engine.kv.live import LiveCaches
from engine.kv.rotating import WindowHistory
from engine.kvconfig import WINDOW_KEEP, KvConfig
from tests.support.models import (
    deepseek_config,
    gemma3_config,
    gemma3n_config,
    gemma4_config,
    gpt_oss_config,
    llama_config,
    qwen3_next_config,
    tiny_model,
)
from tests.support.oracle import Oracle, compared

STEP = PrefillStep(idle=16, busy=8)
TOLERANCE = 1e-5
# BOUNDED_TOKENS=1000 for a long look at the real model.
BOUNDED_TOKENS = int(os.environ.get("BOUNDED_TOKENS", "60"))
HISTORIES = (0, 3, 16, 17, 40, 300)
BITS = [(8, 8), (4, 4), (8, 4), (4, 8)]


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(int(t) for t in np.random.default_rng(seed).integers(0, 256, length))


def quantized(model: Any, config: KvConfig, rotate: bool = False) -> LiveCaches:
    with routing.installed(PackedMatmul()):
        return live.choose(model, config, rotate)


class Run:
    """A batch whose attention is compared at every call."""

    def __init__(self, caches: LiveCaches, oracle: Oracle, rows_max: int = 6) -> None:
        self.caches = caches
        self.oracle = oracle
        self.batch = Batch(caches, BatchShape(BatchMode.BATCHED, rows_max, STEP))
        self.replies: dict[int, list[int]] = {}

    def insert(self, history: int, seed: int) -> int:
        """A row with so many tokens cached, or a cold one without."""
        tokens = prompt(seed, history + 5)
        caches = None
        if history:
            caches = self.caches.fresh()
            mx.eval(self.caches.model(mx.array([tokens[:history]]), cache=caches))
        uid = self.batch.insert(tokens, caches, history, None)
        self.replies[uid] = []
        return uid

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for token in self.batch.step().tokens:
                self.replies[token.uid].append(token.token)
            assert self.oracle.worst <= TOLERANCE

    def decode_all(self, steps: int = 3) -> None:
        while not all(self.replies.values()):
            self.step()
        self.step(steps)


def mixed(run: Run, order: list[int]) -> None:
    """Hits and misses join in this order, some leave in the middle, others join after them."""
    uids = []
    for seed, history in enumerate(order):
        uids.append(run.insert(history, seed))
        run.step()
    run.decode_all()
    leaving = uids[1:4]
    run.batch.remove(leaving)
    for uid in leaving:
        del run.replies[uid]
    run.step(2)
    uids.append(run.insert(23, 99))
    run.decode_all()
    assert run.oracle.columns >= max(order)
    assert run.oracle.calls


@pytest.mark.parametrize(
    "order", [HISTORIES, HISTORIES[::-1]], ids=["shorter-first", "longer-first"]
)
@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("bits", BITS, ids=str)
def test_each_row_attends_to_its_own_packed_rows(
    bits: tuple[int, int], rotate: bool, order: tuple[int, ...], llama: Any
) -> None:
    caches = quantized(llama, KvConfig(bits), rotate)
    with compared(STRATEGIES["packed-matmul"]) as oracle:
        mixed(Run(caches, oracle), list(order))


# Every bits, rotated or not, with every strategy, and each shape with three of them.
SHAPES = list(
    zip(
        itertools.product([1, 2, 3], [64, 96, 128, 256], STRATEGIES),
        itertools.cycle(itertools.product(BITS, [False, True])),
    )
)


@pytest.mark.parametrize(("shape", "held"), SHAPES, ids=str)
def test_of_every_shape(shape: tuple[int, int, str], held: tuple[tuple[int, int], bool]) -> None:
    kv_heads, head_dim, strategy = shape
    bits, rotate = held
    model = tiny_model(llama_config(heads=2 * kv_heads, kv_heads=kv_heads, head_dim=head_dim))
    caches = quantized(model, KvConfig(bits, group_size=32), rotate)
    with compared(STRATEGIES[strategy]) as oracle:
        mixed(Run(caches, oracle), [40, 0, 3, 17])


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("bits", "rotate", "order"),
    [
        ((8, 8), False, [17, 0, 300, 3]),
        ((8, 8), True, [3, 17]),
        ((4, 4), False, [17, 0]),
        ((4, 4), True, [16, 40, 3, 0]),
        ((8, 4), False, [0, 16]),
        ((8, 4), True, [3, 60, 0, 17]),
        ((4, 8), False, [0, 3, 16, 40]),
        ((4, 8), True, [40, 3]),
    ],
    ids=["8", "8-rotated", "4", "4-rotated", "8,4", "8,4-rotated", "4,8", "4,8-rotated"],
)
def test_the_real_model(
    bits: tuple[int, int], rotate: bool, order: list[int], smollm2_model: Any
) -> None:
    caches = quantized(smollm2_model, KvConfig(bits), rotate)
    with compared(STRATEGIES["packed-decode"]) as oracle:
        mixed(Run(caches, oracle), order)


def test_bounded_windows_too(llama: Any) -> None:
    caches = quantized(llama, KvConfig((8, 4), max_size=24))
    with compared(STRATEGIES["packed-matmul"]) as oracle:
        run = Run(caches, oracle)
        for seed, history in enumerate((0, 3, 23, 24, 60)):
            run.insert(history, seed)
            run.step(2)
        run.decode_all()
        oracle.columns = 0
        run.step(40)
        assert oracle.columns == 24
        assert all(layer.size() == 24 for layer in run.batch._decoding.prompt_cache)


def decoding(
    model: Any, config: KvConfig, prompt_tokens: int, tokens: int
) -> Iterator[tuple[int, Batch]]:
    """Three requests at once; after each step how many tokens each has got."""
    batch = Batch(quantized(model, config), BatchShape(BatchMode.BATCHED, 3, STEP))
    for seed in range(3):
        batch.insert(prompt(seed, prompt_tokens), None, 0, None)
    with routing.installed(PackedDecode()):
        made = 0
        while made < tokens:
            made += bool(batch.step().tokens)
            yield made, batch


class Shadows:
    """mlx-lm's caches of single requests, fed what our windows of the batch are fed."""

    def __init__(self, patch: pytest.MonkeyPatch, layers: int, max_size: int) -> None:
        self.layers: list[Any] = [
            [RotatingKVCache(max_size, WINDOW_KEEP) for _ in range(3)] for _ in range(layers)
        ]
        update = WindowHistory.update_and_fetch
        turn = itertools.cycle(self.layers)

        def both(window: WindowHistory, keys: mx.array, values: mx.array) -> Any:
            # The layers of a model come one after the other, those of the batch alone.
            if len(keys) == 3:
                for index, cache in enumerate(next(turn)):
                    cache.update_and_fetch(keys[index : index + 1], values[index : index + 1])
            return update(window, keys, values)

        patch.setattr(WindowHistory, "update_and_fetch", both)


@pytest.mark.parametrize(
    ("model", "tokens", "flat_bytes", "scratch_bytes"),
    [
        ("llama", 1000, 1 << 16, 1 << 16),
        pytest.param(
            *("smollm2_model", BOUNDED_TOKENS, 1 << 20, 1 << 24), marks=pytest.mark.real_model
        ),
    ],
)
def test_bounded_windows_hold_what_mlx_lm_would_quantized_in_flat_memory(
    model: str,
    tokens: int,
    flat_bytes: int,
    scratch_bytes: int,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`flat_bytes`: what memory may move by; unbounded rows would take more in 50 steps.
    `scratch_bytes`: what a step may take beside what is held."""
    loaded, size = request.getfixturevalue(model), 128
    shadows = Shadows(monkeypatch, len(loaded.layers), size)
    held, peaks = [], []
    for made, batch in decoding(loaded, KvConfig((8, 4), max_size=size), size, tokens):
        windows = batch._decoding.prompt_cache
        mx.eval([cache.state for layer in shadows.layers for cache in layer])
        if made > 5:
            held.append(mx.get_active_memory())
            peaks.append(mx.get_peak_memory())
        mx.reset_peak_memory()
    assert max(held) - min(held) < flat_bytes
    assert max(peaks) - min(peaks) < flat_bytes
    assert max(peaks) - max(held) < scratch_bytes
    precision = Precision.affine((8, 4))
    for window, caches in zip(windows, shadows.layers, strict=True):
        assert window.size() == size
        for index, cache in enumerate(caches):
            assert int(window.offset[index]) == cache.offset >= size + tokens
            rows = (cache._temporal_order(part) for part in (cache.keys, cache.values))
            expected = precision.decode(precision.split(precision.encode(*rows)))
            for ours, theirs in zip(window.temporal(index), expected, strict=True):
                assert mx.array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("config", "packed"),
    [
        (gemma3_config(), 4),
        (gpt_oss_config(), 2),
        (deepseek_config(2), 2),
        (qwen3_next_config(), 1),
    ],
    ids=["windows", "sinks", "keys wider than values", "recurrent layers"],
)
def test_layers_of_every_kind(config: Any, packed: int) -> None:
    model = tiny_model(config)
    caches = quantized(model, KvConfig((8, 4), 32))
    assert len(caches.precisions) == packed
    with compared(STRATEGIES["packed-decode"]) as oracle:
        mixed(Run(caches, oracle), [40, 0, 3, 17])


@pytest.mark.parametrize("config", [gemma3n_config, gemma4_config])
def test_layers_that_read_the_rows_of_another(config: Any) -> None:
    """They come to the same attention, with the packed rows of the layer that they share."""
    model = tiny_model(config())
    caches = quantized(model, KvConfig((8, 4)), rotate=True)
    assert len(caches.precisions) == len(caches.fresh()) == 2 < len(model.layers)
    with compared(STRATEGIES["packed-matmul"]) as oracle:
        with routing.counted() as count:
            model(mx.array([prompt(0, 5)]), cache=caches.fresh())
        assert count.calls == len(model.layers)
        mixed(Run(caches, oracle), [40, 0, 3, 17])


def test_the_answer_may_depend_on_the_very_first_token(llama: Any) -> None:
    """Grouped queries behind histories of unequal length: the first row is not lost."""
    caches = quantized(llama, KvConfig((8, 8)))
    with routing.installed(PackedMatmul()):
        logprobs = {}
        for first in (5, 200):
            batch = Batch(caches, BatchShape(BatchMode.BATCHED, 2, STEP))
            batch.insert(prompt(0, 60), None, 0, None)
            uid = batch.insert((first, *prompt(1, 11)), None, 0, None)
            given: dict[int, list[mx.array]] = {}
            while len(given.get(uid, [])) < 3:
                for token in batch.step().tokens:
                    given.setdefault(token.uid, []).append(token.logprobs)
            alone = caches.fresh()
            llama(mx.array([[first, *prompt(1, 10)]]), cache=alone)
            logits = llama(mx.array([[prompt(1, 11)[-1]]]), cache=alone)[0, -1]
            expected = logits - mx.logsumexp(logits)
            # Codes may move with float noise, but not by a token.
            assert mx.abs(given[uid][0] - expected).max() < 0.05
            logprobs[first] = expected
    assert mx.abs(logprobs[5] - logprobs[200]).max() > 0.5


@pytest.fixture(scope="module")
def smollm2_model() -> Any:
    from engine import backend  # noqa: PLC0415
    from engine.model import ModelSpec, load  # noqa: PLC0415

    return load(ModelSpec(smollm2.ALIAS), backend.describe()).model
