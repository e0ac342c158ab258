"""Prompts of the batch that stop where they are told to: the step that ends there says so."""

from typing import Any

import numpy as np
import pytest

from engine.batch import Batch, BatchMode, BatchShape, Reached
from engine.config import PrefillStep
from engine.kv.live import LiveCaches
from tests.support.cores import alone
from tests.support.models import gpt_bigcode_config, tiny_llama, tiny_model

STEP = PrefillStep(idle=16, busy=8)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(int(t) for t in np.random.default_rng(seed).integers(0, 256, length))


class Stopping:
    """A batch, what its rows reached and generated, and what each of them held step by step."""

    def __init__(self, model: Any, mode: BatchMode = BatchMode.BATCHED, rows_max: int = 4) -> None:
        self.batch = Batch(LiveCaches(model), BatchShape(mode, rows_max, STEP))
        self.reached: list[Reached] = []
        self.held: dict[int, list[int]] = {}
        self.replies: dict[int, list[int]] = {}

    def insert(self, tokens: tuple[int, ...], *stops: int) -> int:
        uid = self.batch.insert(tokens, None, 0, None, None, stops)
        self.held[uid], self.replies[uid] = [], []
        return uid

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            result = self.batch.step()
            for each in result.reached:
                assert self.batch.held(each.uid) == each.position
            self.reached += result.reached
            for uid, held in self.held.items():
                held.append(self.batch.held(uid))
            for token in result.tokens:
                self.replies[token.uid].append(token.token)

    def of(self, uid: int) -> list[int]:
        return [each.position for each in self.reached if each.uid == uid]


@pytest.mark.parametrize(
    "mode", [BatchMode.BATCHED, BatchMode.PREFILL_ONE, BatchMode.ONE_ROW], ids=lambda m: m.value
)
def test_a_prompt_stops_where_it_is_told_to_and_at_its_ends(mode: BatchMode) -> None:
    model = tiny_model(gpt_bigcode_config()) if mode is BatchMode.ONE_ROW else tiny_llama()
    row = Stopping(model, mode, 1 if mode is BatchMode.ONE_ROW else 4)
    uid = row.insert(prompt(1, 60), 5, 6, 32, 55, 59)
    row.step(12)
    assert row.of(uid) == [5, 6, 32, 55, 59, 60]
    # The steps between are as long as they were, from each stop on.
    assert row.held[uid][:8] == [5, 6, 22, 32, 48, 55, 59, 60]
    assert row.replies[uid] == alone(model, prompt(1, 60), len(row.replies[uid])).tokens


def test_without_stops_a_prompt_stops_at_its_ends_alone(llama: Any) -> None:
    row = Stopping(llama)
    uid = row.insert(prompt(2, 40))
    row.step(6)
    assert row.of(uid) == [39, 40]
    assert row.held[uid][:4] == [16, 32, 39, 40]


def test_an_end_may_be_named_and_a_prompt_be_short(llama: Any) -> None:
    row = Stopping(llama)
    whole = row.insert(prompt(3, 20), 19, 20)
    one = row.insert((7,), 1)
    row.step(5)
    assert row.of(whole) == [19, 20]
    assert row.of(one) == [1]


def test_steps_are_short_while_others_decode(llama: Any) -> None:
    row = Stopping(llama)
    row.insert(prompt(4, 3))
    while not row.batch.decoding:
        row.step()
    uid = row.insert(prompt(5, 40), 10, 30)
    row.step(8)
    assert row.held[uid][-8:] == [8, 10, 18, 26, 30, 38, 39, 40]


@pytest.mark.parametrize("mode", [BatchMode.BATCHED, BatchMode.PREFILL_ONE])
def test_prompts_beside_each_other_stop_each_for_itself(llama: Any, mode: BatchMode) -> None:
    row = Stopping(llama, mode)
    stops = {row.insert(prompt(n, 20 + 9 * n), *range(3 + n, 20 + 9 * n, 7)): n for n in range(4)}
    row.step(60)
    for uid, n in stops.items():
        length = 20 + 9 * n
        assert row.of(uid) == sorted({*range(3 + n, length, 7), length - 1, length})
        assert row.replies[uid] == alone(llama, prompt(n, length), len(row.replies[uid])).tokens


@pytest.mark.parametrize("stops", [(0,), (5, 4), (9, 11)])
def test_stops_ascend_within_what_is_not_cached(llama: Any, stops: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        Stopping(llama).insert(prompt(6, 10), *stops)
