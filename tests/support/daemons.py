"""Real daemons for tests: own process, own sockets, gone at the end whatever happens."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cachestore import endpoint, variables
from cachestore.client import Client, StoreUnavailable
from cachestore.v1 import cachestore_pb2 as pb
from tests.support.waiting import until

_PROGRAM = (sys.executable, "-m", "cachestore")
STORE_LOG = "MLX_CACHESTORE_CACHESTORE_LOG_FILE"


@contextlib.contextmanager
def short_directory() -> Iterator[Path]:
    """A private directory whose sockets fit the limit; pytest's own is too deep on macOS."""
    path = Path(tempfile.mkdtemp(prefix="mc-", dir="/tmp"))
    try:
        yield path
    finally:
        while path.exists():
            # A daemon that ends by itself may remove its own files at the same time.
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path)


def own_places(directory: Path) -> dict[str, str]:
    """Environment of an engine whose sockets, and the log of whose store, are in `directory`."""
    return {
        variables.RUNTIME_DIR: str(directory),
        STORE_LOG: str(directory / "cachestore.log"),
    }


class Cachestore:
    """A running daemon."""

    def __init__(self, socket: Path, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.socket = socket
        self.process = process
        self._log = log

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def pid(self) -> int:
        return self.process.pid

    def client(self, role: str = "engine", timeout_seconds: float = 10.0) -> Client:
        """A new session; the caller closes it."""
        return Client.connect(self.socket, role=role, timeout_seconds=timeout_seconds)

    def stats(self) -> pb.StatsResponse:
        with self.client(role="admin") as client:
            return client.stats()

    def kill(self) -> None:
        """SIGKILL, and waits for the end."""
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        """SIGTERM, and waits for the exit code."""
        self.process.terminate()
        return self.process.wait(timeout=20)


@contextlib.contextmanager
def start_cachestore(
    directory: Path,
    *,
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = _PROGRAM,
    **flags: str | float | None,
) -> Iterator[Cachestore]:
    """Runs `cachestore serve` with its socket in `directory`, from ready until the end.

    `program` is what else to run instead. `flags` are its flags with underscores, such as
    budget="64MiB" or idle_exit=1; None leaves one out.
    """
    arguments = {"socket": str(directory / "cachestore.sock"), "budget": "64MiB", **flags}
    command = [*program, "serve"]
    for name, value in arguments.items():
        command += [] if value is None else ["--" + name.replace("_", "-"), str(value)]
    log = directory / "cachestore.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **(environment or {})},
        )
    daemon = Cachestore(Path(str(arguments["socket"])), process, log)
    try:
        until(lambda: _ready(daemon), "a cachestore that answers", seconds=30)
        yield daemon
    finally:
        daemon.kill()
        for path in (daemon.socket, endpoint.session_path(daemon.socket)):
            path.unlink(missing_ok=True)


def _ready(daemon: Cachestore) -> bool:
    if daemon.process.poll() is not None:
        raise AssertionError(f"cachestore ended with {daemon.process.returncode}: {daemon.log}")
    try:
        daemon.client(role="admin").close()
    except StoreUnavailable:
        return False
    return True


def end_store(directory: Path) -> None:
    """Ends a daemon that an engine started by itself, and waits until it has gone."""
    with Client.connect(directory / "cachestore.sock", role="admin") as client:
        os.kill(client.stats().pid, signal.SIGTERM)
    until(lambda: not (directory / "cachestore.sock.lock").exists(), "the store to end")
