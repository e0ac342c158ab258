"""The engine's numbers as Prometheus metrics: those of Stats, under other names."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.protobuf.message import Message
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cachestore.exporter import Families
from engine import __version__, identity
from engine.v1 import engine_pb2 as pb

if TYPE_CHECKING:  # the page of documentation is made without MLX
    from engine.worker import Snapshot, Worker

PREFIX = "mlx_cachestore_engine_"
# How long a scrape waits for the worker, which answers between two steps.
ANSWER_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Served:
    """What is known once the model is loaded. `stats` runs on any thread; `moves` tells whether
    the worker still makes progress."""

    model: pb.GetModelResponse
    worker: "Worker"
    stats: "Callable[[Snapshot], pb.StatsResponse]"
    moves: Callable[[], bool]


class EngineMetrics(Collector):
    """Asks the worker at each scrape.

    While one step takes long, the answer has what the worker said last: at most as old as that
    step and the time between two scrapes. Before `begin` only that the engine does not serve.
    """

    def __init__(self) -> None:
        self._served: Served | None = None
        self._lock = threading.Lock()
        self._asked: Future[Snapshot] | None = None
        self._told: Snapshot | None = None

    def begin(self, served: Served) -> None:
        self._served = served

    def describe(self) -> list[Metric]:
        return families(True, 0.0, pb.GetModelResponse(), pb.StatsResponse())

    def collect(self) -> list[Metric]:
        served = self._served
        if served is None:
            return families(False, 0.0)
        snapshot = self._snapshot(served.worker)
        worker = served.worker
        up = served.moves() and not worker.ended.done()
        stats = None if snapshot is None else served.stats(snapshot)
        return families(up, worker.turn_seconds, served.model, stats)

    def _snapshot(self, worker: "Worker") -> "Snapshot | None":
        """The worker's state now, or else the last one it told.

        One question at a time: a worker that does not answer must not find a thousand of them.
        """
        with self._lock:
            if self._asked is None or self._asked.done():
                self._keep(self._asked)
                self._asked = worker.snapshot()
            asked = self._asked
        try:
            # An exception: the worker is over.
            return self._told if asked.exception(ANSWER_SECONDS) else asked.result()
        except TimeoutError:
            return self._told

    def _keep(self, answered: "Future[Snapshot] | None") -> None:
        if answered is not None and answered.exception() is None:
            self._told = answered.result()


def families(
    up: bool,
    turn_seconds: float,
    model: pb.GetModelResponse | None = None,
    stats: pb.StatsResponse | None = None,
) -> list[Metric]:
    """All metrics, as far as they are known."""
    found = Families(PREFIX)
    found.gauge("up", "1 when the model is loaded and the worker makes progress.", float(up))
    if model is not None:
        found.info("build", "What runs here.", _facts(model))
        found.gauge(
            "turn_seconds",
            "How long the worker has been in its present step; 0 when it is idle. Meanwhile other "
            "metrics may show its state before that step.",
            turn_seconds,
        )
    if stats is not None:
        _requests(found, stats)
        _tokens(found, stats)
        _store(found, stats)
        _memory(found, stats)
    return found.made


def _facts(model: pb.GetModelResponse) -> dict[str, str]:
    return {
        "version": __version__,
        # A folder without its path: more people can ask here than on the socket.
        "model": identity.label(model.name),
        "architecture": model.architecture,
        "dtype": model.dtype,
        "backend": model.backend,
        "batch_mode": model.batch_mode,
        "cache_codec": model.cache_codec,
    }


def _requests(found: Families, stats: pb.StatsResponse) -> None:
    found.counter(
        "requests",
        "Requests by how they ended. stop, length: replies; warmed: answered Warms; cancelled: by "
        "the client or its deadline; invalid: asked for what cannot be had; busy: too many waited "
        "already; unavailable: the engine was loading or stopping; failed: with another status.",
        _fields(stats.outcomes),
        "outcome",
    )
    found.gauge("waiting_requests", "Requests that wait for the batch.", stats.queued)
    found.gauge(
        "running_requests",
        "Requests in the batch, by whether they have their first token.",
        {"prefill": stats.prefilling, "decode": stats.decoding},
        "phase",
    )
    for name, meaning, counted in (
        ("queue_seconds", "Time that requests waited for the batch.", stats.queue_seconds),
        (
            "time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            stats.first_token_seconds,
        ),
        (
            "time_per_output_token_seconds",
            "From each token of a reply to the next one.",
            stats.next_token_seconds,
        ),
        ("batch_requests", "Requests in the batch at each step.", stats.batch_requests),
    ):
        found.histogram(name, meaning, counted)


def _tokens(found: Families, stats: pb.StatsResponse) -> None:
    found.counter("prompt_tokens", "Tokens of all prompts.", stats.prompt_tokens)
    found.counter("prefilled_tokens", "Prompt tokens that were computed.", stats.prefilled_tokens)
    found.counter(
        "cached_tokens",
        "Prompt tokens whose rows came from the cachestore, by the request's kind of match.",
        _fields(stats.matched_tokens),
        "match",
    )
    found.counter("generated_tokens", "Tokens of all replies.", stats.completion_tokens)


def _store(found: Families, stats: pb.StatsResponse) -> None:
    found.gauge(
        "store_connected", "1 when the cachestore answers.", float(stats.cachestore_connected)
    )
    found.counter(
        "matches",
        "Requests by what the cachestore had of their prompt; unavailable: it was not asked, or "
        "gave no usable answer.",
        _fields(stats.matches),
        "match",
    )
    found.counter(
        "attached_bytes", "Copied out of the cachestore, as stored.", stats.attached.bytes
    )
    found.counter("attach_seconds", "Time of these copies.", stats.attached.seconds)
    found.counter("stored_bytes", "Of published writes, as stored.", stats.stored.bytes)
    found.counter("store_seconds", "Time of these writes.", stats.stored.seconds)
    found.counter(
        "writes",
        "Writes to the cachestore. committed: published; dropped: rows were computed and not "
        "stored.",
        {"committed": stats.writes_committed, "dropped": stats.writes_dropped},
        "outcome",
    )


def _memory(found: Families, stats: pb.StatsResponse) -> None:
    for name, meaning, value in (
        ("active", "Memory that MLX holds in arrays.", stats.mlx_active_bytes),
        ("cache", "Memory that MLX keeps for the next arrays.", stats.mlx_cache_bytes),
        ("peak", "The most memory that MLX ever held in arrays.", stats.mlx_peak_bytes),
    ):
        found.gauge(f"mlx_{name}_bytes", meaning, value)


def _fields(message: Message) -> dict[str, float]:
    """The numbers of a message, by the names of its fields."""
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
