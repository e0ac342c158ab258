"""Starting a cachestore that outlives whoever starts it."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from cachestore import endpoint, handover

_START_SECONDS = 20.0
# How long another starter's daemon, or one that is leaving, may hold the lock and not answer.
_HELD_SECONDS = 3.0
_ATTEMPTS = 2
_POLL_SECONDS = 0.02
_LOG_TAIL_BYTES = 2000
_LOG_BYTES_MAX = 1 << 20


class LaunchError(Exception):
    """The daemon did not come up; the message has the last line of its crash log."""


def spawn(
    socket_path: str | Path,
    budget: str | None,
    idle_exit_seconds: float,
    log: Path,
    cancelled: threading.Event | None = None,
    config: Path | None = None,
) -> None:
    """Starts `cachestore serve` in a session of its own and waits until it takes connections.

    Losing the race against another starter counts as success. It keeps the file `log` itself; what
    it says when it cannot start, or dies, is appended to the crash log beside that, which is
    emptied first when it has grown long. `config` is its file of settings; its variables are the
    starter's. Raises LaunchError, also once `cancelled` is set.
    """
    # -P and the root directory: the daemon must not import what lies in the starter's directory.
    command = [sys.executable, "-P", "-m", "cachestore", "serve"]
    command += ["--idle-exit", str(idle_exit_seconds), "--log-file", str(log.absolute())]
    command += ["--budget", budget] if budget else []
    command += ["--config", str(config)] if config else []
    try:
        path = endpoint.socket_path(socket_path, flag="--socket", suffix=endpoint.SESSION_SUFFIX)
        _launch([*command, "--socket", str(path)], path, log.with_suffix(".crash.log"), cancelled)
    except (ValueError, OSError) as error:  # of the socket's path, or the log's
        raise LaunchError(f"cachestore cannot be started: {error}") from error


def _launch(
    command: list[str], path: Path, crash_log: Path, cancelled: threading.Event | None
) -> None:
    cancelled = cancelled or threading.Event()
    crash_log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for _ in range(_ATTEMPTS):
        start = _begin(crash_log)
        daemon = _start(command, crash_log)
        if _answers(path, _START_SECONDS, cancelled, daemon):
            return
        code = daemon.poll()
        said = _last_line(crash_log, start)
        if code is None:
            raise LaunchError(f"cachestore did not start in time: {said}")
        if code != endpoint.EXIT_HELD:
            raise LaunchError(f"cachestore ended with {code}: {said}")
        # By one that is starting, or leaving, or hangs.
        if _answers(path, _HELD_SECONDS, cancelled):
            return
    raise LaunchError(f"a cachestore that does not answer is in the way: {said}")


def _answers(
    path: Path,
    seconds: float,
    cancelled: threading.Event,
    daemon: "subprocess.Popen[bytes] | None" = None,
) -> bool:
    """Waits until somebody takes connections, `daemon` has ended, or the time is over.

    When another daemon was faster, `daemon` is ended: still starting, it would take the place of
    the other one as soon as that leaves.
    """
    deadline = time.monotonic() + seconds
    while (pid := _serving_pid(path)) is None:
        if time.monotonic() >= deadline or (daemon is not None and daemon.poll() is not None):
            return False
        if cancelled.wait(_POLL_SECONDS):
            raise LaunchError("given up: its starter ends")
    if daemon is not None and daemon.pid != pid:
        daemon.kill()
        daemon.wait()
    return True


def _start(command: list[str], log: Path) -> "subprocess.Popen[bytes]":
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        daemon = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            start_new_session=True,
        )
    finally:
        os.close(output)
    # Collects its exit code when it ends before us: no zombie stays.
    threading.Thread(target=daemon.wait, name="cachestore-reaper", daemon=True).start()
    return daemon


def _serving_pid(path: Path) -> int | None:
    """The process that takes connections now."""
    try:
        session = handover.Session(endpoint.session_path(path), "admin", timeout_seconds=1.0)
    except handover.HandoverError:
        return None
    session.close()
    return session.pid


def _begin(log: Path) -> int:
    """Where the next line of the log will be."""
    size = log.stat().st_size if log.exists() else 0
    if size > _LOG_BYTES_MAX:
        os.truncate(log, 0)
        return 0
    return size


def _last_line(log: Path, start: int) -> str:
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - _LOG_TAIL_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"nothing in {log}"
