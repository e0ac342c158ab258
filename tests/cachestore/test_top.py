"""`cachestore-admin top`: on a terminal, in a pipe, and while the daemon comes and goes."""

import io
import re
import signal
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from cachestore.client import Client
from cachestore.report import report
from cachestore.top import LINES, History, screen
from cachestore.v1 import cachestore_pb2 as pb
from tests.cachestore.test_admin import ADMIN, admin
from tests.support import entries
from tests.support.daemons import Cachestore, start_cachestore
from tests.support.terminal import Terminal, on_terminal
from tests.support.waiting import until

COLOR = re.compile(r"\x1b\[[0-9;]*3[0-9][0-9;]*m")


def told(pid: int, uptime: float, miss: int) -> dict[str, Any]:
    lookups = pb.LookupStats(miss=miss)
    return report(pb.StatsResponse(pid=pid, uptime_seconds=uptime, lookups=lookups))


def test_changes_are_those_of_the_last_minute_of_one_daemon() -> None:
    history = History()
    history.add(told(1, 100.0, 50))
    assert (history.seconds, history.change("lookups", "miss")) == (100.0, 50)
    for second in range(1, 200):
        history.add(told(1, 100.0 + second, 50 + second))
        assert history.change("lookups", "miss") == history.seconds == min(second, 60)
    history.add(told(2, 3.0, 6))
    assert (history.seconds, history.change("lookups", "miss")) == (3.0, 6)
    history.add(told(2, 1.0, 0))  # the first process of a container is always the same
    assert (history.seconds, history.change("lookups", "miss")) == (1.0, 0)


def full_store() -> Client:
    """Everything as long as it gets."""
    most = 2**43
    namespace = pb.NamespaceStats(namespace=bytes(32), label="[red]" + "m" * 250, checkpoints=9)
    stats = pb.StatsResponse(
        version="10.20.30",
        pid=4_194_303,
        uptime_seconds=1e7,
        bytes_budget=most,
        bytes_used=most - 1,
        bytes_slabs=most,
        slabs=40_000,
        tokens=10**9,
        records=10**7,
        sequences=10**6,
        checkpoints=10**6,
        pinned=4096,
        namespaces=[namespace],
        sessions=12,
        check_failures=1,
        lookups=pb.LookupStats(
            exact=10**7,
            supersequence=10**7,
            prefix=10**7,
            lcp=10**7,
            miss=10**7,
            tokens_requested=10**11,
            tokens_served=10**10,
            seconds_p50=0.000123,
            seconds_p99=0.0123,
        ),
    )
    entry = pb.Entry(
        namespace=bytes(32),
        span=pb.Span(record_id=10**8, rows=256),
        first_token=10**6,
        hits=10**6,
        age_seconds=1e6,
        pinned=True,
    )
    fake = SimpleNamespace(stats=lambda: stats, prefixes=lambda limit: [entry] * limit)
    return cast(Client, fake)


def drawn(client: Client, **console: Any) -> str:
    out = io.StringIO()
    Console(file=out, highlight=False, **console).print(screen(client, History(), LINES))
    return out.getvalue()


def test_it_fits_a_terminal_of_80_columns_and_24_lines() -> None:
    lines = drawn(full_store(), width=80).splitlines()
    assert len(lines) == LINES
    assert max(map(len, lines)) <= 80
    assert any("[red]mmm" in line for line in lines)
    assert lines[-1].split()[::2] == ["1,000,256", "1,000,000", "100000000", "[red]mmmmmmmmmmmm…"]
    assert "FAILED its own check" in lines[1]
    assert "[########################] 8.0 TiB, 100.0% of budget" in lines[2]


def filled(daemon: Cachestore) -> None:
    with daemon.client() as client:
        entries.write(client, entries.tokens(600))
        for _ in range(3):
            client.lookup(entries.NAMESPACE, entries.tokens(600), 599)


def test_in_a_pipe_it_is_one_plain_snapshot(daemon: Cachestore) -> None:
    filled(daemon)
    for arguments in (("top",), ("top", "--once")):
        found = admin(daemon.socket, *arguments, NO_COLOR="")
        assert (found.returncode, found.stderr) == (0, "")
        assert "\x1b" not in found.stdout
        assert f"process {daemon.pid}" in found.stdout
        assert "hit rate   99.8% of tokens" in found.stdout
        assert re.search(r"^ +600 tokens +3 +0:00:0\d +3 +test *$", found.stdout, re.MULTILINE)


def test_without_a_daemon_it_says_how_to_start_one(directory: Path) -> None:
    found = admin(directory / "none.sock", "top")
    assert (found.returncode, found.stdout) == (1, "")
    assert "start one with: cachestore serve" in found.stderr


def top(socket: Path, **environment: str) -> AbstractContextManager[Terminal]:
    words = (*ADMIN, "--socket", str(socket), "top", "--interval", "0.1")
    return on_terminal(words, **environment)


@pytest.mark.parametrize("no_color", [False, True])
def test_on_a_terminal_it_is_live_until_it_is_interrupted(
    daemon: Cachestore, no_color: bool
) -> None:
    filled(daemon)
    with top(daemon.socket, **({"NO_COLOR": "1"} if no_color else {})) as seen:
        until(lambda: seen.sees("\x1b[?1049h"), "the other screen")
        for _ in range(2):
            until(lambda: seen.sees("hottest prefixes"), "a screen")
        seen.process.send_signal(signal.SIGINT)
        seen.read_all()
        assert seen.process.wait(timeout=20) == 0
    assert seen.sees("\x1b[?1049l")
    assert "Traceback" not in seen.text
    assert bool(COLOR.search(seen.text)) is not no_color


def test_a_signal_gives_the_terminal_back(daemon: Cachestore) -> None:
    with top(daemon.socket) as seen:
        until(lambda: seen.sees("hottest prefixes"), "a screen")
        seen.process.terminate()
        seen.read_all()
        assert seen.process.wait(timeout=20) == 128 + signal.SIGTERM
        assert seen.sees("\x1b[?1049l")


def test_a_daemon_that_goes_is_said_and_the_next_one_is_shown(directory: Path) -> None:
    with start_cachestore(directory) as first, top(first.socket) as seen:
        until(lambda: seen.sees(f"process {first.pid}"), "a screen")
        first.kill()
        until(lambda: seen.sees("No cachestore for"), "the word that it is gone")
        with start_cachestore(directory) as second:
            until(lambda: seen.sees(f"process {second.pid}"), "the next one")
        assert seen.process.poll() is None
