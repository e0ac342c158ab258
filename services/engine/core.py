"""The way of every request through the engine, as one state machine on the worker thread.

    submit ─▶ LOOKUP ─▶ QUEUED ─▶ ATTACHING ─▶ RUNNING ─▶ LEAVING ─▶ (STORING, Warm only) ─▶ over
                │                     └─ a miss goes straight to RUNNING
                └─ may wait for rows that another request computes

Other threads look up, copy and write (prefix.py); what they find comes back as calls of
`looked_up`, `copied` and `stored`, which the worker makes here. A call for a request that is over
is ignored, except that what it holds is released.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import mlx.core as mx

from engine.batch import Batch, BatchShape, Reached, StepResult, Token
from engine.found import Found
from engine.kv.live import LiveCaches
from engine.logprobs import LogprobReader
from engine.output import Output
from engine.penalties import penalizer_for
from engine.prefix import Prefix
from engine.request import Failed, FinishReason, Request, Sink, TokenLogprobs
from engine.rows import Counters, Occupancy, Row, State
from engine.sampling import sampler_for
from engine.scheduler import Load, Scheduler, Waiting
from engine.stopwatch import Stage, Stopwatch
from engine.tokenizer import Detokenizer
from engine.writeback import Writeback, is_packed

log = logging.getLogger(__name__)

STEP_FAILURES_MAX = 2


class _NotAttached(Exception):
    """The rows of a hit cannot be used."""


class BatchBroken(RuntimeError):
    """Steps fail again and again: the process must end."""


@dataclass
class Core:
    """Owns the batch, the queue and all rows. Every method runs on the worker thread."""

    caches: LiveCaches
    shape: BatchShape
    scheduler: Scheduler
    prefix: Prefix
    new_detokenizer: Callable[[], Detokenizer]
    clock: Callable[[], float] = time.monotonic
    # Sees each token with its log-probabilities (vocabulary,); for tests and tools.
    observe: Callable[[int, Token], None] | None = None
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self._batch = Batch(self.caches, self.shape)
        self._rows: dict[int, Row] = {}
        self._by_uid: dict[int, Row] = {}
        self._left: list[int] = []
        self._writeback = Writeback(self.prefix)
        self._logprobs = LogprobReader()
        self._step_failures = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def copying(self) -> bool:
        """Whether rows of some request are on their way out of the store."""
        return any(row.state is State.ATTACHING for row in self._rows.values())

    @property
    def looking_up(self) -> bool:
        """Whether the cachestore has yet to answer for some request."""
        return any(row.state is State.LOOKUP for row in self._rows.values())

    def occupancy(self) -> Occupancy:
        running = [row for row in self._rows.values() if row.uid is not None]
        decoding = sum(row.first_token_sent for row in running)
        attaching = sum(row.state is State.ATTACHING for row in self._rows.values())
        waiting = sum(row.state in (State.LOOKUP, State.QUEUED) for row in self._rows.values())
        return Occupancy(waiting, len(running) - decoding + attaching, decoding)

    # --- what arrives from other threads -------------------------------------------------

    def submit(
        self, request_id: int, request: Request, sink: Sink, since: float | None = None
    ) -> None:
        """`since`: when it was given to the worker, by the same clock; it waited from then on."""
        now = self.clock()
        try:
            output = Output(request, self.new_detokenizer())
        except Exception as error:
            log.exception("a request could not begin")
            self.counters.failed += 1
            sink(_internal(error))
            return
        watch = Stopwatch(now if since is None else since)
        row = Row(request_id, request, sink, output, watch, self.prefix.planned(request))
        self._rows[request_id] = row
        self.counters.prompt_tokens += len(request.tokens)
        row.watch.enter(Stage.LOOKUP, now)
        self.prefix.look_up(
            request_id, request.tokens, row.planned, lambda: request_id in self._rows
        )

    def looked_up(self, request_id: int, found: Found | None) -> None:
        """Result of a lookup; None when the cachestore gave no usable answer."""
        row = self._rows.get(request_id)
        if row is None:
            if found is not None:
                self.prefix.release(found)
            return
        assert row.state is State.LOOKUP
        row.found, row.state = found, State.QUEUED
        if found is not None and found.parting:
            row.planned = tuple(sorted({*row.planned, found.parting}))
        now = self.clock()
        row.watch.enter(Stage.QUEUE, now)
        rest = len(row.request.tokens) - (found.rows if found else 0)
        self.scheduler.add(Waiting(row.id, rest, now))

    def copied(self, request_id: int, valid: bool) -> None:
        """The next block of a hit is copied; `valid` False means that the hit is none."""
        row = self._rows.get(request_id)
        if row is None:
            return
        assert row.state is State.ATTACHING
        assert row.found is not None
        attachment = row.found.attachment
        assert attachment is not None
        try:
            if not valid:
                raise _NotAttached
            attachment.blocks[row.blocks].decode()
            row.blocks += 1
            if row.blocks < len(attachment.blocks):
                self._copy_block(row)
                return
            caches = attachment.caches()
            row.cached = row.found.rows
        except Exception as error:
            self._compute_instead(row, error)
            return
        self._insert(row, caches)

    def stored(self, request_id: int, tokens: int) -> None:
        """A Warm request's rows are written, or not: the store holds `tokens` of its prompt."""
        row = self._rows.get(request_id)
        if row is not None and row.state is State.STORING:
            self._send_done(row, FinishReason.LENGTH, stored=tokens)
            self._drop(row)

    def cancel(self, request_id: int) -> None:
        """Take the row out of the batch. What it has computed is stored, so that asking again is a
        hit."""
        row = self._rows.get(request_id)
        if row is None or row.is_over:
            return
        self.counters.cancelled += 1
        if row.uid is not None:
            self._writeback.cancelled(self._batch, row, self._computed())
        if row.aside is None:
            self._drop(row)
            return
        row.state = State.LEAVING
        self._leave_batch(row)

    def fail_all(self, code: grpc.StatusCode, message: str) -> None:
        """End every request with a status; what rows that are over had still to store is counted
        as dropped."""
        for row in list(self._rows.values()):
            if row.is_over and (row.rows_final is None or not is_packed(row)):
                self.prefix.give_up(row.found)
            self._fail(row, Failed(code, message))

    # --- one turn ------------------------------------------------------------------------

    def turn(self) -> bool:
        """Admit what may start, run one step and pack some rows; False when nothing is computed or
        left to pack."""
        for request_id in self.scheduler.admit(self._load(), self.clock()):
            self._start(self._rows[request_id])
        self._remove_left()
        if not self._computed():
            return False
        try:
            reached: tuple[Reached, ...] = ()
            if any(row.state is State.RUNNING for row in self._by_uid.values()):
                result = self._batch.step()
                self._take(result)
                reached = result.reached
            self._write_back(reached)
        except Exception as error:
            self._replace_batch(error)
            return True
        self._step_failures = 0
        return True

    def close(self) -> None:
        """Drop everything; requests have been failed before."""
        assert not self._rows
        self._remove_left()
        self._batch.close()

    def _computed(self) -> list[Row]:
        """Those that have or will have rows to store, in the batch or aside."""
        return [row for row in self._rows.values() if row.state in (State.RUNNING, State.LEAVING)]

    def _load(self) -> Load:
        prefilling = []
        decoding = 0
        for row in self._rows.values():
            if row.state is State.ATTACHING:
                prefilling.append(len(row.request.tokens) - (row.found.rows if row.found else 0))
            elif row.state is State.LEAVING:
                decoding += 1  # what is aside takes as much memory
            elif row.uid is not None:
                # The batch holds nothing of a row before its first step.
                rest = len(row.request.tokens) - max(self._batch.held(row.uid), row.cached)
                if rest > 0:
                    prefilling.append(rest)
                else:
                    decoding += 1
        return Load(tuple(prefilling), decoding)

    def _start(self, row: Row) -> None:
        row.state = State.ATTACHING
        if row.found is None or row.found.attachment is None:
            self._insert(row, None)
            return
        row.watch.enter(Stage.ATTACH, self.clock())
        try:
            self._copy_block(row)
        except Exception as error:
            self._compute_instead(row, error)

    def _compute_instead(self, row: Row, error: Exception) -> None:
        """The rows of a hit cannot be used: the hit is none."""
        if not isinstance(error, _NotAttached):
            log.error("rows could not be attached; computing them instead", exc_info=error)
        self._forget_found(row)
        self._insert(row, None)

    def _copy_block(self, row: Row) -> None:
        assert row.found is not None
        assert row.found.attachment is not None
        blocks = row.found.attachment.blocks
        block = blocks[row.blocks]
        block.allocate()
        self.prefix.copy(row.id, row.found, block, last=row.blocks == len(blocks) - 1)

    def _insert(self, row: Row, caches: list[Any] | None) -> None:
        row.watch.enter(Stage.PREFILL, self.clock())
        row.state = State.RUNNING
        self._writeback.begin(row)
        row.sampler = sampler_for(row.request.sampling)
        row.penalizer = penalizer_for(row.request.sampling.penalties)
        stops = [position for position in row.planned if position > row.cached]
        row.uid = self._batch.insert(
            row.request.tokens, caches, row.cached, row.sampler, row.penalizer, stops
        )
        self._by_uid[row.uid] = row
        self.counters.begun(row)

    def _take(self, result: StepResult) -> None:
        self.counters.prefilled_tokens += result.computed
        self.counters.batch_requests.add(len(self._by_uid))
        now = self.clock()
        logprobs = self._read_logprobs(result)
        for token in result.tokens:
            row = self._by_uid[token.uid]
            if row.state is State.LEAVING:
                continue
            if self.observe is not None:
                self.observe(row.id, token)
            if not row.first_token_sent:
                row.watch.enter(Stage.DECODE, now)
            self.counters.replied(row, now)
            if row.request.warm:
                row.state = State.LEAVING
            else:
                self._push(row, token.token, logprobs.get(token.uid))

    def _write_back(self, reached: Sequence[Reached]) -> None:
        """After all tokens of the step are sent: nobody's reply waits for a write."""
        self._writeback.step(self._batch, self._computed(), reached)
        self._let_leave()
        self._remove_left()

    def _read_logprobs(self, result: StepResult) -> dict[int, TokenLogprobs]:
        asked = {}
        for token in result.tokens:
            row = self._by_uid[token.uid]
            if row.state is not State.LEAVING and row.request.logprobs is not None:
                asked[token.uid] = row.request.logprobs
        return self._logprobs.read(result.tokens, asked)

    def _push(self, row: Row, token: int, logprobs: TokenLogprobs | None) -> None:
        self.counters.completion_tokens += 1
        try:
            if row.failure is not None:
                raise row.failure
            pushed = row.output.push(token, logprobs)
        except Exception as error:
            log.exception("a row failed")
            self._fail(row, _internal(error))
            return
        if pushed.delta is not None:
            row.sink(pushed.delta)
        if pushed.reason is not None:
            self._send_done(row, pushed.reason, stop=pushed.stop)
            row.state = State.LEAVING

    def _let_leave(self) -> None:
        """Rows that are packed leave. Others stay, those in the batch decoding for nobody while
        streams beside them must not stall; when all are leaving, no step is made."""
        for row in [row for row in self._rows.values() if row.state is State.LEAVING]:
            packed = is_packed(row)
            if not packed and self.prefix.writes:
                continue
            if not packed:
                self.prefix.give_up(row.found)
            self._leave_batch(row)
            if row.is_over:
                self._drop(row)
                continue
            row.state = State.STORING
            if not packed or row.packed_to == row.cached:
                self.stored(row.id, row.cached)

    def _send_done(self, row: Row, reason: FinishReason, stop: str = "", stored: int = 0) -> None:
        self.counters.finished += 1
        row.sink(row.done(reason, self.clock(), stop, stored))

    # --- endings -------------------------------------------------------------------------

    def _fail(self, row: Row, failed: Failed) -> None:
        if not row.is_over:
            self.counters.failed += 1
            row.sink(failed)
        self._drop(row)

    def _drop(self, row: Row) -> None:
        self.scheduler.remove(row.id)
        self._leave_batch(row)
        self._forget_found(row)
        del self._rows[row.id]

    def _leave_batch(self, row: Row) -> None:
        if row.uid is not None:
            self._left.append(row.uid)
            del self._by_uid[row.uid]
            row.uid = None

    def _remove_left(self) -> None:
        # All at once: each removal copies the batch.
        if self._left:
            self._batch.remove(self._left)
            self._left = []

    def _forget_found(self, row: Row) -> None:
        """Release the lease, after the writes that were handed over before."""
        if row.found is not None:
            self.prefix.release(row.found)
            row.found = None

    def _replace_batch(self, error: Exception) -> None:
        """A step raised: the generator's state is undefined, and every row in it is lost."""
        log.exception("a step of the batch failed")
        self._step_failures += 1
        message = f"a step of the batch failed: {type(error).__name__}: {error}"
        lost = list(self._by_uid.values())
        self._by_uid.clear()
        self._left.clear()
        for row in lost:
            row.uid = None
            self._fail(row, Failed(grpc.StatusCode.INTERNAL, message))
        if self._step_failures >= STEP_FAILURES_MAX:
            raise BatchBroken(message) from error
        # The traceback's frames hold the old caches.
        error.__traceback__ = None
        self._batch = Batch(self.caches, self.shape)
        mx.clear_cache()


def _internal(error: Exception) -> Failed:
    return Failed(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
