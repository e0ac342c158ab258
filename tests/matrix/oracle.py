"""What a model gives alone and cold: called directly, or through the engine's batch."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache

from engine.batch import Batch
from engine.core import Core
from tests.support.engines import InProcess, Reply

# Tokens of each chunk of a prefill. But for windows, no length of the matrix is a multiple of it.
STEP = 16
# Of the other chunks that a prompt is cut into, to see whether the oracle agrees with itself.
OTHER_STEP = 7
# Of each weight: about a hundred times what float32 rounds away. 60 random tokens of each
# architecture then give log-probabilities that are 3e-5 to 2e-3 apart, or, where an expert or an
# index was near a tie, up to 0.3.
SHAKEN, SHAKEN_APART = 1e-5, 4e-3


def chunks(first: int, stops: Iterable[int], end: int, step: int = STEP) -> list[int]:
    """Where each chunk of a prefill of tokens [first, end) ends: the generator feeds the last token
    alone, and begins anew at every stop."""
    cuts: list[int] = []
    begin = first
    for stop in sorted({stop for stop in stops if first < stop < end} | {end - 1, end}):
        if stop > begin:
            cuts += [*range(begin + step, stop, step), stop]
            begin = stop
    return cuts


Caches = Callable[[Core], list[Any]]


def theirs(core: Core) -> list[Any]:
    """mlx-lm's, empty."""
    caches: list[Any] = make_prompt_cache(core.caches.model)
    return caches


def ours(core: Core) -> list[Any]:
    """The engine's, empty."""
    return core.caches.fresh()


def greedy(
    engine: InProcess,
    tokens: Sequence[int],
    cuts: Sequence[int],
    max_tokens: int,
    caches: Caches = theirs,
    cached: int = 0,
) -> Reply:
    """The reply to a prompt that is computed in chunks that end at `cuts`; its first `cached`
    tokens are in the caches, which are made on the MLX thread."""

    def run(core: Core) -> Reply:
        model = core.caches.model
        held = caches(core)
        begin = cached
        for end in cuts:
            logits = model(mx.array([tokens[begin:end]]), cache=held)[:, -1]
            mx.eval(logits)
            begin = end
        reply = Reply()
        while True:
            logprobs = np.array((logits - mx.logsumexp(logits)).astype(mx.float32))[0]
            reply.tokens.append(int(logprobs.argmax()))
            reply.logprobs.append(logprobs)
            if len(reply.tokens) == max_tokens:
                return reply
            logits = model(mx.array([reply.tokens[-1:]]), cache=held)[:, -1]

    reply = engine.on_worker(run)
    assert isinstance(reply, Reply)
    return reply


def batched(
    engine: InProcess,
    tokens: Sequence[int],
    cuts: Sequence[int],
    max_tokens: int,
    caches: Caches = ours,
    cached: int = 0,
) -> Reply:
    """As `greedy`, with the engine's own caches in its own batch."""

    def run(core: Core) -> Reply:
        batch = Batch(core.caches, replace(core.shape, rows_max=1))
        try:
            stops = [cut for cut in cuts if cut < len(tokens)]
            held = caches(core) if cached else None
            batch.insert(tuple(tokens), held, cached, None, stops=stops)
            reply = Reply()
            while len(reply.tokens) < max_tokens:
                for token in batch.step().tokens:
                    reply.tokens.append(token.token)
                    reply.logprobs.append(np.array(token.logprobs.astype(mx.float32)))
            return reply
        finally:
            batch.close()

    reply = engine.on_worker(run)
    assert isinstance(reply, Reply)
    return reply


@contextlib.contextmanager
def shaken(engine: InProcess, direction: int) -> Iterator[None]:
    """Every weight is a little off, always by the same; -1 is the opposite of 1."""

    def shake(core: Core) -> Any:
        weights: Any = tree_flatten(core.caches.model.parameters())
        keys = mx.random.split(mx.random.key(0), len(weights))
        other = [
            (name, _off(weight, key, direction))
            for (name, weight), key in zip(weights, keys, strict=True)
        ]
        core.caches.model.update(tree_unflatten(other))
        return weights

    weights = engine.on_worker(shake)
    try:
        yield
    finally:
        engine.on_worker(lambda core: core.caches.model.update(tree_unflatten(weights)))


def _off(weight: mx.array, key: mx.array, direction: int) -> mx.array:
    if not mx.issubdtype(weight.dtype, mx.floating):
        return weight
    noise = mx.random.normal(weight.shape, weight.dtype, key=key)
    return weight + direction * SHAKEN * weight * noise


def agree(one: Reply, other: Reply, tolerance: float) -> bool:
    """Whether two replies are the same in all that decides: a router, or an index that picks rows,
    may choose otherwise for float noise alone."""
    return one.tokens == other.tokens and all(
        np.abs(a - b).max() <= tolerance for a, b in zip(one.logprobs, other.logprobs, strict=True)
    )
