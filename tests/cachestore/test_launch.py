"""Starting a daemon where it cannot start, or where one is in the way."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cachestore import launch, variables
from cachestore.launch import LaunchError, spawn
from tests.support.daemons import start_cachestore


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list["subprocess.Popen[bytes]"]:
    """Daemons that were started."""
    real, started = launch._start, list["subprocess.Popen[bytes]"]()

    def start(*arguments: Any) -> "subprocess.Popen[bytes]":
        started.append(real(*arguments))
        return started[-1]

    monkeypatch.setattr(launch, "_start", start)
    return started


def test_a_store_that_hangs_is_an_error_soon(
    directory: Path, starts: list["subprocess.Popen[bytes]"]
) -> None:
    with start_cachestore(directory) as daemon:
        os.kill(daemon.pid, signal.SIGSTOP)
        began = time.monotonic()
        try:
            with pytest.raises(LaunchError, match=f"in the way: .*process {daemon.pid}"):
                spawn(daemon.socket, None, 600, directory / "launch.log")
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert time.monotonic() - began < 30
    assert len(starts) == 2
    assert [start.wait() for start in starts] == [3, 3]


def test_a_starter_that_ends_waits_no_longer(directory: Path, monkeypatch: Any) -> None:
    sleeper = ["sleep", "60"]
    started = []

    def start(_command: list[str], _log: Path) -> "subprocess.Popen[bytes]":
        started.append(subprocess.Popen(sleeper))
        cancelled.set()
        return started[0]

    cancelled = threading.Event()
    monkeypatch.setattr(launch, "_start", start)
    began = time.monotonic()
    try:
        with pytest.raises(LaunchError, match="given up"):
            spawn(directory / "c.sock", None, 600, directory / "c.log", cancelled)
    finally:
        started[0].kill()
        started[0].wait()
    assert time.monotonic() - began < 5


def test_only_the_last_line_of_the_log_is_told(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import sys; sys.exit('first\\nlast')"
    monkeypatch.setattr(sys, "executable", directory / "python")
    (directory / "python").write_text(f'#!/bin/sh\nexec python3 -c "{script}"\n')
    (directory / "python").chmod(0o700)
    with pytest.raises(LaunchError) as failure:
        spawn(directory / "c.sock", None, 600, directory / "c.log")
    assert str(failure.value) == "cachestore ended with 1: last"


@pytest.mark.parametrize(("size", "kept"), [(1 << 20, True), ((1 << 20) + 1, False)])
def test_a_log_that_has_grown_long_begins_anew(directory: Path, size: int, kept: bool) -> None:
    log = directory / "c.crash.log"
    log.write_bytes(b"x" * size)
    with pytest.raises(LaunchError, match=r"ended with 2: error: --budget"):
        spawn(directory / "c.sock", "3", 600, directory / "c.log")
    assert log.read_text().startswith("x") == kept


def test_what_the_system_refuses_is_a_launch_error(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LaunchError, match="--socket: the socket path"):
        spawn("/tmp/" + "d" * 100, None, 600, directory / "c.log")
    with pytest.raises(LaunchError, match="has an empty name"):
        spawn(directory / "c.sock", None, 600, Path())
    (directory / "file").write_text("")
    with pytest.raises(LaunchError, match=r"Not a directory|File exists"):
        spawn(directory / "c.sock", None, 600, directory / "file" / "c.log")
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(LaunchError, match="No such file"):
        spawn(directory / "c.sock", None, 600, directory / "c.log")


def test_a_way_to_make_slabs_that_does_not_exist_is_refused_at_the_start(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variables.SHM, "carrier pigeon")
    with pytest.raises(LaunchError, match="ended with 2: error: MLX_CACHESTORE_SHM: 'carrier"):
        spawn(directory / "c.sock", None, 600, directory / "c.log")


def test_a_daemon_that_lost_the_race_does_not_come_up_when_the_winner_leaves(
    directory: Path, starts: list["subprocess.Popen[bytes]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = launch._start

    def late(command: list[str], log: Path) -> "subprocess.Popen[bytes]":
        return real([command[0], "-c", "import time; time.sleep(60)"], log)

    monkeypatch.setattr(launch, "_start", late)
    with start_cachestore(directory) as daemon:
        spawn(daemon.socket, None, 600, directory / "launch.log")
        assert [one.poll() for one in starts] == [-signal.SIGKILL]
