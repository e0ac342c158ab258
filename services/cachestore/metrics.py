"""The daemon's numbers as Prometheus metrics: those of Stats, under other names."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cachestore.exporter import Families
from cachestore.v1 import cachestore_pb2 as pb

PREFIX = "mlx_cachestore_store_"
# How long a scrape waits for the event loop, which no call holds for longer than some ms.
ANSWER_SECONDS = 0.8


class StoreMetrics(Collector):
    """Asks the daemon's event loop at each scrape; before `begin`, and when the loop does not
    answer in time, says only that it does not."""

    def __init__(self) -> None:
        self._ask: Callable[[Future[pb.StatsResponse]], object] | None = None

    def begin(self, loop: asyncio.AbstractEventLoop, stats: Callable[[], pb.StatsResponse]) -> None:
        """From now on `stats` is asked, on `loop`."""

        def answer(future: Future[pb.StatsResponse]) -> None:
            # The scrape may have given up.
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(stats())
                except Exception as error:
                    future.set_exception(error)

        self._ask = lambda future: loop.call_soon_threadsafe(answer, future)

    def describe(self) -> list[Metric]:
        return families(pb.StatsResponse())

    def collect(self) -> list[Metric]:
        return families(self._stats())

    def _stats(self) -> pb.StatsResponse | None:
        if self._ask is None:
            return None
        future: Future[pb.StatsResponse] = Future()
        try:
            self._ask(future)
            return future.result(ANSWER_SECONDS)
        except (TimeoutError, RuntimeError):
            # RuntimeError: the loop is closed.
            future.cancel()
            return None


def families(stats: pb.StatsResponse | None) -> list[Metric]:
    """All metrics; only that there are none when they are not known."""
    found = Families(PREFIX)
    found.gauge(
        "up",
        "1 when the daemon answers and trusts what it holds.",
        0.0 if stats is None or stats.check_failures else 1.0,
    )
    if stats is not None:
        found.info("build", "What runs here.", {"version": stats.version})
        _memory(found, stats)
        _contents(found, stats)
        _lookups(found, stats.lookups)
        _writes(found, stats.writes)
        _departures(found, stats)
    return found.made


def _memory(found: Families, stats: pb.StatsResponse) -> None:
    found.gauge("budget_bytes", "Bound on the shared memory held.", stats.bytes_budget)
    states = ("used", "reserved", "quarantined", "retiring", "free")
    found.gauge(
        "memory_bytes",
        "Shared memory held. used: records and checkpoints; reserved: being written; quarantined: "
        "of writers that said nothing, until their session ends; retiring: given back, while "
        "clients still map it; free: the rest.",
        {state: getattr(stats, f"bytes_{state}") for state in states},
        "state",
    )
    found.gauge(
        "useful_bytes",
        "Of the free bytes: in holes that a record of the median size fits in.",
        stats.bytes_useful,
    )
    parts = ("checkpoints", "padding", "stranded")
    found.gauge(
        "used_part_bytes",
        "Of the used bytes. checkpoints: states of layers that cannot be cut; padding: ends of "
        "extents; stranded: rows that no lookup can reach.",
        {part: getattr(stats, f"bytes_{part}") for part in parts},
        "part",
    )
    found.counter("moved_bytes", "Copied to bring free bytes together.", stats.bytes_moved)
    found.counter("slab_failures", "Slabs that the system had no memory for.", stats.slab_failures)
    found.counter(
        "check_failures",
        "Above 0 the store has contradicted itself and serves nothing until it is restarted.",
        stats.check_failures,
    )


def _contents(found: Families, stats: pb.StatsResponse) -> None:
    for name, meaning, value in (
        ("slabs", "Slabs of shared memory held.", stats.slabs),
        ("namespaces", "Models that something is held for.", len(stats.namespaces)),
        ("records", "Records of rows held.", stats.records),
        ("checkpoints", "Checkpoints held.", stats.checkpoints),
        ("sequences", "Ends of stored sequences.", stats.sequences),
        ("tokens", "Rows that a lookup can reach.", stats.tokens),
        ("sessions", "Engines connected.", stats.sessions),
        ("leases", "Leases open.", stats.leases),
        ("reservations", "Writes that are staged.", stats.reservations),
        ("announcements", "Announcements of rows that somebody computes.", stats.announced),
        ("waiting_lookups", "Lookups that wait for announced rows.", stats.waiting),
        ("pinned_records", "Records that a person has pinned.", stats.pinned),
    ):
        found.gauge(name, meaning, value)


def _lookups(found: Families, lookups: pb.LookupStats) -> None:
    kinds = ("exact", "supersequence", "prefix", "lcp", "miss")
    found.counter(
        "lookups",
        "Lookups by kind of match.",
        {kind: getattr(lookups, kind) for kind in kinds},
        "match",
    )
    found.histogram(
        "lookup_seconds",
        "Time that a lookup took in the daemon, waiting for other calls aside.",
        lookups.seconds,
    )
    found.counter("requested_tokens", "Tokens of all lookups.", lookups.tokens_requested)
    found.counter(
        "served_tokens", "Tokens of lookups that were served from here.", lookups.tokens_served
    )


def _writes(found: Families, writes: pb.WriteStats) -> None:
    outcomes = ("committed", "refused", "dropped")
    found.counter(
        "writes",
        "Writes. committed: published; refused: did not fit; dropped: staged, and ended without "
        "a commit.",
        {outcome: getattr(writes, outcome) for outcome in outcomes},
        "outcome",
    )
    news = ("inserted", "duplicate")
    found.counter(
        "written_rows",
        "Rows of commits. inserted: added; duplicate: another writer was faster.",
        {each: getattr(writes, f"rows_{each}") for each in news},
        "novelty",
    )
    found.counter(
        "written_checkpoints",
        "Checkpoints of commits, as for rows.",
        {each: getattr(writes, f"checkpoints_{each}") for each in news},
        "novelty",
    )


def _departures(found: Families, stats: pb.StatsResponse) -> None:
    found.counter(
        "evicted_records",
        "Records of rows that left for room, or with the last checkpoint that made them useful.",
        stats.evictions,
    )
    found.counter(
        "evicted_checkpoints",
        "Checkpoints that left. room: for room; surplus: their conversation had too many.",
        {"room": stats.checkpoints_evicted, "surplus": stats.checkpoints_surplus},
        "reason",
    )
    found.counter("evicted_bytes", "Bytes of all that left.", stats.bytes_evicted)
