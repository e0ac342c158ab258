"""The connection to the cachestore, which may come and go at any time.

    away ──connect──▶ connected ──session ends──▶ away ──backoff──▶ ...
                        │   ▲
                     a call fails: paused for a moment, so that a slow store costs little

One keeper thread connects, starts the daemon where the engine is asked to, and renews leases.
Threads that call or write borrow the client: its session is closed only when nobody writes any
more, because the daemon may give the extents of an ended session to others at once. Readers need
not: the renewal after their copy fails, and the copy is thrown away.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cachestore.client import Client, LaunchError, StoreRefused, StoreUnavailable

log = logging.getLogger(__name__)

RENEW_SECONDS = 8.0
POLL_SECONDS = 0.25
BACKOFF_SECONDS_MAX = 5.0
PAUSE_SECONDS = 2.0
# Of a daemon that is started first, on a machine that has much else to do.
START_SECONDS = 10.0


class StoreLink:
    """Hands out the current client. Thread-safe; nothing here blocks but `start`, `drop` and
    `close`."""

    def __init__(self, socket_path: Path, spawn: Callable[[threading.Event], None] | None) -> None:
        """`spawn` starts the daemon when nobody listens, and gives up when its event is set; None
        when others start it."""
        self.socket_path = socket_path
        self._spawn = spawn
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._borrowed: dict[Client, int] = {}
        self._leases: dict[int, Client] = {}
        self._paused_until = 0.0
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._tried = threading.Event()
        self._said_away = False
        self._keeper = threading.Thread(target=self._keep, name="store-keeper", daemon=True)

    def start(self) -> None:
        """Begin to connect, and wait a moment, so that the first request finds the store."""
        self._keeper.start()
        self._tried.wait(START_SECONDS)

    @property
    def connected(self) -> bool:
        with self._lock:
            return self._client is not None and self._client.alive

    @contextlib.contextmanager
    def borrow(self) -> Iterator[Client]:
        """The client for calls and copies; raises StoreUnavailable when there is none now.

        A StoreUnavailable raised inside pauses the link for PAUSE_SECONDS.
        """
        with self._lock:
            client = self._client
            if client is None or not client.alive or time.monotonic() < self._paused_until:
                raise StoreUnavailable("the cachestore is away")
            self._borrowed[client] = self._borrowed.get(client, 0) + 1
        try:
            yield client
        except StoreUnavailable:
            self._pause(client)
            raise
        finally:
            with self._lock:
                # Not there any more when the link was closed meanwhile.
                if client in self._borrowed:
                    self._borrowed[client] -= 1
            self._wake_if_ended(client)

    def hold(self, client: Client, lease_id: int) -> None:
        """Renew this lease until `drop`."""
        with self._lock:
            self._leases[lease_id] = client

    def drop(self, lease_id: int) -> None:
        """Release a lease, in a call to the daemon. Failures are ignored: it lapses by itself."""
        with self._lock:
            client = self._leases.pop(lease_id, None)
        if client is None or not client.alive:
            return
        with contextlib.suppress(StoreUnavailable, StoreRefused):
            client.release([lease_id])

    def close(self) -> None:
        """End the session, and with it every call. The caller has joined the threads that write."""
        self._closing.set()
        self._wake.set()
        if self._keeper.ident is not None:
            self._keeper.join()
        with self._lock:
            clients = {*self._borrowed, *([self._client] if self._client else [])}
            self._client = None
            self._borrowed.clear()
        for client in clients:
            client.close()

    def _pause(self, client: Client) -> None:
        if not client.alive:
            return
        with self._lock:
            if client is self._client:
                self._paused_until = time.monotonic() + PAUSE_SECONDS
        log.warning("the cachestore does not answer; going on without it for a moment")

    def _wake_if_ended(self, client: Client) -> None:
        if not client.alive:
            self._wake.set()

    def _keep(self) -> None:
        backoff = POLL_SECONDS
        renew_at = time.monotonic() + RENEW_SECONDS
        while not self._closing.is_set():
            try:
                self._retire_ended()
                if self._client is None:
                    self._connect()
                if time.monotonic() >= renew_at:
                    renew_at = time.monotonic() + RENEW_SECONDS
                    self._renew()
            except Exception:
                # Without this thread nothing would ever be cached again.
                log.exception("keeping the connection to the cachestore failed")
            self._tried.set()
            away = self._client is None
            backoff = min(backoff * 2, BACKOFF_SECONDS_MAX) if away else POLL_SECONDS
            self._wake.wait(backoff)
            self._wake.clear()

    def _retire_ended(self) -> None:
        """Forget clients whose session ended, and close those that nobody borrows."""
        with self._lock:
            client = self._client
            if client is not None and not client.alive:
                log.warning("the cachestore at %s went away", self.socket_path)
                self._client = None
                self._borrowed.setdefault(client, 0)
            idle = [c for c, n in self._borrowed.items() if n == 0 and c is not self._client]
            for client in idle:
                del self._borrowed[client]
            self._leases = {i: c for i, c in self._leases.items() if c.alive}
        for client in idle:
            client.close()

    def _connect(self) -> None:
        try:
            client = self._try_connect()
        except StoreUnavailable as error:
            if not self._said_away:
                log.warning("no cachestore at %s (%s): nothing is cached", self.socket_path, error)
            self._said_away = True
            return
        with self._lock:
            self._client = client
            self._paused_until = 0.0
        self._said_away = False
        log.info("connected to the cachestore at %s", self.socket_path)

    def _try_connect(self) -> Client:
        try:
            return Client.connect(str(self.socket_path))
        except StoreUnavailable:
            if self._spawn is None or self._closing.is_set():
                raise
        try:
            self._spawn(self._closing)
        except (LaunchError, OSError) as error:
            raise StoreUnavailable(str(error)) from error
        return Client.connect(str(self.socket_path))

    def _renew(self) -> None:
        with self._lock:
            # Also without leases: the answer tells which slabs to unmap.
            by_client: dict[Client, list[int]] = {self._client: []} if self._client else {}
            for lease_id, client in self._leases.items():
                by_client.setdefault(client, []).append(lease_id)
        for client, lease_ids in by_client.items():
            # A lease that lapsed is noticed where it matters: in the renewal after the copy.
            with contextlib.suppress(StoreUnavailable, StoreRefused):
                client.renew(lease_ids)
