"""The endpoint that a Prometheus server scrapes, and whom it does not listen to."""

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator

import psutil
import pytest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cachestore import exporter
from cachestore.endpoint import EndpointError, TcpAddress, tcp_address
from cachestore.exporter import Families
from cachestore.histogram import Histogram
from tests.support.scrapes import Scrape, scrape
from tests.support.waiting import until


class One(Collector):
    def collect(self) -> list[Metric]:
        families = Families("test_")
        families.gauge("answer", "What it comes to.", 42)
        histogram = Histogram((0.5, 1.0))
        for value in (0.25, 0.5, 0.75, 2.0):
            histogram.add(value)
        families.histogram("wait_seconds", "How long.", histogram)
        return families.made


def free_address(host: str = "127.0.0.1") -> TcpAddress:
    """Free a moment ago."""
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host.strip("[]"), 0))
        return TcpAddress(host, probe.getsockname()[1])


@pytest.fixture
def served() -> Iterator[TcpAddress]:
    address = free_address()
    with exporter.serving(address, One()):
        yield address


def get(address: TcpAddress) -> Scrape:
    return scrape(f"http://{address}/metrics")


def test_a_scrape_has_the_metrics_and_the_process(served: TcpAddress) -> None:
    found = get(served)
    assert found["test_answer"] == 42
    assert found.all("test_wait_seconds_bucket") == {"0.5": 2, "1": 3, "+Inf": 4}
    assert (found["test_wait_seconds_count"], found["test_wait_seconds_sum"]) == (4, 3.5)
    resident = psutil.Process().memory_info().rss
    assert found["process_resident_memory_bytes"] == pytest.approx(resident, rel=0.2)
    assert found["process_start_time_seconds"] == pytest.approx(psutil.Process().create_time())


def test_a_chosen_metric_comes_alone(served: TcpAddress) -> None:
    assert get(served).series > scrape(f"http://{served}/metrics?name[]=test_answer").series


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD"])
def test_only_get_is_answered(served: TcpAddress, method: str) -> None:
    connection = http.client.HTTPConnection(served.host, served.port, timeout=10)
    connection.request(method, "/metrics")
    assert connection.getresponse().status == 405
    connection.close()


def test_a_scraper_that_says_nothing_holds_up_nobody(served: TcpAddress) -> None:
    with socket.create_connection((served.host, served.port)):
        assert get(served)["test_answer"] == 42


def test_connections_without_end_take_few_threads_and_descriptors(served: TcpAddress) -> None:
    before = threading.active_count()
    with contextlib.ExitStack() as opened:
        for _ in range(4 * exporter.SCRAPES_MAX):
            connection = socket.create_connection((served.host, served.port), timeout=10)
            opened.enter_context(connection)
        # One that is too many is told so: all before it have been accepted.
        assert connection.recv(1) == b""
        assert threading.active_count() <= before + exporter.SCRAPES_MAX
    until(lambda: threading.active_count() == before, "their threads to end")
    assert get(served)["test_answer"] == 42


def test_at_the_end_the_port_is_free_and_the_thread_gone() -> None:
    address = free_address()
    with exporter.serving(address, One()):
        assert any(thread.name == "metrics" for thread in threading.enumerate())
    assert not any(thread.name == "metrics" for thread in threading.enumerate())
    with exporter.serving(address, One()):
        assert get(address)["test_answer"] == 42


def test_a_port_that_is_taken_is_an_error_that_names_the_flag(served: TcpAddress) -> None:
    with (
        pytest.raises(EndpointError, match=rf"^--metrics {served}: cannot be bound: "),
        exporter.serving(served, One()),
    ):
        pass


def test_without_an_address_nothing_is_served() -> None:
    with exporter.serving(None, One()):
        assert not any(thread.name == "metrics" for thread in threading.enumerate())


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_ipv6_is_served_at_its_own_address() -> None:
    address = free_address("[::1]")
    with exporter.serving(address, One()):
        assert get(address)["test_answer"] == 42
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", address.port), timeout=10)


@pytest.mark.parametrize("text", ["127.0.0.1:9464", "[::1]:0", "localhost:65535", "127.9.9.9:1"])
def test_an_address_of_this_machine_is_read(text: str) -> None:
    assert str(tcp_address(text)) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("unix:/tmp/metrics.sock", "is not HOST:PORT"),
        ("9464", "is not HOST:PORT"),
        ("0.0.0.0:9464", "0.0.0.0 is not a loopback address"),
        ("[::]:9464", "is not a loopback address"),
        ("10.0.0.1:9464", r"use 127\.0\.0\.1, \[::1\] or localhost$"),
    ],
)
def test_no_other_address_is_read(text: str, said: str) -> None:
    with pytest.raises(EndpointError, match=said):
        tcp_address(text)
