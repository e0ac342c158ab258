"""Draws against probabilities computed by hand and against mlx-lm's own sampler."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx_lm.sample_utils import make_sampler

from engine.batch import Batch, BatchMode, BatchShape
from engine.config import PrefillStep
from engine.kv.live import LiveCaches
from engine.request import Sampling
from engine.sampling import Sampler, sampler_for
from tests.support.models import tiny_llama

Probabilities = npt.NDArray[np.float64]

# No two alike, and no sum of some of them near the thresholds used below.
PROBABILITIES = np.array([0.02, 0.31, 0.05, 0.22, 0.01, 0.17, 0.13, 0.09])
DRAWS = 40_000
# Five standard deviations of a frequency.
TOLERANCE = 5 * 0.5 / DRAWS**0.5


def frequencies(sample: Callable[[mx.array], mx.array]) -> Probabilities:
    """Of each token, when as many rows as there are draws are sampled at once."""
    logprobs = mx.log(mx.array(PROBABILITIES.astype(np.float32)))
    drawn = np.array(sample(mx.broadcast_to(logprobs, (DRAWS, len(PROBABILITIES)))))
    counts: Probabilities = np.bincount(drawn, minlength=len(PROBABILITIES)) / DRAWS
    return counts


def by_hand(kept: npt.NDArray[np.bool_], temperature: float) -> Probabilities:
    """What is kept, raised to 1 / temperature, as a distribution."""
    weights = np.where(kept, PROBABILITIES, 0.0) ** (1.0 / temperature)
    result: Probabilities = weights / weights.sum()
    return result


def best(count: int) -> npt.NDArray[np.bool_]:
    kept: npt.NDArray[np.bool_] = np.sort(PROBABILITIES)[-count] <= PROBABILITIES
    return kept


ALL = len(PROBABILITIES)
FILTERS = {
    "none": (Sampling(1.0), best(ALL)),
    "cold": (Sampling(0.5), best(ALL)),
    "hot": (Sampling(3.0), best(ALL)),
    "top_k": (Sampling(1.0, top_k=3), best(3)),
    "top_k of one": (Sampling(1.0, top_k=1), best(1)),
    "top_p": (Sampling(1.0, top_p=0.6), best(3)),  # 0.31 + 0.22 is not enough
    "top_p of all": (Sampling(1.0, top_p=1.0), best(ALL)),
    "top_p of one": (Sampling(1.0, top_p=1e-6), best(1)),
    "min_p": (Sampling(1.0, min_p=0.4), best(4)),  # 0.13 / 0.31 is above, 0.09 / 0.31 below
    "min_p of one": (Sampling(1.0, min_p=1.0), best(1)),
    "top_p before temperature": (Sampling(0.5, top_p=0.6), best(3)),
    "min_p before temperature": (Sampling(3.0, min_p=0.4), best(4)),
    "all of them": (Sampling(2.0, top_p=0.8, min_p=0.3, top_k=3), best(3)),
}


@pytest.mark.parametrize("name", FILTERS)
def test_draws_follow_the_filtered_distribution(name: str) -> None:
    sampling, kept = FILTERS[name]
    sampler = Sampler(Sampling(**{**_fields(sampling), "seed": 1}))
    drawn = frequencies(sampler)
    assert sampler.failure is None
    assert not drawn[~kept].any()
    np.testing.assert_allclose(drawn, by_hand(kept, sampling.temperature), atol=TOLERANCE)


@pytest.mark.parametrize("name", FILTERS)
def test_draws_follow_mlx_lms_own_sampler(name: str) -> None:
    sampling, _ = FILTERS[name]
    theirs = make_sampler(
        sampling.temperature, sampling.top_p or 0.0, sampling.min_p, top_k=sampling.top_k
    )
    ours = frequencies(Sampler(Sampling(**{**_fields(sampling), "seed": 2})))
    np.testing.assert_allclose(ours, frequencies(theirs), atol=2 * TOLERANCE)


def _fields(sampling: Sampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in Sampling.__slots__}


# The smallest float of the wire is 1.4e-45.
@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-30, 1e-38, 1e-40, 1.4e-45])
def test_the_smaller_the_temperature_the_greedier(temperature: float) -> None:
    drawn = frequencies(Sampler(Sampling(temperature, seed=3)))
    assert drawn.argmax() == PROBABILITIES.argmax()
    assert drawn.max() == 1.0


@pytest.mark.parametrize("temperature", [1e-4, 1e-7])
def test_a_small_temperature_is_greedy_with_logits_of_16_bits(temperature: float) -> None:
    # The best of many: its log-probability, divided by the temperature, is beyond float16.
    logprobs = mx.full((1, 4096), -9.0, mx.float16)
    logprobs[0, 1000] = -8.0
    sampler = Sampler(Sampling(temperature, seed=4))
    assert [int(sampler(logprobs)) for _ in range(5)] == [1000] * 5


def test_temperature_zero_is_greedy_without_a_sampler() -> None:
    assert sampler_for(Sampling(0.0, top_p=0.5, seed=1)) is None
    assert sampler_for(Sampling(1e-30)) is not None


def draws(seed: int | None, count: int = 40) -> list[int]:
    sampler = Sampler(Sampling(1.0, seed=seed))
    logprobs = mx.log(mx.array(PROBABILITIES.astype(np.float32)))[None]
    return [int(sampler(logprobs)) for _ in range(count)]


def test_a_seed_gives_the_same_draws_and_another_others() -> None:
    seeds = (0, 1, 2**32, 2**63, 2**64 - 1)
    drawn = {seed: draws(seed) for seed in seeds}
    assert all(draws(seed) == drawn[seed] for seed in seeds)
    assert len({tuple(tokens) for tokens in drawn.values()}) == len(seeds)


def test_without_a_seed_each_sampler_draws_on_its_own() -> None:
    assert draws(None) != draws(None)


def test_the_global_random_state_is_neither_used_nor_changed() -> None:
    mx.random.seed(5)
    expected = mx.random.uniform(shape=(4,)).tolist()
    mx.random.seed(5)
    first = draws(7)
    assert mx.random.uniform(shape=(4,)).tolist() == expected
    assert draws(7) == first


def test_an_exception_is_kept_and_never_raised(caplog: pytest.LogCaptureFixture) -> None:
    sampler = Sampler(Sampling(1.0, top_k=ALL + 1))
    logprobs = mx.log(mx.array(PROBABILITIES.astype(np.float32)))[None]
    assert sampler(logprobs).tolist() == [int(PROBABILITIES.argmax())]
    assert isinstance(sampler.failure, ValueError)
    assert "sampler failed" in caplog.text
    # Others on this thread are not harmed.
    assert mx.random.uniform(shape=(2,)).tolist()
    after = Sampler(Sampling(1.0, top_p=0.4, seed=1))
    assert after(logprobs).tolist() == [1]
    assert after.failure is None


# --- through the batch ---------------------------------------------------------------------


STEP = PrefillStep(idle=16, busy=16)
TOKENS = 24
PROMPTS = [[(7 * n + 3 * n * n) % 256 for n in range(length)] for length in (9, 40, 3)]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


def reply(batch: Batch, uid: int, others: dict[int, list[int]] | None = None) -> list[int]:
    """Steps until this row has all its tokens; those of other rows are added to `others`."""
    tokens: list[int] = []
    while len(tokens) < TOKENS:
        for token in batch.step().tokens:
            if token.uid == uid:
                tokens.append(token.token)
            elif others is not None:
                others.setdefault(token.uid, []).append(token.token)
    return tokens


def alone(model: Any, prompt: list[int], sampling: Sampling) -> list[int]:
    batch = Batch(LiveCaches(model), BatchShape(BatchMode.BATCHED, 4, STEP))
    return reply(batch, batch.insert(tuple(prompt), None, 0, sampler_for(sampling)))


SAMPLINGS = [
    Sampling(0.8, seed=1),
    Sampling(1.0, top_p=0.9, seed=1),
    Sampling(1.2, top_k=20, min_p=0.01, seed=2**64 - 1),
    Sampling(0.0),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_a_reply_is_the_same_alone_and_among_others(model: Any, sampling: Sampling) -> None:
    expected = alone(model, PROMPTS[0], sampling)
    batch = Batch(LiveCaches(model), BatchShape(BatchMode.BATCHED, 4, STEP))
    first = batch.insert(tuple(PROMPTS[1]), None, 0, sampler_for(Sampling(1.0, seed=9)))
    for _ in range(5):
        batch.step()
    uid = batch.insert(tuple(PROMPTS[0]), None, 0, sampler_for(sampling))
    greedy = batch.insert(tuple(PROMPTS[2]), None, 0, None)
    others: dict[int, list[int]] = {}
    assert reply(batch, uid, others) == expected
    assert others[greedy][:TOKENS] == alone(model, PROMPTS[2], Sampling())[: len(others[greedy])]
    assert first in others


def test_top_k_of_one_is_greedy_at_any_temperature(model: Any) -> None:
    greedy = alone(model, PROMPTS[1], Sampling())
    assert alone(model, PROMPTS[1], Sampling(5.0, top_k=1, seed=1)) == greedy
    assert alone(model, PROMPTS[1], Sampling(5.0, seed=1)) != greedy


def test_rows_of_one_prompt_and_different_seeds_part(model: Any) -> None:
    batch = Batch(LiveCaches(model), BatchShape(BatchMode.BATCHED, 4, STEP))
    uids = [
        batch.insert(tuple(PROMPTS[0]), None, 0, sampler_for(Sampling(1.0, seed=seed)))
        for seed in (1, 1, 2)
    ]
    others: dict[int, list[int]] = {}
    mine = reply(batch, uids[0], others)
    assert others[uids[1]][:TOKENS] == mine
    assert others[uids[2]][:TOKENS] != mine
