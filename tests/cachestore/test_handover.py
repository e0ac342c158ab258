"""The client's end of the session socket, against daemons that lie."""

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachestore import frame, shm
from cachestore.frame import Frame
from cachestore.handover import HandoverError, Session
from tests.support.slabs import held_slabs

HELLO = {"v": 1, "token": "t", "pid": 1, "version": "0"}


def read_frame(peer: socket.socket) -> Frame:
    length = frame.body_bytes(peer.recv(4, socket.MSG_WAITALL))
    return frame.decode(peer.recv(length, socket.MSG_WAITALL))


@contextlib.contextmanager
def impostor(
    path: Path, answer: Callable[[socket.socket, Frame], None], hello: Frame = HELLO
) -> Iterator[None]:
    """A session socket that greets once with `hello`, and then answers one question."""

    def serve(listener: socket.socket) -> None:
        peer, _ = listener.accept()
        with peer, contextlib.suppress(OSError, struct.error):
            read_frame(peer)
            peer.sendall(frame.encode(hello))
            answer(peer, read_frame(peer))
            peer.recv(1)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            yield
        finally:
            thread.join()


def _send_fds(peer: socket.socket, answer: Frame, *, sizes: tuple[int, ...]) -> None:
    fds = [shm.create_slab(size) for size in sizes]
    socket.send_fds(peer, [frame.encode(answer)], fds)
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize(
    "answer",
    [
        lambda peer, _: peer.sendall(frame.encode({"slab": 1, "size": 4096})),
        lambda peer, _: _send_fds(peer, {"slab": 2, "size": 4096}, sizes=(4096,)),
        lambda peer, _: _send_fds(peer, {"slab": 1, "size": 1 << 20}, sizes=(4096,)),
        lambda peer, _: _send_fds(peer, {"slab": 1, "size": -1}, sizes=(4096,)),
        lambda peer, _: _send_fds(peer, {"slab": 1, "size": 4096}, sizes=(4096, 4096)),
        lambda peer, _: _send_fds(peer, {"slab": 1}, sizes=(4096,)),
        lambda peer, _: peer.sendall(b"\xff" * 8),
        lambda peer, _: peer.sendall(b"\x01\0\0\0\xc1"),
        lambda peer, _: peer.sendall(b"\x01"),
        lambda peer, _: None,
        lambda peer, _: peer.shutdown(socket.SHUT_WR),
    ],
)
def test_a_lying_daemon_is_an_error_and_costs_no_descriptors(
    directory: Path, answer: Callable[[socket.socket, Frame], None]
) -> None:
    path = directory / "x.fd"
    before = held_slabs()
    with impostor(path, answer):
        session = Session(path, "engine", timeout_seconds=0.2)
        for _ in range(2):
            with pytest.raises(HandoverError):
                session.fetch(1)
        assert not session.alive
        session.close()
    assert held_slabs() <= before


@pytest.mark.parametrize(
    "hello",
    [
        {"v": 2, "token": "t", "pid": 1, "version": "0"},
        {"v": 1, "pid": 1, "version": "0"},
        {"v": 1, "token": "t", "pid": None, "version": "0"},
        {"error": "go away"},
        {},
    ],
)
def test_a_wrong_greeting_is_an_error(directory: Path, hello: Frame) -> None:
    path = directory / "x.fd"
    with impostor(path, lambda *_: None, hello), pytest.raises(HandoverError):
        Session(path, "engine", timeout_seconds=5)


def test_a_daemon_of_another_user_is_not_talked_to(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = directory / "x.fd"
    monkeypatch.setattr(frame, "trusted_peer", lambda _: False)
    with impostor(path, lambda *_: None), pytest.raises(HandoverError, match="another user"):
        Session(path, "engine", timeout_seconds=5)
