"""How much worse a model predicts a text behind a cache that is held in fewer bits.

The text is cut into windows:

    ├───────── prefix ─────────┼───────── rest ─────────┤
    held by each policy         fed behind it: each token predicts the next one

A policy says how a prefix is held: in records of a codec, computed in full precision and given back
as a hit is; or in live caches, computed by attending to what they hold.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import mlx.core as mx

from engine.kv import kinds
from engine.kv.codec import CodecPolicy, plan_codec
from engine.kv.history import Rows, sliced
from engine.kv.kinds import Snapshot
from engine.kv.layout import CacheLayout
from engine.kv.live import LiveCaches
from engine.shelf import Shelf, always, row_bytes, state_bytes

FULL: Final = "full"


@dataclass(frozen=True, slots=True)
class Window:
    """Some tokens of a text: `prefix`, then `rest`, of which each but the first is scored."""

    prefix: tuple[int, ...]
    rest: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prefix:
    """A computed prefix, in full precision and evaluated: the rows of each leaf (see kinds.rows),
    and the state of those that are not rows. They are the model's own and must not be written
    to."""

    tokens: tuple[int, ...]
    rows: tuple[Rows, ...]
    state: Snapshot


class Policy(Protocol):
    """One way to hold a prefix."""

    @property
    def name(self) -> str: ...

    def bytes_per_token(self, rows: int) -> float:
        """Of all layers, the mean of a prefix of so many tokens, state included."""

    def caches(self, prefix: Prefix) -> list[Any]:
        """A new cache for each layer, which holds the prefix; the model appends to them."""


@dataclass(frozen=True, slots=True)
class StorePolicy:
    """As the store gives it back: packed into records, then attached."""

    name: str
    codec: CodecPolicy

    def bytes_per_token(self, rows: int) -> float:
        return _bytes_per_token(self.codec, rows)

    def caches(self, prefix: Prefix) -> list[Any]:
        shelf = Shelf(self.codec, len(prefix.tokens))
        for span in shelf.spans:
            shelf.put([sliced(leaf, slice(span.start, span.stop)) for leaf in prefix.rows])
        if self.codec.codec.layout.checkpointed:
            shelf.put_state(prefix.state)
        return shelf.caches()


@dataclass(frozen=True, slots=True)
class LivePolicy:
    """As a quantized live cache holds it, and all that follows. `step`: prompt tokens of one
    forward."""

    name: str
    live: LiveCaches
    layout: CacheLayout
    step: int

    def bytes_per_token(self, rows: int) -> float:
        # The store keeps these rows as they are.
        return _bytes_per_token(always(plan_codec("none", self.layout)), rows)

    def caches(self, prefix: Prefix) -> list[Any]:
        caches = self.live.fresh()
        _feed(self.live.model, caches, prefix.tokens, self.step)
        return caches


@dataclass(frozen=True, slots=True)
class Score:
    """How well a model predicts behind a policy; `policy` FULL is the model's own cache.

    `ratio`: bytes per token in full precision to those here. `mean_kl`: in nats for each token,
    from full precision to this; `kl_error` is its standard error, which takes two windows.
    `flip_rate`: part of tokens for which another one is the most likely next.
    """

    policy: str
    dtype: str
    bytes_per_token: float
    ratio: float
    perplexity: float
    mean_kl: float
    kl_error: float | None
    flip_rate: float
    tokens: int
    windows: int
    prefix_tokens: int


def cut(
    begin: Sequence[int], text: Sequence[int], prefix: int, scored: int, count: int
) -> list[Window]:
    """Windows from the text's first token to its last, as evenly as it goes.

    Each has `prefix` tokens and a rest of which `scored` are scored; no token is scored twice.
    Before the prefix comes `begin`, what the model wants before any text. As many windows as there
    is room for, but at most `count`.
    """
    length = prefix + 1 + scored
    windows = min(count, (len(text) - length) // scored + 1)
    if len(text) < length:
        return []
    starts = [round(n * (len(text) - length) / max(1, windows - 1)) for n in range(windows)]
    return [
        Window(
            (*begin, *text[start : start + prefix]),
            tuple(text[start + prefix : start + length]),
        )
        for start in starts
    ]


def score(
    live: LiveCaches,
    layout: CacheLayout,
    windows: Sequence[Window],
    policies: Sequence[Policy],
    step: int,
    advance: Callable[[], None] = lambda: None,
) -> list[Score]:
    """Full precision first, then each policy; on the MLX thread.

    `live` are the model's caches in full precision, and `layout` theirs; `step` are the prompt
    tokens of one forward.
    """
    tallies = [_Tally() for _ in range(1 + len(policies))]
    for window in windows:
        prefix, caches = _prefill(live, layout, window.prefix, step)
        reference = _logprobs(live.model, caches, window.rest)
        del caches
        tallies[0].add(reference, reference, window)
        for policy, tally in zip(policies, tallies[1:], strict=True):
            found = _logprobs(live.model, policy.caches(prefix), window.rest)
            tally.add(reference, found, window)
        advance()
    rows = len(windows[0].prefix)
    full_bytes = _bytes_per_token(always(plan_codec("none", layout)), rows)
    names = [(FULL, full_bytes), *((p.name, p.bytes_per_token(rows)) for p in policies)]
    dtype = layout.all[0].parts[0].dtype
    return [
        Score(
            policy=name,
            dtype=dtype,
            bytes_per_token=bytes_per_token,
            ratio=full_bytes / bytes_per_token,
            perplexity=math.exp(tally.surprise / tally.tokens),
            mean_kl=sum(tally.divergences) / tally.tokens,
            kl_error=tally.divergence_error,
            flip_rate=tally.flips / tally.tokens,
            tokens=tally.tokens,
            windows=len(windows),
            prefix_tokens=rows,
        )
        for (name, bytes_per_token), tally in zip(names, tallies, strict=True)
    ]


def _bytes_per_token(policy: CodecPolicy, rows: int) -> float:
    """Of all layers, the mean of a prefix of so many tokens."""
    runs = policy.runs(rows, range(rows))
    return (
        sum(len(run) * row_bytes(codec) for codec, run in runs) + state_bytes(policy, rows)
    ) / rows


class _Tally:
    """Sums over windows, of natural logarithms."""

    def __init__(self) -> None:
        self.tokens = 0
        self.surprise = 0.0
        self.flips = 0
        # One for each window.
        self.divergences: list[float] = []

    def add(self, reference: mx.array, found: mx.array, window: Window) -> None:
        """Log-probabilities (scored, vocabulary) in full precision, and behind a policy."""
        targets = mx.array(window.rest[1:])[:, None]
        surprise: Any = -mx.take_along_axis(found, targets, axis=-1).sum()
        flips: Any = (reference.argmax(-1) != found.argmax(-1)).sum()
        # A masked vocabulary is impossible in both, and contributes nothing.
        gap = mx.where(reference == found, 0.0, reference - found)
        divergence: Any = (mx.exp(reference) * gap).sum()
        mx.eval(surprise, flips, divergence)
        self.tokens += targets.shape[0]
        self.surprise += surprise.item()
        self.flips += flips.item()
        self.divergences.append(divergence.item())

    @property
    def divergence_error(self) -> float | None:
        """Standard error of the mean divergence of a token; windows have equally many."""
        count = len(self.divergences)
        if count < 2:
            return None
        return statistics.stdev(self.divergences) * math.sqrt(count) / self.tokens


def _prefill(
    live: LiveCaches, layout: CacheLayout, tokens: tuple[int, ...], step: int
) -> tuple[Prefix, list[Any]]:
    """The prefix, and the caches that computed it."""
    caches = live.fresh()
    _feed(live.model, caches, tokens, step)
    rows = tuple(kinds.rows(layout, caches, 0, 0, len(tokens)))
    state = kinds.snapshot(layout, caches, 0)
    mx.eval(rows, state.leaves)
    return Prefix(tokens, rows, state), caches


def _feed(model: Any, caches: list[Any], tokens: tuple[int, ...], step: int) -> None:
    for first in range(0, len(tokens), step):
        model(mx.array([tokens[first : first + step]]), cache=caches)
        mx.eval([leaf.state for leaf in kinds.leaves(caches)])


def _logprobs(model: Any, caches: list[Any], rest: tuple[int, ...]) -> mx.array:
    """(scored, vocabulary), evaluated, float32: of the next token behind each but the last."""
    logits = model(mx.array([rest[:-1]]), cache=caches)[0].astype(mx.float32)
    logprobs: mx.array = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(logprobs)
    return logprobs
