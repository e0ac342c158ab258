"""The Prometheus endpoint of either daemon: HTTP on a loopback address, on threads of its own."""

import contextlib
import itertools
import logging
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler

import psutil
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from cachestore.endpoint import EndpointError, TcpAddress

FLAG = "--metrics"
# A scraper that says nothing for so long is gone.
_SILENCE_SECONDS = 5.0
# At once. Each takes a thread and a descriptor, which the daemon needs for its own work.
SCRAPES_MAX = 16
# How long the end of serving takes at most.
_POLL_SECONDS = 0.2

_log = logging.getLogger(__name__)

# A number, or one for each value of a label.
Values = float | Mapping[str, float]


class Counted(Protocol):
    """A Histogram, of either proto."""

    @property
    def bounds(self) -> Sequence[float]: ...
    @property
    def counts(self) -> Sequence[int]: ...
    @property
    def sum(self) -> float: ...


class Families:
    """The metrics of one scrape, whose names begin alike.

    Values of labels come from field names of a proto or from constants, so there is a fixed
    number of series; `info` has one for the life of the process.
    """

    def __init__(self, prefix: str) -> None:
        self.made: list[Metric] = []
        self._prefix = prefix

    def gauge(self, name: str, meaning: str, values: Values, label: str = "") -> None:
        self._add(GaugeMetricFamily(self._prefix + name, meaning, labels=_labels(label)), values)

    def counter(self, name: str, meaning: str, values: Values, label: str = "") -> None:
        """The name is shown with "_total" behind it."""
        self._add(CounterMetricFamily(self._prefix + name, meaning, labels=_labels(label)), values)

    def histogram(self, name: str, meaning: str, counted: Counted) -> None:
        below = itertools.accumulate(counted.counts)
        bounds = [*(f"{bound:.4g}" for bound in counted.bounds), "+Inf"]
        # A message that was never filled has no classes.
        buckets = list(zip(bounds, [*below] or [0], strict=True))
        family = HistogramMetricFamily(self._prefix + name, meaning)
        family.add_metric([], buckets, counted.sum)
        self.made.append(family)

    def info(self, name: str, meaning: str, facts: Mapping[str, str]) -> None:
        """The name is shown with "_info" behind it."""
        self.made.append(InfoMetricFamily(self._prefix + name, meaning, dict(facts)))

    def _add(self, family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> None:
        if isinstance(values, Mapping):
            for each, value in values.items():
                family.add_metric([each], value)
        else:
            family.add_metric([], values)
        self.made.append(family)


class ProcessMetrics(Collector):
    """What every Prometheus client tells of its process, on macOS, too."""

    def collect(self) -> Iterable[Metric]:
        process = psutil.Process()
        with process.oneshot():
            times = process.cpu_times()
            families = Families("process_")
            families.counter(
                "cpu_seconds",
                "User and system CPU time of this process.",
                times.user + times.system,
            )
            families.gauge(
                "resident_memory_bytes",
                "Memory of this process that is in RAM.",
                process.memory_info().rss,
            )
            families.gauge("open_fds", "Open file descriptors of this process.", process.num_fds())
            families.gauge(
                "start_time_seconds",
                "When this process began, in seconds since 1970.",
                process.create_time(),
            )
        return families.made


@contextlib.contextmanager
def serving(address: TcpAddress | None, collector: Collector) -> Iterator[None]:
    """Answer scrapes with what `collector` says of the daemon; nothing without an address.

    `collect` is called on any thread, by several at once. Raises EndpointError when the address
    cannot be had.
    """
    if address is None:
        yield
        return
    registry = CollectorRegistry()
    registry.register(collector)
    registry.register(ProcessMetrics())
    server = _listen(address)
    server.set_app(make_wsgi_app(registry))
    thread = threading.Thread(
        target=server.serve_forever, args=(_POLL_SECONDS,), name="metrics", daemon=True
    )
    thread.start()
    _log.info("metrics at http://%s:%d/metrics", address.host, server.server_port)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingWSGIServer):
    # By default newer Pythons let two daemons have the same port, each for some of the scrapes.
    allow_reuse_port = False
    # By default five, and whoever comes in a crowd tries again a second later.
    request_queue_size = 4 * SCRAPES_MAX

    def __init__(self, family: int, address: tuple[str, int]) -> None:
        self.address_family = family
        self._free = threading.BoundedSemaphore(SCRAPES_MAX)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """On a thread of its own; one that is too many is cut off."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a scrape broke off", exc_info=True)


class _Handler(WSGIRequestHandler):
    timeout = _SILENCE_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are no news."""


def _listen(address: TcpAddress) -> _Server:
    try:
        found = socket.getaddrinfo(address.host.strip("[]"), address.port, type=socket.SOCK_STREAM)
        family, _, _, _, (host, port, *_) = found[0]
        return _Server(family, (str(host), int(port)))
    except OSError as error:
        raise EndpointError(f"{FLAG} {address}: cannot be bound: {error.strerror}") from None


def _labels(label: str) -> list[str]:
    return [label] if label else []
