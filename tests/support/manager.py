"""A service manager that listens: what systemd would be for a unit with Type=notify."""

import socket
from pathlib import Path
from types import TracebackType

from tests.support.waiting import until


class Manager:
    """Takes what is said at `path`; `heard` are the lines so far."""

    def __init__(self, path: Path | str, watchdog_seconds: float = 0.0) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        text = str(path)
        self._socket.bind("\0" + text[1:] if text.startswith("@") else text)
        self._socket.setblocking(False)
        self._heard: list[str] = []
        self.environment = {"NOTIFY_SOCKET": text}
        if watchdog_seconds:
            self.environment["WATCHDOG_USEC"] = str(int(1e6 * watchdog_seconds))

    def __enter__(self) -> "Manager":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()

    @property
    def heard(self) -> list[str]:
        while True:
            try:
                self._heard += self._socket.recv(4096).decode().splitlines()
            except BlockingIOError:
                return self._heard

    def wait(self, line: str, seconds: float = 20.0) -> None:
        """Until it has been said, from now on."""
        before = self.heard.count(line)
        until(lambda: self.heard.count(line) > before, f"{line} to be said", seconds)
