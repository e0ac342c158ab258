"""The session socket: who may call, which slabs they get, and when they are gone.

Runs in the event loop on bare non-blocking sockets, because asyncio's transports cannot send
descriptors. Each connection has a task of its own, so a client that reads or acknowledges
slowly waits for itself only. The frames are described in frame.py.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

from cachestore import frame
from cachestore.frame import Frame, FrameError
from cachestore.retirement import Retirement
from cachestore.store import Store

CONNECTIONS_MAX = 64
HELLO_SECONDS = 5.0
_ACCEPT_RETRY_SECONDS = 1.0

_log = logging.getLogger(__name__)


class SessionServer:
    """Accepts sessions from `start` to `stop`; tells the store of each one's begin and end."""

    def __init__(
        self,
        path: Path,
        store: Store,
        retirement: Retirement,
        clock: Callable[[], float],
        version: str,
    ) -> None:
        self._path = path
        self._store = store
        self._retirement = retirement
        self._clock = clock
        self._version = version
        self._sessions: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None
        self._engines = 0
        self._idle_since = clock()

    def find(self, token: str) -> int | None:
        """The session that `token` was given to, unless it has ended."""
        return self._sessions.get(token)

    @property
    def idle_seconds(self) -> float:
        """How long no engine has had a session."""
        return 0.0 if self._engines else self._clock() - self._idle_since

    def start(self) -> None:
        """Binds and listens. Raises OSError."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener = listener
        listener.setblocking(False)
        listener.bind(os.fspath(self._path))
        self._path.chmod(0o600)
        listener.listen(CONNECTIONS_MAX)
        self._begin(self._accept(listener))

    async def stop(self) -> None:
        """Ends all sessions and removes the socket."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            self._path.unlink(missing_ok=True)

    def _begin(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, _ = await loop.sock_accept(listener)
            except OSError as error:
                _log.warning("cannot accept a session: %s", error)
                await asyncio.sleep(_ACCEPT_RETRY_SECONDS)
                continue
            peer.setblocking(False)
            self._begin(self._serve(peer))
            # Accepting does not wait while others are in the queue, and a crowd of which each
            # counts all would be refused as a whole: this one is let in, or gone, before the next.
            await asyncio.sleep(0)

    async def _serve(self, peer: socket.socket) -> None:
        """One connection, from accept to end. Whatever it does ends only itself."""
        with peer:
            try:
                await self._converse(peer)
            except EOFError:
                pass
            except FrameError as error:
                _log.warning("session ended for a bad frame: %s", error)
                with contextlib.suppress(OSError):
                    peer.send(frame.encode({"error": str(error)}))
            except TimeoutError:
                _log.warning("session ended: nothing said in %s s", HELLO_SECONDS)
            except OSError as error:
                _log.info("session ended: %s", error)
            except Exception:
                _log.exception("session ended")

    async def _converse(self, peer: socket.socket) -> None:
        if not frame.trusted_peer(peer):
            raise FrameError("this cachestore belongs to another user")
        # One task accepts.
        if len(self._tasks) - 1 > CONNECTIONS_MAX:
            raise FrameError(f"{CONNECTIONS_MAX} sessions are open, no more are possible")
        async with asyncio.timeout(HELLO_SECONDS):
            hello = await _receive(peer)
        counted = _check_hello(hello)
        with self._session(counted) as (session, token):
            answer = {"v": frame.PROTOCOL_VERSION, "token": token}
            answer |= {"pid": os.getpid(), "version": self._version}
            await _send(peer, answer)
            while True:
                await self._answer(peer, session, await _receive(peer))

    @contextlib.contextmanager
    def _session(self, counted: bool) -> Iterator[tuple[int, str]]:
        token = secrets.token_hex(32)
        session = self._store.open_session(counted)
        self._sessions[token] = session
        self._engines += counted
        try:
            yield session, token
        finally:
            self._engines -= counted
            if counted:
                self._idle_since = self._clock()
            del self._sessions[token]
            self._store.close_session(session, self._clock())
            self._retirement.session_ended(session)

    async def _answer(self, peer: socket.socket, session: int, request: Frame) -> None:
        if "unmapped" in request:
            self._retirement.unmapped(session, frame.integer(request, "unmapped"))
        else:
            await self._hand_over(peer, session, frame.integer(request, "slab"))

    async def _hand_over(self, peer: socket.socket, session: int, slab_id: int) -> None:
        slab = self._retirement.give(session, slab_id)
        if slab is None:
            await _send(peer, {"error": f"there is no slab {slab_id}"})
            return
        await _send(peer, {"slab": slab_id, "size": slab.size}, slab.fd)
        if await _read(peer, 1) != frame.ACKNOWLEDGE:
            raise FrameError("no acknowledgement after a descriptor")


def _check_hello(hello: Frame) -> bool:
    """Whether the session is one that is counted."""
    version, role = hello.get("v"), hello.get("role")
    if version != frame.PROTOCOL_VERSION:
        raise FrameError(
            f"the client speaks version {version!r:.20} of the session protocol, "
            f"this cachestore version {frame.PROTOCOL_VERSION}"
        )
    if role not in frame.ROLES:
        raise FrameError(f"role: {role!r:.20} is none of {', '.join(frame.ROLES)}")
    return bool(role == "engine")


async def _receive(peer: socket.socket) -> Frame:
    header = await _read(peer, frame.HEADER_BYTES)
    return frame.decode(await _read(peer, frame.body_bytes(header)))


async def _read(peer: socket.socket, length: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < length:
        part = await loop.sock_recv(peer, length - len(data))
        if not part:
            raise EOFError
        data += part
    return data


async def _send(peer: socket.socket, answer: Frame, fd: int | None = None) -> None:
    """Sends a frame; `fd` goes with its first byte."""
    loop = asyncio.get_running_loop()
    data = frame.encode(answer)
    if fd is not None:
        sent = await _send_fd(peer, data, fd)
        data = data[sent:]
    await loop.sock_sendall(peer, data)


async def _send_fd(peer: socket.socket, data: bytes, fd: int) -> int:
    while True:
        try:
            return socket.send_fds(peer, [data], [fd])
        except BlockingIOError:
            await _writable(peer)


async def _writable(peer: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_writer(peer, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(peer)
