"""Daemons that are ended and started again while others use them, and what they take."""

import contextlib
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from tests.support.slabs import held_slabs

# So long after its work an engine here gives back what is kept of freed arrays.
REST_SECONDS = 0.25


class Daemon(Protocol):
    process: "subprocess.Popen[bytes]"


_Daemon = TypeVar("_Daemon", bound=Daemon)


class Place(Generic[_Daemon]):
    """Where a daemon runs, one after the other. Any thread may use or restart it.

    `life` counts beginnings and ends: it is odd while a daemon serves.
    """

    def __init__(self, name: str, start: Callable[[], AbstractContextManager[_Daemon]]) -> None:
        self.name = name
        self.life = 0
        self._start = start
        self._restarting = threading.Lock()
        self._serving = threading.Event()
        self._stack = ExitStack()
        self.begin()

    def begin(self) -> None:
        self.daemon = self._stack.enter_context(self._start())
        self.life += 1
        self._serving.set()

    def end(self, number: int) -> None:
        """With this signal. SIGTERM must end it with exit code 0."""
        self._serving.clear()
        self.life += 1
        self.daemon.process.send_signal(number)
        code = self.daemon.process.wait(60)
        assert code == (-number if number == signal.SIGKILL else 0), f"{self.name} ended: {code}"
        self._stack.close()

    def restart(self, number: int) -> None:
        with self._restarting:
            self.end(number)
            self.begin()

    def wait(self) -> None:
        """Until it serves."""
        assert self._serving.wait(60), f"{self.name} does not come back"

    @property
    def serving(self) -> bool:
        return self._serving.is_set()

    def excuses(self, life: int) -> bool:
        """Whether a call that began in that `life` may have failed because of a restart."""
        return life % 2 == 0 or self.life != life

    def close(self) -> None:
        """Whatever state it is in."""
        self._stack.close()


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process holds by the word of the system; slabs, which are shared, are left out."""

    memory_bytes: int
    descriptors: int
    threads: int


def usage(pid: int) -> Usage | None:
    """None when it has ended, or where there is no /proc."""
    process = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError, KeyError):
        lines = (process / "status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        descriptors = sum(1 for _ in (process / "fd").iterdir()) - len(held_slabs(pid))
        memory_bytes = int(fields["RssAnon"].split()[0]) << 10
        return Usage(memory_bytes, descriptors, int(fields["Threads"]))
    return None
