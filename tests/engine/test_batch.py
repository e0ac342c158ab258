"""Rows of the batch against mlx-lm's own caches of the same tokens, as others join and leave."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from engine.batch import Batch, BatchMode, BatchShape
from engine.config import PrefillStep
from engine.kv.history import FULL, JoiningKVCache
from engine.kv.layout import probe
from engine.kv.live import LiveCaches
from tests.support.cores import alone
from tests.support.models import gpt_bigcode_config, llama_config, tiny_model

STEP = PrefillStep(idle=16, busy=8)
TOLERANCE = 1e-4


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(int(t) for t in np.random.default_rng(seed).integers(0, 256, length))


def make_batch(model: Any, mode: BatchMode = BatchMode.BATCHED, rows_max: int = 4) -> Batch:
    return Batch(LiveCaches(model), BatchShape(mode, rows_max, STEP))


class Rows:
    """A batch and the tokens that each of its rows has been given and has generated."""

    def __init__(self, model: Any, mode: BatchMode = BatchMode.BATCHED, rows_max: int = 4) -> None:
        self.model = model
        self.layout = probe(LiveCaches(model))
        self.batch = make_batch(model, mode, rows_max)
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.replies: dict[int, list[int]] = {}

    def insert(self, tokens: tuple[int, ...], cached: int = 0) -> int:
        caches = None
        if cached:
            caches = LiveCaches(self.model).fresh()
            mx.eval(self.model(mx.array([tokens[:cached]]), cache=caches))
        uid = self.batch.insert(tokens, caches, cached, None)
        self.prompts[uid] = tokens
        self.replies[uid] = []
        return uid

    def step(self, count: int = 1) -> int:
        """Prompt tokens computed."""
        computed = 0
        for _ in range(count):
            result = self.batch.step()
            computed += result.computed
            for token in result.tokens:
                self.replies[token.uid].append(token.token)
                assert token.token == int(np.array(token.logprobs).argmax())
        return computed

    def remove(self, *uids: int) -> None:
        self.batch.remove(list(uids))
        for uid in uids:
            del self.prompts[uid]

    def check(self) -> None:
        """Each row holds what the model computes alone for the tokens that it stands for."""
        for uid, tokens in self.prompts.items():
            held = self.batch.held(uid)
            path = (*tokens, *self.replies[uid])
            assert held <= len(path)
            if not held:
                continue
            caches = make_prompt_cache(self.model)
            mx.eval(self.model(mx.array([path[:held]]), cache=caches))
            for first, end in {(0, held), (held // 2, held), (held - 1, held), (0, 1), (0, 0)}:
                for ((keys,), (values,)), cache in zip(
                    self.batch.rows(uid, self.layout, first, end), caches, strict=True
                ):
                    assert keys.shape[:3] == (1, cache.keys.shape[1], end - first)
                    close(keys, cache.keys[:, :, first:end])
                    close(values, cache.values[:, :, first:end])


def close(actual: mx.array, expected: mx.array) -> None:
    np.testing.assert_allclose(np.array(actual), np.array(expected), atol=TOLERANCE)


# --- what rows hold ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [BatchMode.BATCHED, BatchMode.PREFILL_ONE])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_unequal_rows_hold_their_own_after_every_step(mode: BatchMode, kv_heads: int) -> None:
    rows = Rows(tiny_model(llama_config(kv_heads=kv_heads)), mode)
    for length in (50, 3, 17):
        rows.insert(prompt(length, length))
    for _ in range(14):
        rows.step()
        rows.check()
    for uid, tokens in rows.prompts.items():
        assert rows.replies[uid]
        expected = alone(rows.model, tokens, len(rows.replies[uid])).tokens
        assert rows.replies[uid] == expected


def test_rows_hold_their_own_as_others_join_and_leave(llama: Any) -> None:
    rows = Rows(llama)
    longest = rows.insert(prompt(1, 60))
    first = rows.insert(prompt(2, 5))
    rows.step(3)
    rows.check()
    joined = rows.insert(prompt(3, 30), cached=20)
    rows.step()
    rows.check()
    rows.remove(first)
    rows.check()
    rows.step(3)
    rows.check()
    late = rows.insert(prompt(4, 41), cached=40)
    rows.step(2)
    rows.remove(longest)  # all others move to the left
    rows.check()
    rows.step(2)
    rows.check()
    rows.remove(joined)
    rows.step(2)
    rows.check()
    assert rows.replies[late] == alone(llama, prompt(4, 41), len(rows.replies[late])).tokens


@pytest.mark.parametrize("cached", [1, 15, 16, 17, 39])
def test_a_hit_computes_only_the_rest(llama: Any, cached: int) -> None:
    rows = Rows(llama)
    uid = rows.insert(prompt(5, 40), cached)
    computed = 0
    while not rows.replies[uid]:
        computed += rows.step()
    assert computed == 40 - cached
    rows.check()
    rows.step(4)
    assert rows.replies[uid] == alone(llama, prompt(5, 40), 4).tokens


def test_held_grows_by_chunks_and_then_by_tokens(llama: Any) -> None:
    rows = Rows(llama)
    uid = rows.insert(prompt(6, 40))
    assert rows.batch.held(uid) == 0
    assert rows.batch.held(uid + 1) == 0
    held = []
    while not rows.replies[uid]:
        rows.step()
        held.append(rows.batch.held(uid))
    assert held == [16, 32, 39, 40]
    assert (len(rows.batch), rows.batch.decoding) == (1, 1)
    # The first token has its row after another step, which gives none; later ones at once.
    rows.step()
    assert (len(rows.replies[uid]), rows.batch.held(uid)) == (1, 41)
    rows.step()
    assert (len(rows.replies[uid]), rows.batch.held(uid)) == (2, 42)
    rows.step(3)
    assert rows.batch.held(uid) == 40 + len(rows.replies[uid])
    rows.remove(uid)
    assert rows.batch.held(uid) == 0


def test_prefill_is_in_short_steps_while_rows_decode(llama: Any) -> None:
    rows = Rows(llama)
    rows.insert(prompt(7, 3))
    while not rows.batch.decoding:
        rows.step()
    uid = rows.insert(prompt(8, 60))
    held = []
    for _ in range(3):
        rows.step()
        held.append(rows.batch.held(uid))
    assert held == [8, 16, 24]


def test_a_prompt_of_one_token(llama: Any) -> None:
    rows = Rows(llama)
    uid = rows.insert((7,))
    rows.step(4)
    rows.check()
    assert rows.replies[uid] == alone(llama, (7,), len(rows.replies[uid])).tokens


def test_every_token_is_given_out_once(llama: Any) -> None:
    rows = Rows(llama)
    uids = [rows.insert(prompt(20 + n, 10 + 9 * n)) for n in range(4)]
    for step in range(20):
        rows.step()
        if step == 6:
            rows.remove(uids[0])
    for uid in uids[1:]:
        expected = alone(llama, rows.prompts[uid], len(rows.replies[uid])).tokens
        assert rows.replies[uid] == expected


@pytest.mark.parametrize("cached", [0, 12])
def test_one_row_of_a_model_that_cannot_be_batched(cached: int) -> None:
    model = tiny_model(gpt_bigcode_config())
    rows = Rows(model, BatchMode.ONE_ROW, rows_max=1)
    for seed in range(3):
        uid = rows.insert(prompt(seed, 20), cached)
        for _ in range(8):
            rows.step()
            rows.check()
        expected = alone(model, prompt(seed, 20), len(rows.replies[uid])).tokens
        assert rows.replies[uid] == expected
        rows.remove(uid)


def test_a_batch_takes_one_row_at_a_time_or_says_why() -> None:
    with pytest.raises(AssertionError):
        BatchShape(BatchMode.ONE_ROW, 2, STEP)


@pytest.mark.parametrize("cached", [3, 4])
def test_at_least_one_token_must_be_left(llama: Any, cached: int) -> None:
    with pytest.raises(AssertionError):
        make_batch(llama).insert((1, 2, 3), make_prompt_cache(llama), cached, None)


# --- leaving -----------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 5, 9])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another"])
def test_a_row_can_be_removed_in_every_stage(llama: Any, steps: int, beside: bool) -> None:
    rows = Rows(llama)
    other = rows.insert(prompt(9, 25)) if beside else None
    uid = rows.insert(prompt(10, 40))
    rows.step(steps)
    rows.remove(uid)
    rows.batch.remove([uid, 10_000])
    assert rows.batch.held(uid) == 0
    assert len(rows.batch) == (1 if beside and steps else 0)
    if other is not None:
        rows.step(12)
        rows.check()
        expected = alone(llama, prompt(9, 25), len(rows.replies[other])).tokens
        assert rows.replies[other] == expected
    rows.prompts.clear()
    again = rows.insert(prompt(10, 40))
    rows.step(8)
    assert rows.replies[again] == alone(llama, prompt(10, 40), len(rows.replies[again])).tokens


def test_all_rows_leave_at_once(llama: Any) -> None:
    rows = Rows(llama)
    uids = [rows.insert(prompt(n, 20 * n + 1)) for n in range(4)]
    rows.step(3)
    rows.remove(*uids)
    assert len(rows.batch) == 0
    assert rows.batch.step().tokens == ()


# --- memory ------------------------------------------------------------------------------

HISTORY = 3000
ROWS = 4


class Full:
    """Rows with a long history, for whom a step costs little beside a copy of their caches."""

    def __init__(self, model: Any) -> None:
        self.layout = probe(LiveCaches(model))
        self.batch = make_batch(model)
        tokens = prompt(1, HISTORY + 1)
        for row in range(ROWS):
            caches = [history(row) for _ in range(2)]
            self.uid = self.batch.insert(tokens, caches, HISTORY, None)
        del caches
        for _ in range(4):
            self.batch.step()  # the buffers have grown: the next steps are plain ones
        mx.clear_cache()

    def rows(self, first: int, end: int) -> Any:
        return self.batch.rows(self.uid, self.layout, first, end)

    @property
    def cache_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.batch._decoding.prompt_cache)

    def peak_bytes_of_steps(self, count: int = 3) -> int:
        """The most that MLX held beyond what it holds now."""
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        for _ in range(count):
            self.batch.step()
        return mx.get_peak_memory() - before


def history(seed: int) -> JoiningKVCache:
    key = mx.random.key(seed)
    rows = mx.random.normal((2, 1, 2, HISTORY, 64), key=key)
    arrays = [mx.contiguous(rows[0]), mx.contiguous(rows[1])]
    mx.eval(arrays)
    return JoiningKVCache.of(FULL, arrays, HISTORY)


@pytest.fixture
def full(llama: Any) -> Full:
    return Full(llama)


def test_rows_that_are_taken_and_dropped_cost_no_copy_of_the_caches(full: Full) -> None:
    plain = full.peak_bytes_of_steps()
    assert plain < full.cache_bytes / 4
    rows = full.rows(0, HISTORY)
    mx.eval([mx.contiguous(array) for layer in rows for part in layer for array in part])
    del rows
    assert full.peak_bytes_of_steps() < full.cache_bytes / 4
    unused = full.rows(10, 20)
    del unused
    assert full.peak_bytes_of_steps() < full.cache_bytes / 4


def test_rows_that_are_kept_do(full: Full) -> None:
    """That the test above can fail: a reference across a step is what it looks for."""
    kept = full.rows(0, HISTORY)
    assert full.peak_bytes_of_steps() > full.cache_bytes / 2
    del kept


def test_a_token_keeps_no_cache_alive(full: Full) -> None:
    result = full.batch.step()
    assert full.peak_bytes_of_steps() < full.cache_bytes / 4
    assert len(result.tokens) == ROWS


def test_removed_rows_give_their_memory_back(llama: Any) -> None:
    mx.clear_cache()
    before = mx.get_active_memory()
    full = Full(llama)
    cache_bytes = full.cache_bytes
    assert mx.get_active_memory() - before > cache_bytes / 2
    full.batch.remove([*full.batch._decoding.uids])
    full.batch.step()
    assert mx.get_active_memory() - before < cache_bytes / 20
    full.batch.close()


def test_rows_that_leave_with_their_first_token_leave_nothing(llama: Any) -> None:
    batch = make_batch(llama)

    def active_bytes_after(rows: int) -> int:
        for _ in range(rows):
            uid = batch.insert((1, 2, 3), None, 0, None)
            while not batch.step().tokens:
                pass
            batch.remove([uid])
        return mx.get_active_memory()

    assert active_bytes_after(9) == active_bytes_after(9)
