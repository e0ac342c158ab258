"""Choosing the next token of one row.

The random key belongs to the request, so that its seed gives the same reply whatever else is in
the batch. mlx-lm's own sampler draws from the global state.
"""

import logging
import secrets
from collections.abc import Callable

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from engine.request import Sampling

log = logging.getLogger(__name__)

Filter = Callable[[mx.array], mx.array]

# Beyond it log-probabilities, times it, leave float32; all of it is greedy.
INVERSE_TEMPERATURE_MAX = 1e30


class Sampler:
    """Draws from log-probabilities of shape (1, vocabulary); returns ids of shape (1,).

    Never raises: an exception inside a step would corrupt the other rows of the batch. It is kept
    in `failure`, and the row must be dropped by whoever drives the batch.
    """

    def __init__(self, sampling: Sampling) -> None:
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self._key = mx.random.key(seed)
        self._inverse_temperature = min(1.0 / sampling.temperature, INVERSE_TEMPERATURE_MAX)
        self._filters = _filters(sampling)
        self.failure: Exception | None = None

    def __call__(self, logprobs: mx.array) -> mx.array:
        # Divided by a small temperature they leave float16.
        logprobs = logprobs.astype(mx.float32)
        try:
            for keep in self._filters:
                logprobs = keep(logprobs)
            self._key, key = mx.random.split(self._key)
            return mx.random.categorical(logprobs * self._inverse_temperature, key=key)
        except Exception as error:
            log.exception("sampler failed")
            self.failure = error
            # One in a compiled filter leaves placeholders in this thread's global random state.
            mx.random.seed(secrets.randbits(64))
            return mx.argmax(logprobs, axis=-1)


def sampler_for(sampling: Sampling) -> Sampler | None:
    """The sampler of a request; None for greedy, which the batch does for all rows at once."""
    return Sampler(sampling) if sampling.temperature > 0 else None


def _filters(sampling: Sampling) -> list[Filter]:
    """The filters in mlx-lm's order: they act on probabilities before temperature."""
    top_p, min_p, top_k = sampling.top_p, sampling.min_p, sampling.top_k
    filters: list[Filter] = []
    if top_p is not None and top_p < 1.0:
        filters.append(lambda logprobs: apply_top_p(logprobs, top_p))
    if min_p > 0.0:
        filters.append(lambda logprobs: apply_min_p(logprobs, min_p))
    if top_k > 0:
        filters.append(lambda logprobs: apply_top_k(logprobs, top_k))
    return filters
