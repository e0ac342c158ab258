"""What the core keeps of each request, and counts of all."""

import enum
from collections import Counter
from dataclasses import dataclass, field

from cachestore.client import MatchKind
from cachestore.histogram import Histogram
from engine import config
from engine.found import Found
from engine.kv.history import Rows, sliced
from engine.output import Output
from engine.pack import PackedCheckpoint, PackedRows
from engine.penalties import Penalizer
from engine.request import Done, FinishReason, Request, Sink, Usage
from engine.sampling import Sampler
from engine.stopwatch import Stage, Stopwatch


class State(enum.Enum):
    LOOKUP = "lookup"
    QUEUED = "queued"
    ATTACHING = "attaching"
    RUNNING = "running"
    # Its reply is over, or it was cancelled: its rows are packed. Until then it stays in the batch,
    # or what is left of it does aside.
    LEAVING = "leaving"
    # Warm only: its rows are with the writer.
    STORING = "storing"


@dataclass(frozen=True, slots=True)
class Aside:
    """What a cancelled row has still to store, copied out of the batch: of each leaf its rows from
    `first` on."""

    first: int
    leaves: list[Rows]

    def rows(self, first: int, end: int) -> list[Rows]:
        """Rows [first, end) of the sequence, lazy."""
        return [sliced(leaf, slice(first - self.first, end - self.first)) for leaf in self.leaves]


@dataclass(slots=True)
class Row:
    """One request on its way.

    [0, cached)             came from the store
    [cached, packed_to)     packed: stored, or on their way there
    [packed_to, ...)        only in the batch, or set aside

    `packed` are the last of the packed rows, and `checkpoints` the last of those that were taken:
    what no write has taken yet.
    """

    id: int
    request: Request
    sink: Sink
    output: Output
    watch: Stopwatch
    # Where its prompt stops for checkpoints, unless it is cached beyond.
    planned: tuple[int, ...] = ()
    state: State = State.LOOKUP
    # None: the cachestore gave no usable answer.
    found: Found | None = None
    # Blocks of found.attachment that are decoded.
    blocks: int = 0
    uid: int | None = None
    sampler: Sampler | None = None
    penalizer: Penalizer | None = None
    cached: int = 0
    packed_to: int = 0
    packed: list[PackedRows] = field(default_factory=list)
    checkpoints: list[PackedCheckpoint] = field(default_factory=list)
    # Rows of the prompt that are worth storing: all, or those up to its last checkpoint.
    prompt_rows: int = 0
    # Length of the path that they are packed for, the same for all of one write: their codecs
    # follow from it.
    path_rows: int = 0
    # Rows that a leaving row has to store; later ones in the batch mean nothing.
    rows_final: int | None = None
    # Of a row that was cancelled with rows to store; it is in the batch no more.
    aside: Aside | None = None
    # When it had its latest token.
    replied_at: float | None = None

    @property
    def first_token_sent(self) -> bool:
        return self.replied_at is not None

    @property
    def is_over(self) -> bool:
        """Whether nothing more is sent for it."""
        return self.aside is not None or (self.state is State.LEAVING and not self.request.warm)

    @property
    def failure(self) -> Exception | None:
        """Why the row's latest token means nothing, if it does not."""
        choosing = (self.penalizer, self.sampler)
        return next((part.failure for part in choosing if part and part.failure), None)

    @property
    def match(self) -> MatchKind | None:
        return self.found.kind if self.found is not None else None

    def done(self, reason: FinishReason, now: float, stop: str = "", stored: int = 0) -> Done:
        """Its last event. `stored`: of a Warm, how much of its prompt the store holds."""
        usage = Usage(
            prompt_tokens=len(self.request.tokens),
            cached_tokens=self.cached,
            completion_tokens=len(self.output.tokens),
            match=self.match,
        )
        return Done(reason, stop, usage, self.watch.timing(now), stored)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and reply so far."""
        return (*self.request.tokens, *self.output.tokens)


@dataclass(slots=True)
class Counters:
    """Since start. `matches` are requests, and `matched_tokens` what was cached of them, by what
    the cachestore had."""

    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    completion_tokens: int = 0
    matches: Counter[MatchKind | None] = field(default_factory=Counter)
    matched_tokens: Counter[MatchKind | None] = field(default_factory=Counter)
    queue_seconds: Histogram = field(default_factory=lambda: Histogram(config.REQUEST_SECONDS))
    first_token_seconds: Histogram = field(
        default_factory=lambda: Histogram(config.REQUEST_SECONDS)
    )
    next_token_seconds: Histogram = field(default_factory=lambda: Histogram(config.TOKEN_SECONDS))
    batch_requests: Histogram = field(default_factory=lambda: Histogram(config.BATCH_REQUESTS))

    @property
    def cached_tokens(self) -> int:
        return self.matched_tokens.total()

    def begun(self, row: Row) -> None:
        """It is in the batch, with what was cached of it."""
        self.matches[row.match] += 1
        self.matched_tokens[row.match] += row.cached

    def replied(self, row: Row, now: float) -> None:
        """The row has its next token."""
        if row.replied_at is None:
            seconds = row.watch.seconds
            self.queue_seconds.add(seconds[Stage.QUEUE])
            if not row.request.warm:
                self.first_token_seconds.add(sum(seconds.values()))
        else:
            self.next_token_seconds.add(now - row.replied_at)
        row.replied_at = now


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Requests in each stage now."""

    queued: int
    prefilling: int
    decoding: int
