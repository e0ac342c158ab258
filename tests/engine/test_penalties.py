"""Penalties and biases: by hand, against mlx-lm's generation, and over cached tokens."""

from collections import Counter
from typing import Any

import grpc
import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors

from engine import core
from engine.penalties import Penalizer, penalizer_for
from engine.request import Penalties, Penalty, Sampling
from engine.v1 import engine_pb2 as pb
from tests.support.cores import LONG, SHORT, Driven, alone
from tests.support.engines import Reply, assert_same, ids
from tests.support.served import Served

TOKENS = 12
TOLERANCE = 2e-4
BIAS = {7: 3.0, 200: -100.0, 31: 1.5}
# By name: ours, and mlx-lm's arguments for the same.
PENALTIES: dict[str, tuple[Penalties, dict[str, Any]]] = {
    "repetition": (Penalties(Penalty(1.3)), {"repetition_penalty": 1.3}),
    "less than 1": (Penalties(Penalty(0.7)), {"repetition_penalty": 0.7}),
    "presence": (Penalties(presence=Penalty(1.5)), {"presence_penalty": 1.5}),
    "frequency": (Penalties(frequency=Penalty(0.6)), {"frequency_penalty": 0.6}),
    "encouraged": (Penalties(frequency=Penalty(-0.6)), {"frequency_penalty": -0.6}),
    "bias": (Penalties(logit_bias=BIAS), {"logit_bias": BIAS}),
    "all, each with its own context": (
        Penalties(Penalty(1.2, 1000), Penalty(0.8, 50), Penalty(0.4, 1), BIAS),
        {
            "repetition_penalty": 1.2,
            "repetition_context_size": 1000,
            "presence_penalty": 0.8,
            "presence_context_size": 50,
            "frequency_penalty": 0.4,
            "frequency_context_size": 1,
            "logit_bias": BIAS,
        },
    ),
}


def theirs(llama: Any, tokens: list[int], name: str, **options: Any) -> Reply:
    processors = make_logits_processors(**PENALTIES[name][1])
    return alone(llama, tokens, TOKENS, logits_processors=processors, **options)


# --- formulas ------------------------------------------------------------------------------


def by_hand(logits: list[float], seen: list[int], penalties: Penalties) -> npt.NDArray[Any]:
    """The formulas, a token at a time."""
    result = np.array(logits)
    for token, bias in penalties.logit_bias.items():
        result[token] += bias
    if penalties.repetition:
        for token in set(seen[-penalties.repetition.context_tokens :]):
            value = penalties.repetition.value
            result[token] = result[token] * value if result[token] < 0 else result[token] / value
    if penalties.presence:
        for token in set(seen[-penalties.presence.context_tokens :]):
            result[token] -= penalties.presence.value
    if penalties.frequency:
        for token, times in Counter(seen[-penalties.frequency.context_tokens :]).items():
            result[token] -= times * penalties.frequency.value
    return result


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize(
    "penalties",
    [
        Penalties(Penalty(2.0)),
        Penalties(Penalty(0.5, 3)),
        Penalties(presence=Penalty(1.5)),
        Penalties(frequency=Penalty(0.5)),
        Penalties(frequency=Penalty(-0.5, 4)),
        Penalties(logit_bias={0: 2.5, 5: -4.0}),
        Penalties(Penalty(2.0), Penalty(1.0), Penalty(0.25, 2), {1: 8.0}),
    ],
    ids=str,
)
def test_logits_are_changed_as_the_formulas_say(penalties: Penalties, dtype: mx.Dtype) -> None:
    logits = [1.0, -2.0, 3.5, 0.0, -0.5, 4.0]
    seen = [2, 1, 1, 4, 1, 0]
    penalizer = penalizer_for(penalties)
    assert penalizer is not None
    changed = penalizer(mx.array(seen, mx.int32), mx.array([logits], dtype))
    # The other rows of the batch keep their dtype only if this one does.
    assert changed.dtype == dtype
    assert penalizer.failure is None
    found = np.array(changed.astype(mx.float32))[0]
    np.testing.assert_allclose(found, by_hand(logits, seen, penalties), rtol=1e-6)


def test_without_penalties_there_is_no_penalizer() -> None:
    assert penalizer_for(Penalties()) is None


# --- against mlx-lm ------------------------------------------------------------------------


class Observed(Driven):
    """With log-probabilities of everything."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.replies: dict[int, Reply] = {}
        self.core.observe = self._observe

    def _observe(self, request_id: int, token: Any) -> None:
        reply = self.replies.setdefault(request_id, Reply())
        reply.tokens.append(token.token)
        reply.logprobs.append(np.array(token.logprobs))


@pytest.fixture
def observed(llama: Any) -> Observed:
    return Observed(llama)


@pytest.mark.parametrize("name", PENALTIES)
def test_a_reply_is_that_of_mlx_lm_whoever_else_is_in_the_batch(
    observed: Observed, llama: Any, name: str
) -> None:
    sampling = Sampling(penalties=PENALTIES[name][0])
    observed.start(1, SHORT, max_tokens=TOKENS)
    observed.start(2, LONG, max_tokens=TOKENS, sampling=sampling)
    observed.core.turn()
    observed.start(3, SHORT, max_tokens=TOKENS, sampling=sampling)
    observed.turn_until_idle()
    assert_same(observed.replies[1], alone(llama, SHORT, TOKENS), TOLERANCE)
    for request_id, tokens in ((2, LONG), (3, SHORT)):
        expected = theirs(llama, tokens, name)
        assert expected.tokens != alone(llama, tokens, TOKENS).tokens
        assert_same(observed.replies[request_id], expected, TOLERANCE)


@pytest.mark.parametrize("rows", [1, 16, 55, len(LONG) - 1])
@pytest.mark.parametrize("name", PENALTIES)
def test_cached_tokens_are_seen_too(observed: Observed, llama: Any, name: str, rows: int) -> None:
    sampling = Sampling(penalties=PENALTIES[name][0])
    observed.start_behind(1, LONG, rows, max_tokens=TOKENS, sampling=sampling)
    observed.turn_until_idle()
    assert observed.done(1).usage.cached_tokens == rows
    assert_same(observed.replies[1], theirs(llama, LONG, name), TOLERANCE)


def test_that_they_are_seen_makes_a_difference(llama: Any) -> None:
    name, rows = "all, each with its own context", 55
    caches = make_prompt_cache(llama)
    mx.eval(llama(mx.array([LONG[:rows]]), cache=caches))
    blind = theirs(llama, LONG[rows:], name, prompt_cache=caches)
    assert np.abs(blind.logprobs[0] - theirs(llama, LONG, name).logprobs[0]).max() > 0.01


def test_a_drawn_reply_is_the_same_for_hit_and_miss(driven: Driven) -> None:
    sampling = Sampling(1.0, seed=5, penalties=PENALTIES["repetition"][0])
    driven.start(1, LONG, max_tokens=TOKENS, sampling=sampling)
    driven.turn_until_idle()
    driven.start_behind(2, LONG, 60, max_tokens=TOKENS, sampling=sampling)
    driven.turn_until_idle()
    assert driven.deltas(1) == driven.deltas(2)


# --- failures ------------------------------------------------------------------------------


@pytest.mark.parametrize("good_steps", [0, 3])
def test_a_row_whose_penalty_fails_fails_alone(
    driven: Driven, llama: Any, monkeypatch: pytest.MonkeyPatch, good_steps: int
) -> None:
    def fail(tokens: mx.array, logits: mx.array) -> mx.array:
        if len(tokens) >= len(SHORT) + good_steps:
            raise MemoryError("no penalty")
        return logits

    def failing(penalties: Penalties) -> Penalizer | None:
        penalizer = penalizer_for(penalties)
        if penalizer is not None:
            penalizer._processors = [fail]
        return penalizer

    monkeypatch.setattr(core, "penalizer_for", failing)
    driven.start(1, LONG, max_tokens=8)
    driven.start(2, SHORT, max_tokens=8, sampling=Sampling(penalties=Penalties(Penalty(2.0))))
    driven.turn_until_idle()
    assert driven.failed(2).code == grpc.StatusCode.INTERNAL
    assert "no penalty" in driven.failed(2).message
    expected = alone(llama, SHORT, 8).tokens
    assert driven.deltas(2) == expected[: len(driven.deltas(2))]
    assert len(driven.deltas(2)) <= good_steps
    assert driven.deltas(1) == alone(llama, LONG, 8).tokens
    driven.check_empty()


# --- the service ---------------------------------------------------------------------------


def test_a_hit_of_the_store_is_penalized_as_its_miss(served: Served) -> None:
    sampling = pb.Sampling(
        repetition_penalty=1.3, repetition_context_size=1000, presence_penalty=1.0
    )
    fields = {"prompt": ids(LONG), "max_tokens": TOKENS, "ignore_eos": True}
    replies = [served.generate(**fields, sampling=sampling) for _ in range(2)]
    (miss, _, cold), (hit, _, warm) = replies
    assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, len(LONG) - 1)
    assert hit == miss
    assert hit != served.generate(**fields)[0]


def test_a_bias_of_100_decides(served: Served) -> None:
    sampling = pb.Sampling(logit_bias={65: 100.0})
    tokens, _, _ = served.generate(prompt=ids(SHORT), max_tokens=3, sampling=sampling)
    assert tokens == [65] * 3
