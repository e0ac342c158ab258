"""What a service manager is told, and when."""

import asyncio
import os
import sys
import threading
from pathlib import Path

import pytest

from cachestore import notify
from cachestore.notify import Notifier
from tests.support.daemons import start_cachestore
from tests.support.manager import Manager
from tests.support.waiting import until


def test_without_a_manager_nothing_is_said() -> None:
    environment = {"HOME": "/root", "NOTIFY_SOCKET": ""}
    silent = Notifier.take(environment)
    assert silent == Notifier()
    silent.ready("serving")
    silent.stopping()
    asyncio.run(silent.feed(lambda: True))  # returns


def test_a_manager_that_has_gone_harms_nobody(directory: Path) -> None:
    Notifier(str(directory / "nobody")).ready("serving")
    with Manager(directory / "manager") as manager:
        speaker = Notifier.take(dict(manager.environment))
        # More than its queue holds: nobody waits for it.
        for _ in range(5000):
            speaker.status("x" * 100)
        assert "STATUS=" + "x" * 100 in manager.heard


def test_that_it_serves_is_heard_by_a_manager_that_is_busy(directory: Path) -> None:
    with Manager(directory / "manager") as manager:
        speaker = Notifier.take(dict(manager.environment))
        for _ in range(5000):
            speaker.status("x" * 100)
        # Its queue is full: this waits until the manager comes to it.
        speaking = threading.Thread(target=speaker.ready, args=["serving"])
        speaking.start()
        speaking.join(0.1)
        assert speaking.is_alive()
        # It may come while the queue is emptied, so not `manager.wait`.
        until(lambda: "READY=1" in manager.heard, "READY=1 to be said")
        speaking.join()


def test_nobody_waits_for_ever_for_a_manager_that_hangs(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "READY_SECONDS", 0.05)
    with Manager(directory / "manager") as manager:
        speaker = Notifier.take(dict(manager.environment))
        for _ in range(5000):
            speaker.status("x" * 100)
        speaker.ready("serving")
        assert "READY=1" not in manager.heard


def test_a_name_that_is_not_utf8_harms_nobody(directory: Path) -> None:
    with Manager(directory / "manager") as manager:
        Notifier.take(dict(manager.environment)).status("loading models/\udcff")
        assert manager.heard == [r"STATUS=loading models/\udcff"]


@pytest.mark.parametrize(
    "address",
    [
        "path",
        pytest.param(
            "@mlx-cachestore-test-{}",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="abstract addresses"),
        ),
    ],
)
def test_what_is_said(directory: Path, address: str) -> None:
    name = address.format(os.urandom(8).hex()) if "@" in address else directory / address
    with Manager(name) as manager:
        environment = {**manager.environment, "OTHER": "stays"}
        speaker = Notifier.take(environment)
        assert environment == {"OTHER": "stays"}
        speaker.status("loading")
        speaker.ready("serving")
        speaker.stopping()
        assert manager.heard == [
            *("STATUS=loading", "READY=1", "STATUS=serving", "STOPPING=1", "STATUS=stopping")
        ]


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_is_fed_twice_in_its_time(
    environment: dict[str, str], seconds: float | None
) -> None:
    assert Notifier.take(environment).watchdog_seconds == seconds
    assert not environment


def test_the_watchdog_is_not_fed_while_something_is_wrong(directory: Path) -> None:
    answers = iter([True, False, False, True])

    async def feed(speaker: Notifier) -> None:
        done = asyncio.Event()

        def healthy() -> bool:
            try:
                return next(answers)
            except StopIteration:
                done.set()
                return False

        feeding = asyncio.create_task(speaker.feed(healthy))
        await asyncio.wait_for(done.wait(), 10)
        feeding.cancel()

    with Manager(directory / "manager", watchdog_seconds=0.002) as manager:
        asyncio.run(feed(Notifier.take(dict(manager.environment))))
        assert manager.heard == ["WATCHDOG=1", "WATCHDOG=1"]


def test_the_daemon_tells_its_manager(directory: Path) -> None:
    with (
        Manager(directory / "manager", watchdog_seconds=0.1) as manager,
        start_cachestore(directory, environment=manager.environment) as daemon,
    ):
        assert manager.heard[0] == "WATCHDOG=1" or "READY=1" in manager.heard
        manager.wait("WATCHDOG=1")
        assert manager.heard.count("READY=1") == 1
        assert f"STATUS=serving at {daemon.socket}" in manager.heard
        assert "STOPPING=1" not in manager.heard
        assert daemon.terminate() == 0
        assert manager.heard.count("STOPPING=1") == 1
