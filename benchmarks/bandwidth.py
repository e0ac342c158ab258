"""Attach and store, beside memcpy of the same number of bytes.

    python -m benchmarks.bandwidth [--layouts smollm2-135m,8b,hybrid] [--rows 1000,4000,16000]
                                   [--codecs none,q8] [--runs 5]

A cachestore of its own, and the engine's own path between it and MLX arrays, on the engine's
threads: `Prefix` looks up, copies and writes; this thread is the one that has MLX. "reused" are
buffers that MLX has kept from the run before, "fresh" ones that the system has to give; memcpy
copies the records' bytes from the mapped slab to memory of the same sort. "hybrid" has the shape
of Qwen3-Next-80B: three of four layers are recurrent, so a sequence has a checkpoint at its end.
"""

import contextlib
import ctypes
import mmap
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from engine import backend

backend.prepare()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
import numpy.typing as npt  # noqa: E402
from tests.support import entries  # noqa: E402
from tests.support.caches import hybrid, layout, random_rows, random_snapshot  # noqa: E402
from tests.support.daemons import Cachestore, short_directory, start_cachestore  # noqa: E402
from tests.support.stores import packed  # noqa: E402

from benchmarks.measure import (  # noqa: E402
    Columns,
    flags,
    mebibytes,
    median,
    progress,
    publish,
    seconds,
)
from cachestore import record  # noqa: E402
from engine.found import Found, plan  # noqa: E402
from engine.kv.codec import CodecPolicy  # noqa: E402
from engine.kv.history import Rows, sliced  # noqa: E402
from engine.kv.kinds import Snapshot  # noqa: E402
from engine.kv.layout import CacheLayout  # noqa: E402
from engine.kv.states import ArrayShape  # noqa: E402
from engine.link import StoreLink  # noqa: E402
from engine.prefix import Prefix, Receiver  # noqa: E402
from engine.storing import Tail  # noqa: E402
from engine.writeback import PIECE_ROWS  # noqa: E402

LAYOUTS = {
    "smollm2-135m": layout((30, 64, 64), heads=3, dtype="float32"),
    "8b": layout((32, 128, 128), heads=8, dtype="bfloat16"),
    "hybrid": hybrid(
        *(48, 4, (ArrayShape((3, 8192), "bfloat16"), ArrayShape((32, 128, 128), "float32"))),
        *(2, 256, "bfloat16"),
    ),
    "tiny": layout((3, 64, 64), heads=2, dtype="float32"),
    "tiny-hybrid": hybrid(4, 4, (ArrayShape((4, 32, 32), "float32"),), 2, 64, "float32"),
}
NAMESPACE = bytes(32)
# What one size may take in the store; it exists about five times.
STORED_BYTES_MAX = 2 << 30
TICK_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians of the runs, but for `mlx_seconds_max` (one piece of work on the MLX thread) and
    `gil_seconds_max` (how late a third thread got to run), which are the longest of all runs."""

    layout: str
    codec: str
    rows: int
    work: str
    stored_bytes: int
    memcpy_seconds: float
    seconds: float
    phase_seconds: dict[str, float]
    mlx_seconds_max: float
    gil_seconds_max: float


COLUMNS: Columns = {
    "layout": lambda row: row.layout,
    "codec": lambda row: row.codec,
    "rows": lambda row: str(row.rows),
    "stored": lambda row: mebibytes(row.stored_bytes),
    "work": lambda row: row.work,
    "memcpy": lambda row: rate(row.stored_bytes, row.memcpy_seconds),
    "this": lambda row: rate(row.stored_bytes, row.seconds),
    "of memcpy": lambda row: f"{row.memcpy_seconds / row.seconds:.0%}",
    "phases, ms": lambda row: " ".join(
        f"{name} {1000 * spent:.3g}" for name, spent in row.phase_seconds.items()
    ),
    "MLX kept": lambda row: seconds(row.mlx_seconds_max),
    "GIL kept": lambda row: seconds(row.gil_seconds_max),
}


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument(
        "--layouts", default="smollm2-135m,8b,hybrid", help=f"of {', '.join(LAYOUTS)}"
    )
    parser.add_argument("--rows", default="1000,4000,16000")
    parser.add_argument("--codecs", default="none,q8")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    if options.small:
        options.layouts, options.rows, options.runs = "tiny,tiny-hybrid", "600", 1
    backend.apply_memory_limits(backend.memory_limits(backend.describe()))
    found = []
    for name in options.layouts.split(","):
        for rows in map(int, options.rows.split(",")):
            for codec in options.codecs.split(","):
                found += measure(name, CodecPolicy.of(LAYOUTS[name], codec), rows, options.runs)
    publish(options, "Attach and store", COLUMNS, found)


def measure(name: str, policy: CodecPolicy, rows: int, runs: int) -> list[Measured]:
    if rows * policy.lossless.row_bytes > STORED_BYTES_MAX:
        progress(f"{name}, {rows} rows: left out, too large")
        return []
    progress(f"{name}, {policy.codec.name}, {rows} rows")
    works: dict[str, list[Run]] = {}
    with short_directory() as directory:
        # Room for two sequences, and for a few records, of which a slab holds one at least.
        record_bytes = max(PIECE_ROWS * policy.codec.row_bytes, state_bytes(policy, rows))
        budget = 2 * stored_bytes(policy, rows) + 8 * record_bytes + (64 << 20)
        fill = budget // stored_bytes(policy, rows) + 1
        with start_cachestore(directory, budget=budget) as daemon, engine(daemon, policy) as bench:
            live = Live.of(policy.codec.layout, rows)
            for work, run in bench.works(live, rows, runs, fill):
                works.setdefault(work, []).append(run)
    return [summary(name, policy, rows, work, timed) for work, timed in works.items()]


def state_bytes(policy: CodecPolicy, position: int) -> int:
    """Of a checkpoint, if there is one."""
    if not policy.codec.layout.checkpointed:
        return 0
    return record.plan(policy.checkpoint(position).schema, 1).record_bytes


def stored_bytes(policy: CodecPolicy, rows: int) -> int:
    return rows * policy.codec.row_bytes + state_bytes(policy, rows)


@dataclass(frozen=True, slots=True)
class Live:
    """What the live caches of a request hold, by leaf: rows in whole pieces, and the state."""

    rows: Sequence[Rows]
    state: Snapshot | None

    @classmethod
    def of(cls, layout: CacheLayout, rows: int) -> "Live":
        held = random_rows(layout, -(-rows // PIECE_ROWS) * PIECE_ROWS)
        return cls(held, random_snapshot(layout, rows) if layout.checkpointed else None)


@dataclass
class Run:
    """One measurement, from its construction to `end`."""

    began: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    memcpy_seconds: float = 0.0
    phase_seconds: dict[str, float] = field(default_factory=dict)
    mlx_seconds_max: float = 0.0
    gil_seconds_max: float = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds to a phase."""
        start = time.perf_counter()
        yield
        self.add(name, time.perf_counter() - start)

    @contextmanager
    def keeping_mlx(self, name: str) -> Iterator[None]:
        """Adds to a phase that is one piece of work, for which other streams have to wait."""
        start = time.perf_counter()
        yield
        spent = time.perf_counter() - start
        self.add(name, spent)
        self.mlx_seconds_max = max(self.mlx_seconds_max, spent)

    def add(self, name: str, spent: float) -> None:
        self.phase_seconds[name] = self.phase_seconds.get(name, 0.0) + spent

    def end(self) -> None:
        self.seconds = time.perf_counter() - self.began


def summary(name: str, policy: CodecPolicy, rows: int, work: str, runs: Sequence[Run]) -> Measured:
    return Measured(
        layout=name,
        codec=policy.codec.name,
        rows=rows,
        work=work,
        stored_bytes=stored_bytes(policy, rows),
        memcpy_seconds=median(run.memcpy_seconds for run in runs),
        seconds=median(run.seconds for run in runs),
        phase_seconds={
            phase: median(run.phase_seconds[phase] for run in runs)
            for phase in runs[0].phase_seconds
        },
        mlx_seconds_max=max(run.mlx_seconds_max for run in runs),
        gil_seconds_max=max(run.gil_seconds_max for run in runs),
    )


class Bench:
    """The MLX thread of an engine that does nothing but store and attach one sequence.

    It does with Prefix what Writeback and Core do with it, and receives what Core receives.
    """

    def __init__(self, link: StoreLink, policy: CodecPolicy) -> None:
        self._inbox: queue.SimpleQueue[Callable[[Receiver], None]] = queue.SimpleQueue()
        self._policy = policy
        self.prefix = Prefix(self._inbox.put, link, policy)
        self.prefix.identify(NAMESPACE)
        self._found: Found | None = None
        self._tokens: tuple[int, ...] = ()

    def looked_up(self, _request_id: int, found: Found | None) -> None:
        self._found = found

    def copied(self, _request_id: int, valid: bool) -> None:
        assert valid

    def stored(self, _request_id: int, tokens: int) -> None:
        assert tokens > 0

    def works(self, live: Live, rows: int, runs: int, fill: int) -> Iterator[tuple[str, Run]]:
        """Each work `runs` times. Every sequence is another one, and the first `fill` fill the
        store."""
        for number in range(fill):
            forget_freed_memory()
            fresh = self._store(live, number, rows)
            with self._looked_up(number, rows) as found:
                fresh.memcpy_seconds = memcpy(found, fresh_buffer(found))
                buffer = fresh_buffer(found)
            if number < 2:
                yield "store, fresh", fresh
        for number in range(fill, fill + 2 * runs, 2):
            # The first one gives the second one its buffers.
            self._store(live, number, rows)
            store = self._store(live, number + 1, rows)
            with self._looked_up(number + 1, rows) as found:
                fresh_memcpy_seconds = memcpy(found, fresh_buffer(found))
                forget_freed_memory()
                fresh = self._attach(found)
                fresh.memcpy_seconds = fresh_memcpy_seconds
                memcpy(found, buffer)
                memcpy_seconds = memcpy(found, buffer)
                reused = self._attach(found)
            store.memcpy_seconds = reused.memcpy_seconds = memcpy_seconds
            yield from (("attach, reused", reused), ("attach, fresh", fresh))
            yield "store, reused", store

    @contextmanager
    def _looked_up(self, number: int, rows: int) -> Iterator[Found]:
        self._tokens = tokens_of(number, rows + 1)
        self.prefix.look_up(0, self._tokens, (), lambda: True)
        self._receive()
        assert self._found is not None
        assert self._found.rows == rows
        yield self._found
        self.prefix.release(self._found)
        self._found = None
        self.prefix.drain()

    def _receive(self) -> None:
        self._inbox.get()(self)

    def _store(self, live: Live, number: int, rows: int) -> Run:
        """As Writeback does, piece by piece, but without steps of a batch between."""
        tokens = tokens_of(number, rows)
        with ticking() as late:
            run = Run()
            pieces = []
            for first in range(0, rows, PIECE_ROWS):
                with run.keeping_mlx("pack"):
                    span = range(first, min(first + PIECE_ROWS, rows))
                    cut = slice(span.start, span.stop)
                    piece = [sliced(leaf, cut) for leaf in live.rows]
                    pieces += self.prefix.pack(rows, piece, span)
            states = []
            if live.state is not None:
                with run.keeping_mlx("copy state"):
                    states.append(self.prefix.pack_checkpoint(live.state, rows))
            with run.phase("write"):
                self.prefix.write(Tail(tokens, tuple(pieces), tuple(states)), None, report=0)
                self._receive()
            run.end()
        run.gil_seconds_max = max(late)
        return run

    def _attach(self, found: Found) -> Run:
        """As Core does, but without steps of a batch between."""
        with ticking() as late:
            run = Run()
            with run.phase("plan"):
                tokens = packed(self._tokens)
                attachment = plan(self._policy, found.client, NAMESPACE, found.lease, tokens)
                assert attachment is not None
            found = Found(found.client, found.lease, attachment)
            for block in attachment.blocks:
                with run.keeping_mlx("allocate"):
                    block.allocate()
                with run.phase("copy"):
                    self.prefix.copy(0, found, block, last=block is attachment.blocks[-1])
                    self._receive()
                with run.keeping_mlx("decode"):
                    block.decode()
            caches = attachment.caches()
            run.end()
        assert sum(cache.nbytes for cache in caches) == attachment.nbytes
        run.gil_seconds_max = max(late)
        return run


@contextmanager
def engine(daemon: Cachestore, policy: CodecPolicy) -> Iterator[Bench]:
    link = StoreLink(daemon.socket, spawn=None)
    link.start()
    bench = Bench(link, policy)
    try:
        yield bench
    finally:
        bench.prefix.close()


def tokens_of(number: int, count: int) -> tuple[int, ...]:
    return (number, *range(count - 1))


def fresh_buffer(found: Found) -> npt.NDArray[np.uint8]:
    """Memory that nobody has touched, of pages of the usual size: numpy asks for huge ones."""
    total = sum(map(len, entries.records(found.client, found.lease)))
    return np.frombuffer(mmap.mmap(-1, total), np.uint8)


def memcpy(found: Found, target: npt.NDArray[np.uint8]) -> float:
    """Seconds for all bytes of the records, one copy for each."""
    views = [np.frombuffer(view, np.uint8) for view in entries.records(found.client, found.lease)]
    start = time.perf_counter()
    end = 0
    for view in views:
        np.copyto(target[end : end + len(view)], view)
        end += len(view)
    return time.perf_counter() - start


def forget_freed_memory() -> None:
    """Whatever MLX and malloc keep for reuse goes back to the system."""
    mx.clear_cache()
    with contextlib.suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def ticking() -> Iterator[list[float]]:
    """How late a thread was that wants to run, and needs the GIL for it, every millisecond."""
    late: list[float] = [0.0]
    over = threading.Event()

    def tick() -> None:
        while not over.is_set():
            start = time.perf_counter()
            time.sleep(TICK_SECONDS)
            late.append(time.perf_counter() - start - TICK_SECONDS)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield late
    finally:
        over.set()
        thread.join()


def rate(count: int, spent: float) -> str:
    return f"{count / spent / 1e9:.1f} GB/s"


if __name__ == "__main__":
    main()
