"""The one thread that touches MLX: load, self-check, every step, and the end.

Other threads leave messages in the inbox; the worker drains it between steps. If the thread dies
of anything, every caller gets a status first, and `ended` tells the server to exit non-zero.
"""

import contextlib
import copy
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import grpc
import mlx.core as mx

from engine import backend
from engine.core import Core
from engine.request import Failed, Request, Sink
from engine.rows import Counters, Occupancy

log = logging.getLogger(__name__)

Message = Callable[[Core], object]

# What requests are told that a stop ends.
STOPPING = Failed(grpc.StatusCode.UNAVAILABLE, "the engine is stopping")

# A row whose cached rows are being copied joins after the step that follows the copy. So the step
# waits for copies, at most this share of the time that the one before it took.
COPY_WAIT_SHARE = 1 / 8
# Requests that come together begin together: the first step after a pause waits so long at most
# for those that are being prepared or looked up. Behind a first one that began alone, the others
# would be computed in the short steps that a decoding row allows.
GATHER_SECONDS = 0.03
# So long after its last request, a worker gives back the memory that MLX keeps for the next ones,
# up to gigabytes of a machine that others use, too.
REST_SECONDS = 60.0


class WorkerOver(RuntimeError):
    """The worker has ended; `failed` is what its callers are told."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """`rows`: requests that the core knows, those included whose reply is over and whose rows are
    not packed yet. `active_bytes` and `peak_bytes`: what MLX holds in arrays, and the most it ever
    held; `cache_bytes`: what it keeps of others for the next ones."""

    rows: int
    occupancy: Occupancy
    counters: Counters
    active_bytes: int
    peak_bytes: int
    cache_bytes: int


class Worker:
    """Runs a Core on its own thread, from `start` to `stop` or to its death.

    start ─▶ loading ─▶ serving ─▶ stopped    (ended: result None)
                └──────────┴─────▶ dead       (ended: the exception)
    """

    def __init__(
        self, make_core: Callable[[], Core], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`make_core` runs on the worker thread: it loads the model, and makes a core that goes
        by the same `clock`."""
        self._make_core = make_core
        self._clock = clock
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._over: Failed | None = None
        self._stopping = False
        self._turn_began: float | None = None
        self._preparing = 0
        self.ready: Future[None] = Future()
        self.ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="mlx-worker")

    @property
    def turn_seconds(self) -> float:
        """How long the present turn or message has taken; 0 while there is nothing to do."""
        began = self._turn_began
        return 0.0 if began is None else self._clock() - began

    def start(self) -> None:
        self._thread.start()

    def post(self, message: Message) -> None:
        """Have `message` called with the core between two steps. Dropped when it is over."""
        with self._lock:
            if self._over is None:
                self._inbox.put(message)

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """While a request that will be submitted is made ready. Any thread."""
        with self._lock:
            self._preparing += 1
        try:
            yield
        finally:
            with self._lock:
                self._preparing -= 1

    def submit(self, request_id: int, request: Request, sink: Sink) -> None:
        """Start a request. The sink gets its events on the worker thread; it must not block."""
        self._ask(_Submit(request_id, request, sink, self._clock()))

    def cancel(self, request_id: int) -> None:
        self.post(lambda core: core.cancel(request_id))

    def snapshot(self) -> "Future[Snapshot]":
        """The state between two steps; fails when the worker is over."""
        look = _Look(Future())
        self._ask(look)
        return look.result

    def stop(self) -> None:
        """End after the present step; requests that still run fail with UNAVAILABLE. Joins."""
        self._stopping = True
        self.post(lambda _: None)
        if self._thread.ident is not None:
            self._thread.join()

    def _ask(self, question: "_Submit | _Look") -> None:
        with self._lock:
            over = self._over
            if over is None:
                self._inbox.put(question)
        if over is not None:
            question.over(over)

    def _run(self) -> None:
        failure: BaseException | None = None
        core: Core | None = None
        try:
            core = self._make_core()
            self.ready.set_result(None)
            self._serve(core)
        except BaseException as error:
            failure = error
        self._turn_began = None
        self._end(core, failure)
        core = None
        # A thread that used MLX and ends without this aborts the process at exit.
        mx.clear_streams()
        if not self.ready.done():
            self.ready.set_exception(failure or RuntimeError("stopped while loading"))
        if failure is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(failure)

    def _serve(self, core: Core) -> None:
        rest_at: float | None = self._clock() + REST_SECONDS
        while not self._stopping:
            self._turn_began = began = self._clock()
            if core.turn():
                now = self._clock()
                rest_at = now + REST_SECONDS
                until = now + COPY_WAIT_SHARE * (now - began)
                self._take_messages(core, lambda: core.copying, until)
            else:
                self._turn_began = None
                rest_at = self._rest(core, rest_at)
                until = self._clock() + GATHER_SECONDS
                self._take_messages(core, lambda: core.looking_up or self._preparing > 0, until)

    def _rest(self, core: Core, rest_at: float | None) -> float | None:
        """Takes the next message, and at `rest_at` gives memory back. When that is due then."""
        if len(core):
            # At work, if without a step: what it holds will be freed.
            self._take_message(core, None)
            return self._clock() + REST_SECONDS
        if rest_at is not None:
            try:
                self._take_message(core, max(0.0, rest_at - self._clock()))
                return rest_at
            except queue.Empty:
                backend.release_memory()
        self._take_message(core, None)
        return None

    def _take_messages(self, core: Core, more: Callable[[], bool], until: float) -> None:
        """All that are there, and while there are to be more, those that come until then."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._take_message(core, max(0.0, until - self._clock()) if more() else 0.0)

    def _take_message(self, core: Core, seconds: float | None) -> None:
        """Waits so long for one, None: until there is one; raises queue.Empty."""
        message = self._inbox.get(seconds != 0, seconds)
        self._turn_began = self._clock()
        message(core)

    def _end(self, core: Core | None, failure: BaseException | None) -> None:
        if failure is None:
            over = STOPPING
        else:
            if core is not None:
                log.error("the MLX worker died", exc_info=failure)
            over = Failed(grpc.StatusCode.INTERNAL, f"the engine's worker died: {failure}")
        with self._lock:
            self._over = over
        while not self._inbox.empty():
            message = self._inbox.get()
            if isinstance(message, _Submit | _Look):
                message.over(over)
        if core is not None:
            try:
                core.fail_all(over.code, over.message)
                core.close()
            except Exception:
                # A batch that died may be in no state to be closed; `ended` must be told.
                log.exception("the worker could not clean up")


@dataclasses.dataclass(frozen=True, slots=True)
class _Submit:
    request_id: int
    request: Request
    sink: Sink
    since: float

    def __call__(self, core: Core) -> None:
        core.submit(self.request_id, self.request, self.sink, self.since)

    def over(self, failed: Failed) -> None:
        self.sink(failed)


@dataclasses.dataclass(frozen=True, slots=True)
class _Look:
    result: "Future[Snapshot]"

    def __call__(self, core: Core) -> None:
        # The caller may have given up and cancelled it.
        if self.result.set_running_or_notify_cancel():
            self.result.set_result(_snapshot(core))

    def over(self, failed: Failed) -> None:
        if self.result.set_running_or_notify_cancel():
            self.result.set_exception(WorkerOver(failed))


def _snapshot(core: Core) -> Snapshot:
    return Snapshot(
        len(core),
        core.occupancy(),
        copy.deepcopy(core.counters),
        mx.get_active_memory(),
        mx.get_peak_memory(),
        mx.get_cache_memory(),
    )
