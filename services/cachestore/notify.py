"""What systemd wants to hear of a service with Type=notify: sd_notify(3), in pure Python.

Elsewhere, as on macOS, nobody listens, and nothing is said.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

# For a manager that is busy to hear that we serve: it would otherwise wait for that until it gives
# up. Everything else may be dropped, and is not waited for.
READY_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Notifier:
    """`address` is where the service manager listens; None: there is none.

    `watchdog_seconds` is how often it wants to hear that all is well, half of the time after which
    it takes the service for dead; None: never.
    """

    address: str | None = None
    watchdog_seconds: float | None = None

    @classmethod
    def take(cls, environment: MutableMapping[str, str] = os.environ) -> "Notifier":
        """The manager that the environment names, which is removed from there: processes that we
        start do not speak for us."""
        address = environment.pop("NOTIFY_SOCKET", None)
        timeout_us = environment.pop("WATCHDOG_USEC", "")
        pid = environment.pop("WATCHDOG_PID", str(os.getpid()))
        watched = timeout_us.isascii() and timeout_us.isdigit() and pid == str(os.getpid())
        seconds = int(timeout_us) / 2e6 if watched else 0.0
        return cls(address or None, seconds or None)

    def ready(self, status: str) -> None:
        """The service serves. `status` is a line for people. May block for READY_SECONDS."""
        self._send(f"READY=1\nSTATUS={status}", READY_SECONDS)

    def status(self, status: str) -> None:
        self._send(f"STATUS={status}")

    def stopping(self) -> None:
        self._send("STOPPING=1\nSTATUS=stopping")

    async def feed(self, healthy: Callable[[], bool]) -> None:
        """Tell the watchdog that all is well, for ever, as long as it is."""
        if self.address is None or self.watchdog_seconds is None:
            return
        while True:
            if healthy():
                self._send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_seconds)

    def _send(self, state: str, seconds: float = 0.0) -> None:
        if self.address is None:
            return
        # "@" stands for the zero byte of an abstract address.
        address = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        # Who cannot be told is no reason to fail.
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
        ):
            sender.settimeout(seconds)
            sender.connect(address)
            sender.send(state.encode(errors="backslashreplace"))
