"""What is left of free bytes after many random operations, and how long the daemon was deaf.

    python -m benchmarks.fragmentation [--operations 100000] [--budget 256MiB]

A real cachestore is kept at 95 % of its budget by one client: half of the operations look
sequences up, the others write, of which every twentieth is aborted, and then random records are
evicted, with all behind them, until 95 % are left. Records hold 300 or 180 kB; two models take
turns, half of the writes go on where another sequence ends or is left.

"useful" is the share of the free bytes in holes that hold a record of the median size. A stall is
a callback that kept the daemon's event loop for over 5 ms. Of those the daemon's own are told
apart, by the time that its thread was running: the others are the machine's, busy elsewhere.
"""

import argparse
import random
import re
import time
from dataclasses import dataclass, field

import numpy as np
from tests.support.daemons import Cachestore, short_directory, start_cachestore

from benchmarks.measure import Columns, flags, mebibytes, progress, publish
from cachestore.client import Client, StoreRefused

LOAD = 0.95
ROW_BYTES = {bytes([1]) * 32: 1200, bytes([2]) * 32: 700}
OVERHEAD_BYTES = 512
# Longer sequences are not gone on from.
TOKENS_MAX = 10_000
KNOWN_MAX = 20_000
STALL_SECONDS = 0.005
TARGET_STALL_SECONDS = 0.02
# Read by Python itself when the daemon starts. Each line: seconds of a callback, and those of them
# in which its thread was running.
SITE = f"""
import sys, time
from asyncio.events import Handle
run = Handle._run
def _run(self):
    began, began_running = time.perf_counter(), time.thread_time()
    run(self)
    took = time.perf_counter() - began
    if took > {STALL_SECONDS}:
        print(f"stall {{took:.6f}} {{time.thread_time() - began_running:.6f}}", file=sys.stderr)
Handle._run = _run
print("stalls are watched", file=sys.stderr)
"""


@dataclass(frozen=True, slots=True)
class Measured:
    operations: int
    records: int
    load: float
    free_bytes: int
    useful: float
    evicted_bytes: int
    moved_bytes: int
    stalls_over_5_ms: int
    stalls_over_20_ms: int
    longest_stall_seconds: float
    own_over_20_ms: int
    longest_own_seconds: float


COLUMNS: Columns = {
    "operations": lambda row: f"{row.operations:,}",
    "records": lambda row: f"{row.records:,}",
    "load": lambda row: f"{row.load:.1%}",
    "free": lambda row: mebibytes(row.free_bytes),
    "useful": lambda row: f"{row.useful:.1%}",
    "evicted": lambda row: mebibytes(row.evicted_bytes),
    "moved": lambda row: mebibytes(row.moved_bytes),
    "stalls > 5 ms": lambda row: str(row.stalls_over_5_ms),
    "> 20 ms": lambda row: str(row.stalls_over_20_ms),
    "longest": lambda row: f"{1000 * row.longest_stall_seconds:.0f} ms",
    "own > 20 ms": lambda row: str(row.own_over_20_ms),
    "own, longest": lambda row: f"{1000 * row.longest_own_seconds:.0f} ms",
}


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--budget", default="256MiB")
    parser.add_argument("--reports", type=int, default=10, help="how often to look (10)")
    options = parser.parse_args()
    if options.small:
        options.operations, options.budget, options.reports = 300, "16MiB", 1
    with short_directory() as directory:
        (directory / "sitecustomize.py").write_text(SITE)
        with start_cachestore(
            directory,
            budget=options.budget,
            environment={"PYTHONPATH": str(directory)},
            log_level="warning",
        ) as daemon:
            rows = measure(daemon, options)
    publish(options, f"one cachestore of {options.budget} at {LOAD:.0%}", COLUMNS, rows)


def measure(daemon: Cachestore, options: argparse.Namespace) -> list[Measured]:
    """A row for each report."""
    rows = []
    with daemon.client() as client:
        load = Load(client)
        for count in range(1, options.operations + 1):
            load.operate()
            if count % (options.operations // options.reports) == 0:
                settle(client)
                rows.append(seen(daemon, count))
                progress(f"{count:,} operations, {rows[-1].useful:.1%} useful")
    return rows


def settle(client: Client) -> None:
    """Wait until the daemon has nothing more to move."""
    moved = -1
    while moved != (moved := client.stats().bytes_moved):
        time.sleep(1.5)


def seen(daemon: Cachestore, operations: int) -> Measured:
    found = daemon.stats()
    assert "stalls are watched" in daemon.log
    lines = re.findall(r"^stall ([0-9.]+) ([0-9.]+)$", daemon.log, re.MULTILINE)
    stalls, own = ([float(line[column]) for line in lines] for column in (0, 1))
    return Measured(
        operations=operations,
        records=found.records,
        load=found.bytes_used / found.bytes_budget,
        free_bytes=found.bytes_free,
        useful=found.bytes_useful / found.bytes_free,
        evicted_bytes=found.bytes_evicted,
        moved_bytes=found.bytes_moved,
        stalls_over_5_ms=len(stalls),
        stalls_over_20_ms=sum(took > TARGET_STALL_SECONDS for took in stalls),
        longest_stall_seconds=max(stalls, default=0.0),
        own_over_20_ms=sum(took > TARGET_STALL_SECONDS for took in own),
        longest_own_seconds=max(own, default=0.0),
    )


@dataclass
class Load:
    """Random operations of one client."""

    client: Client
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    known: list[tuple[bytes, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.numbers = np.random.default_rng(0)

    def operate(self) -> None:
        if self.known and self.chance.random() < 0.5:
            self.look()
        else:
            self.write()

    def look(self) -> None:
        namespace, tokens = self.chance.choice(self.known)
        lease = self.client.lookup(namespace, tokens, len(tokens) // 4)
        if lease.id:
            self.client.release([lease.id])

    def write(self) -> None:
        namespace, before = self.chance.choice(list(ROW_BYTES)), b""
        if self.known and self.chance.random() < 0.5:
            namespace, before = self.chance.choice(self.known)
            if len(before) > 4 * TOKENS_MAX:
                before = b""
            elif self.chance.random() < 0.3:
                before = before[: 4 * self.chance.randint(1, len(before) // 4)]
        count = min(2000, 10 + int(self.chance.expovariate(1 / 400)))
        tokens = before + self.numbers.integers(0, 1 << 17, count, dtype=np.uint32).tobytes()
        row_bytes = ROW_BYTES[namespace]
        try:
            room = self.client.reserve(namespace, tokens, 0, OVERHEAD_BYTES, row_bytes, "load")
        except StoreRefused:
            return
        if self.chance.random() < 0.05:
            self.client.abort(room.id)
            return
        sizes = [OVERHEAD_BYTES + piece.rows * row_bytes for piece in room.pieces]
        self.client.commit(room.id, sizes)
        self.evict()
        # All that may be held, or else nothing could be found to evict in the end.
        self.known.append((namespace, tokens))
        del self.known[:-KNOWN_MAX]

    def evict(self) -> None:
        """Random records of random sequences."""
        held = self.client.stats()
        surplus = held.bytes_used - LOAD * held.bytes_budget
        while surplus > 0 and self.known:
            namespace, tokens = self.known.pop(self.chance.randrange(len(self.known)))
            lease = self.client.lookup(namespace, tokens, len(tokens) // 4)
            if lease.id:
                self.client.release([lease.id])
                place = self.chance.randrange(len(lease.spans))
                victim = lease.spans[place].record_id
                surplus -= self.client.evict(record_id=victim).bytes
                # What is left of it can be found again.
                rows = sum(span.rows for span in lease.spans[:place])
                if rows:
                    self.known.append((namespace, tokens[: 4 * rows]))


if __name__ == "__main__":
    main()
