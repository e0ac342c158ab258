"""The client's end of the session socket: says hello, and receives slabs."""

import contextlib
import mmap
import os
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from cachestore import frame, shm
from cachestore.frame import Frame, FrameError

# More than is ever sent at once: macOS leaks descriptors that do not fit.
_DESCRIPTORS_MAX = 8
# Python receives descriptors that a child would inherit; Linux can forbid it in the same call.
_RECEIVE_FLAGS = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class HandoverError(Exception):
    """The daemon is not there, has gone, does not answer in time, refuses, or answers nonsense."""


class Session:
    """One connection to the session socket, open until `close` or the daemon's end.

    Any thread may use it; requests are answered one at a time. After a failure in the middle of
    an answer nothing more can be asked, but the connection stays open: its end would tell the
    daemon that no thread of ours copies any more. Raises HandoverError.
    """

    def __init__(self, path: Path, role: str, timeout_seconds: float) -> None:
        self._lock = threading.Lock()
        self._lost = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_seconds)
        try:
            with self._lost_on_failure():
                self._socket.connect(os.fspath(path))
                if not frame.trusted_peer(self._socket):
                    raise FrameError("belongs to another user")
                hello, _ = self._ask({"v": frame.PROTOCOL_VERSION, "role": role})
                _raise_refusal(hello)
                if hello.get("v") != frame.PROTOCOL_VERSION:
                    raise FrameError(f"speaks version {hello.get('v')!r:.40}")
                self.token = frame.text(hello, "token")
                self.pid = frame.integer(hello, "pid")
                self.version = frame.text(hello, "version")
        except BaseException:
            self._socket.close()
            raise

    @property
    def alive(self) -> bool:
        """Whether the daemon still holds the other end, as far as can be seen without waiting."""
        if self._lost or not self._lock.acquire(blocking=False):
            return not self._lost  # a thread that waits for an answer will see the end itself
        try:
            # Unasked, the daemon says nothing: whatever can be read is the end.
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            self._lost = self._lost or bool(poll.poll(0))
            return not self._lost
        finally:
            self._lock.release()

    def fetch(self, slab_id: int) -> mmap.mmap:
        """Maps a slab, its pages in place."""
        with self._lock, self._lost_on_failure():
            if self._lost:
                raise FrameError("the session has ended")
            answer, descriptors = self._ask({"slab": slab_id})
            try:
                _raise_refusal(answer)
                if len(descriptors) != 1 or frame.integer(answer, "slab") != slab_id:
                    raise FrameError(f"{len(descriptors)} descriptors for slab {slab_id}")
                mapping = shm.map_slab(descriptors[0], frame.integer(answer, "size"))
            finally:
                _close_all(descriptors)
            self._socket.sendall(frame.ACKNOWLEDGE)
        shm.touch(mapping)
        return mapping

    def say_unmapped(self, slab_id: int) -> None:
        """Tells the daemon that no view of a slab is left here."""
        with self._lock, self._lost_on_failure():
            if not self._lost:
                self._socket.sendall(frame.encode({"unmapped": slab_id}))

    def close(self) -> None:
        self._lost = True
        # Ends what another thread may be waiting for, so that the lock comes free.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._socket.close()

    @contextlib.contextmanager
    def _lost_on_failure(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, FrameError) as error:
            self._lost = True
            reason = error.strerror if isinstance(error, OSError) else None
            raise HandoverError(reason or str(error)) from error

    def _ask(self, question: Frame) -> tuple[Frame, list[int]]:
        self._socket.sendall(frame.encode(question))
        header, descriptors, _, _ = socket.recv_fds(
            self._socket, frame.HEADER_BYTES, _DESCRIPTORS_MAX, _RECEIVE_FLAGS
        )
        try:
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
            header += self._read(frame.HEADER_BYTES - len(header))
            answer = frame.decode(self._read(frame.body_bytes(header)))
        except BaseException:
            _close_all(descriptors)
            raise
        return answer, descriptors

    def _read(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            part = self._socket.recv(length - len(data))
            if not part:
                raise FrameError("the session has ended")
            data += part
        return data


def _raise_refusal(answer: Frame) -> None:
    if "error" in answer:
        raise HandoverError(frame.text(answer, "error"))


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
