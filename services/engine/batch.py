"""The only user of mlx-lm's BatchGenerator, on the worker thread.

Differences from using it directly:
- Rows never finish by themselves. The worker decides (length, stop tokens, stop strings) and
  removes them, after it has taken out the rows that the cachestore lacks: the generator would
  hand out a copy of the whole row instead.
- The queue is ours (scheduler.py): a row is inserted only when it may prefill at once.
- The prefill step is short while other rows decode.
- Prompts stop where they are told to, so that state which cannot be cut can be copied there.
- The first token of a reply is read as soon as the prompt ends; the generator would give it out
  one step later, after it has started to compute the second one.
"""

import copy
import enum
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, GenerationBatch, PromptProcessingBatch

from engine.config import PrefillStep
from engine.kv import kinds
from engine.kv.history import Rows
from engine.kv.kinds import Snapshot
from engine.kv.layout import CacheLayout
from engine.kv.live import LiveCaches
from engine.kv.solo import one_row
from engine.penalties import Penalizer

# The generator stops rows at this many tokens; the worker removes them long before.
_NEVER = 1 << 60


class BatchMode(enum.Enum):
    """How a model runs in the batch, by the self-check at load (selfcheck.py)."""

    BATCHED = "batched"
    # Right padding in a shared prefill would be wrong: prompts one at a time, decode together.
    PREFILL_ONE = "prefill-one"
    # Any batching would be wrong or is refused by mlx-lm.
    ONE_ROW = "one-row"


@dataclass(frozen=True, slots=True)
class BatchShape:
    """`rows_max` counts prefilling and decoding rows together."""

    mode: BatchMode
    rows_max: int
    step: PrefillStep
    wired_limit_bytes: int = 0

    def __post_init__(self) -> None:
        assert self.rows_max == 1 or self.mode is not BatchMode.ONE_ROW


@dataclass(frozen=True, slots=True)
class Token:
    """One token of one row. `logprobs`: (vocabulary,), evaluated; do not keep it."""

    uid: int
    token: int
    logprobs: mx.array


@dataclass(frozen=True, slots=True)
class Reached:
    """A prompt stopped: until the next step its caches stand for exactly its first tokens, so
    many as `position` says."""

    uid: int
    position: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """`computed`: prompt tokens run through the model in this step."""

    tokens: tuple[Token, ...]
    computed: int
    reached: tuple[Reached, ...] = ()


class _DecodingBatch(GenerationBatch):
    """mlx-lm's, but the last rows take the places of those that leave: fewer have to be moved."""

    def filter(self, keep: list[int]) -> None:
        count = len(keep)
        moved = [index for index in keep if index >= count]
        stay = set(keep)
        super().filter([i if i in stay else moved.pop(0) for i in range(count)])


class _PromptBatch(PromptProcessingBatch):
    """mlx-lm's, but rows that all leave for decoding at once are handed over, not copied."""

    def split(self, indices: list[int]) -> Any:
        if len(indices) < len(self.uids):
            return super().split(indices)
        leaving = copy.copy(self)
        for name in _ROW_LISTS:
            setattr(self, name, [])
        return leaving


_ROW_LISTS = (
    *("uids", "prompt_cache", "tokens", "samplers"),
    *("logits_processors", "stop_sequences", "max_tokens"),
)


class Batch:
    """Rows of one model. After an exception from `step` the object must be thrown away.

    A row is named by the uid that `insert` returns:

        insert ──▶ prefilling ──(first token)──▶ decoding ──▶ remove
                   remove at any time; unknown uids are ignored
    """

    def __init__(self, caches: LiveCaches, shape: BatchShape) -> None:
        self._caches = caches
        self._shape = shape
        rows_max = shape.rows_max
        self._generator: Any = BatchGenerator(
            caches.model,
            max_tokens=_NEVER,
            # One above ours: at its own limit the generator would stall half-done prompts.
            completion_batch_size=rows_max + 1,
            prefill_batch_size=rows_max if shape.mode is BatchMode.BATCHED else 1,
            prefill_step_size=shape.step.idle,
            stream=mx.default_stream(mx.default_device()),
        )
        self._prompts.__class__ = _PromptBatch
        self._decoding.__class__ = _DecodingBatch
        # Rows whose first token was given out; the generator will give it again.
        self._begun: set[int] = set()
        if mx.metal.is_available():
            # The constructor raises it unasked; that panics kernels under cache churn
            # (mlx#3186).
            mx.set_wired_limit(shape.wired_limit_bytes)

    def __len__(self) -> int:
        return len(self._prompts) + len(self._decoding)

    @property
    def decoding(self) -> int:
        """Rows that generate."""
        return len(self._decoding)

    @property
    def _prompts(self) -> Any:
        return self._generator._prompt_batch

    @property
    def _decoding(self) -> Any:
        return self._generator._generation_batch

    def insert(
        self,
        tokens: tuple[int, ...],
        caches: list[Any] | None,
        cached: int,
        sampler: Callable[[mx.array], mx.array] | None,
        penalizer: Penalizer | None = None,
        stops: Sequence[int] = (),
    ) -> int:
        """Add a row whose rows [0, cached) are in `caches`; at least one token must be left.

        `sampler` is given log-probabilities of shape (1, vocabulary) and returns ids of shape (1,).
        `stops`: positions, ascending, beyond `cached`, at which its prompt stops for a moment.
        Before its last token it always does, and at its end. The generator keeps `caches` until
        the row's first step: the caller drops its reference.
        """
        assert 0 <= cached < len(tokens)
        places = [cached, *stops]
        assert places == sorted(set(places))
        assert places[-1] <= len(tokens)
        places.append(len(tokens))
        assert (caches is None) == (cached == 0)
        if caches is None:
            caches = self._caches.fresh()
        if self._shape.mode is BatchMode.ONE_ROW:
            caches = one_row(caches)
        (uid,) = self._generator.insert_segments(
            [[list(tokens[first:end]) for first, end in itertools.pairwise(places)]],
            caches=[caches],
            all_tokens=[list(tokens[:cached])],
            samplers=[sampler],
            logits_processors=[[penalizer] if penalizer else []],
        )
        return int(uid)

    def step(self) -> StepResult:
        """One token for every decoding row, then one chunk for every prefilling one."""
        step = self._shape.step.busy if len(self._decoding) else self._shape.step.idle
        self._generator.prefill_step_size = step
        self._prompts.prefill_step_size = step
        before = self._generator._counters.prompt_tokens
        prompts, generated = self._generator.next()
        # Nobody reads them any more, but the generator appends those of each row that joins, as
        # a lazy operation: as long as every row leaves with its first token, that graph grows.
        self._decoding._current_tokens = None
        ended = [r.uid for r in prompts if r.end_of_prompt]
        tokens = [Token(r.uid, r.token, r.logprobs) for r in generated if r.uid not in self._begun]
        self._begun = set(ended)
        tokens += [self._first_token(uid) for uid in ended]
        # The generator feeds a prompt's last token apart, and does not count it.
        computed = self._generator._counters.prompt_tokens - before + len(ended)
        reached = tuple(Reached(r.uid, self.held(r.uid)) for r in prompts if r.end_of_segment)
        return StepResult(tuple(tokens), computed, reached)

    def remove(self, uids: list[int]) -> None:
        """Drop rows in whatever stage they are; unknown ones are ignored."""
        self._generator.remove(uids)

    def held(self, uid: int) -> int:
        """Rows that the caches hold of this row: [0, held) stand for its first tokens.

        The first token of a reply has its row only after another step; later ones at once.
        """
        found = self._locate(uid)
        return 0 if found is None else len(found[0].tokens[found[1]])

    def rows(self, uid: int, layout: CacheLayout, first: int, end: int) -> list[Rows]:
        """Rows [first, end) of each leaf, as kinds.rows gives them.

        Lazy slices of the live caches. Evaluate and drop them before the next step: a reference
        held across it makes MLX copy the whole cache.
        """
        batch, index = self._place(uid)
        assert 0 <= first <= end <= len(batch.tokens[index])
        return kinds.rows(layout, batch.prompt_cache, index, first, end)

    def rows_apart(self, uid: int, layout: CacheLayout, first: int, end: int) -> list[Rows]:
        """As `rows`, but copies, evaluated: they outlive steps, and the row itself."""
        apart = [
            tuple(tuple(mx.contiguous(array) for array in part) for part in leaf)
            for leaf in self.rows(uid, layout, first, end)
        ]
        mx.eval(apart)
        return apart

    def snapshot(self, uid: int, layout: CacheLayout) -> Snapshot:
        """What the other leaves hold after the row's `held` tokens; lazy as `rows` are.

        kinds.NotCacheable when one of them is not as it was at load.
        """
        batch, index = self._place(uid)
        return kinds.snapshot(layout, batch.prompt_cache, index)

    def _first_token(self, uid: int) -> Token:
        decoding = self._decoding
        index = decoding.uids.index(uid)
        token = int(decoding._next_tokens[index].item())
        return Token(uid, token, decoding._next_logprobs[index])

    def _place(self, uid: int) -> tuple[Any, int]:
        found = self._locate(uid)
        assert found is not None
        return found

    def _locate(self, uid: int) -> tuple[Any, int] | None:
        # Indices move with every join and leave: they are looked up each time.
        for batch in (self._decoding, self._prompts):
            if uid in batch.uids:
                return batch, batch.uids.index(uid)
        return None

    def close(self) -> None:
        """Give the generator's memory back."""
        self._generator.remove([*self._prompts.uids, *self._decoding.uids])
        self._generator.close()
