"""How a loaded model may run in the batch: measured, not looked up by name.

Some architectures are silently wrong when unequal prompts are padded in one batch, and some
cannot be batched at all (docs/architecture.md). At load a pair of unequal prompts goes through
the batch in each mode and is compared with the same prompts alone.
"""

import itertools
import logging
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from engine.batch import Batch, BatchMode, BatchShape
from engine.config import PrefillStep
from engine.kv.live import LiveCaches
from engine.kvconfig import KvConfig

log = logging.getLogger(__name__)

# Log-probabilities of one token: (vocabulary,).
Logprobs = np.ndarray[Any, Any]
# Tokens, each with the log-probabilities it was chosen by.
Reply = list[tuple[int, Logprobs]]

# Unequal, longer than the chunk, and no multiple of it: padding on both sides occurs.
_PROMPT_TOKENS = (21, 10)
_CHUNK = PrefillStep(idle=8, busy=8)
# The short prompt decodes first; its last tokens come beside the long one, padded.
_REPLY_TOKENS = 8
# Log-probabilities of the same tokens differ for the order of additions, by a share of their range
# that depends on the model and the device: it is measured by cutting the prompts otherwise, which
# changes nothing else, and this many times that is noise, too.
_NOISE_FACTOR = 4
_CUTS = (8, 4)
# One that agrees is enough: an expert that is chosen otherwise for float noise spoils a trial, a
# wrong mask all of them.
_TRIALS = 3


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Of what counts as noise, whatever was measured (docs/decisions.md)."""

    least: float
    most: float


_PRECISE, _COARSE = _Bounds(3e-4, 0.03), _Bounds(3e-2, 0.12)


class SelfCheckFailed(RuntimeError):
    """The model gives other results in the batch than alone, even one row at a time."""


@dataclass(frozen=True, slots=True)
class _Trial:
    """Prompts, and what each is answered alone: tokens with their log-probabilities."""

    prompts: list[tuple[int, ...]]
    alone: list[Reply]


def choose_mode(model: Any, vocabulary_tokens: int) -> BatchMode:
    """The first mode in which the batch agrees with single requests; SelfCheckFailed if none."""
    trials = [_trial(model, vocabulary_tokens, 0)]
    first = trials[0]
    wholes = [reply[0][1] for reply in first.alone]
    noise = _noise(model, list(zip(first.prompts, wholes, strict=True)))
    for mode in BatchMode:
        nearest = float("inf")
        try:
            for number in range(_TRIALS):
                if number == len(trials):
                    trials.append(_trial(model, vocabulary_tokens, number))
                nearest = min(nearest, _distance(model, mode, trials[number]))
                if nearest <= noise:
                    return mode
        except Exception as error:
            # Refused by mlx-lm (a cache without merge) or by the model (a vector offset).
            log.info("batch mode %s: %s: %s", mode.value, type(error).__name__, error)
            continue
        log.warning(
            "batch mode %s would be wrong: log-probabilities are %.2g of their range away from "
            "those of single requests, and float noise explains %.2g",
            *(mode.value, nearest, noise),
        )
    raise SelfCheckFailed(
        "--model: this architecture gives other results through mlx-lm's batch generator than "
        "alone, in every batch mode; it cannot be served"
    )


def check_bounded(model: Any, vocabulary_tokens: int) -> None:
    """Finds out whether the plain layers of a model may be bounded.

    They may if what a token comes to, behind a window that dropped rows, does not depend on how
    the tokens before it were cut into chunks. SelfCheckFailed if it does: some layers count rows
    where they should ask for the position.
    """
    live = LiveCaches(model, config=KvConfig(max_size=_CHUNK.idle))
    prompt, _ = _prompts(vocabulary_tokens)
    refusal = SelfCheckFailed(
        "--max-kv-size: layers of this model do not work with a window of rows; leave it out"
    )
    try:
        expected, found = (_last(model, live.fresh(), prompt, chunk) for chunk in (1, _CHUNK.idle))
    except Exception as error:
        raise refusal from error
    whole = _last(model, make_prompt_cache(model), prompt, len(prompt))
    if _difference(found, expected) > _noise(model, [(prompt, whole)]):
        raise refusal


def _last(model: Any, caches: list[Any], prompt: Sequence[int], chunk: int) -> Logprobs:
    """Log-probabilities behind a prompt that is fed in chunks."""
    for first in range(0, len(prompt), chunk):
        logits = model(mx.array([prompt[first : first + chunk]]), cache=caches)[0, -1]
        mx.eval(logits, [cache.state for cache in caches])
    return _logprobs(logits)


def _logprobs(logits: mx.array) -> Logprobs:
    """As mlx-lm's batch computes them: what 16 bits round off there is no difference."""
    return np.array((logits - mx.logsumexp(logits)).astype(mx.float32))


def _trial(model: Any, vocabulary_tokens: int, seed: int) -> _Trial:
    prompts = _prompts(vocabulary_tokens, seed)
    return _Trial(prompts, [_alone(model, prompt) for prompt in prompts])


def _prompts(vocabulary_tokens: int, seed: int = 0) -> list[tuple[int, ...]]:
    draw = np.random.default_rng(seed)
    return [tuple(draw.integers(0, vocabulary_tokens, n).tolist()) for n in _PROMPT_TOKENS]


def _alone(model: Any, prompt: Sequence[int]) -> Reply:
    """Greedy reply of mlx-lm's model and caches used directly: tokens and log-probabilities."""
    caches = make_prompt_cache(model)
    fed = list(prompt)
    reply = []
    for _ in range(_REPLY_TOKENS):
        logprobs = _logprobs(model(mx.array([fed]), cache=caches)[0, -1])
        token = int(logprobs.argmax())
        reply.append((token, logprobs))
        fed = [token]
    return reply


def _distance(model: Any, mode: BatchMode, trial: _Trial) -> float:
    """The largest `_difference`. One row at a time there is no mask that could be wrong: two tokens
    may be further away there, for a model is not refused for an expert."""
    groups = [[n] for n in range(len(trial.prompts))]
    if mode is not BatchMode.ONE_ROW:
        groups = [list(range(len(trial.prompts)))]
    spared = 2 if mode is BatchMode.ONE_ROW else 0
    worst = 0.0
    for group in groups:
        shape = BatchShape(mode, rows_max=len(group), step=_CHUNK)
        replies = _batched(model, shape, [(trial.prompts[n], trial.alone[n]) for n in group])
        for n, reply in zip(group, replies, strict=True):
            differences = [
                _difference(logprobs, expected)
                for logprobs, (_, expected) in zip(reply, trial.alone[n], strict=True)
            ]
            worst = max(worst, sorted(differences, reverse=True)[spared])
    return worst


def _batched(
    model: Any,
    shape: BatchShape,
    asked: list[tuple[tuple[int, ...], Reply]],
) -> list[list[Logprobs]]:
    """Log-probabilities along the replies that the prompts had alone, whatever is likelier here."""
    batch = Batch(LiveCaches(model), shape)
    try:
        replies: dict[int, list[Logprobs]] = {}
        for prompt, reply in asked:
            replies[batch.insert(prompt, None, 0, _saying(token for token, _ in reply))] = []
        while any(len(reply) < _REPLY_TOKENS for reply in replies.values()):
            for token in batch.step().tokens:
                if len(replies[token.uid]) < _REPLY_TOKENS:
                    logprobs = np.array(token.logprobs.astype(mx.float32))
                    replies[token.uid].append(logprobs)
        return list(replies.values())
    finally:
        batch.close()


def _saying(tokens: Iterable[int]) -> Callable[[mx.array], mx.array]:
    """A sampler of these, and then of the same again: one more than is given out is sampled."""
    said = itertools.cycle([mx.array([token]) for token in tokens])
    return lambda _: next(said)


def _difference(logprobs: Logprobs, expected: Logprobs) -> float:
    """The largest one, as a share of the range of what is expected; infinite when there are
    differences that are no number."""
    # Some models mask a part of their vocabulary: those are equal though they are infinite.
    unequal = logprobs != expected
    largest = np.abs(logprobs[unequal] - expected[unequal]).max(initial=0.0)
    return float(largest) / _range(expected) if np.isfinite(largest) else float("inf")


def _noise(model: Any, wholes: Sequence[tuple[Sequence[int], Logprobs]]) -> float:
    """Differences up to this come from the order of additions and from rounding, not from wrong
    masks. `wholes`: prompts, and what follows each when it is fed at once."""
    measured: list[float] = []
    rounding = 0.0
    for prompt, whole in wholes:
        cut = (_last(model, make_prompt_cache(model), prompt, chunk) for chunk in _CUTS)
        measured += [_difference(found, whole) for found in cut]
        rounding = max(rounding, _rounding(whole))
    if all(p.dtype in (mx.float32, mx.uint32) for p in _weights(model)):
        return min(max(_PRECISE.least, _NOISE_FACTOR * max(measured)), _PRECISE.most)
    # With few bits the larger ones may be those of an expert that is chosen otherwise.
    typical = _NOISE_FACTOR * statistics.median_low(measured)
    return min(max(_COARSE.least, typical) + rounding, _COARSE.most)


def _rounding(logprobs: Logprobs) -> float:
    """Two units in the last of bfloat16's 8 bits, as a share of the range."""
    finite = logprobs[np.isfinite(logprobs)]
    _, exponent = np.frexp(np.abs(finite).max(initial=0.0))
    return 2 * float(np.ldexp(1.0, exponent - 8)) / _range(logprobs)


def _range(logprobs: Logprobs) -> float:
    finite = logprobs[np.isfinite(logprobs)]
    # Of a vocabulary of one token it would be nothing.
    return (float(finite.max() - finite.min()) if finite.size else 0.0) + 1e-2


def _weights(model: Any) -> list[mx.array]:
    leaves: Any = tree_flatten(model.parameters())
    return [array for _, array in leaves]
