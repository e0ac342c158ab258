"""The session socket of a real daemon, spoken to by hand."""

import asyncio
import contextlib
import os
import random
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest

from cachestore import endpoint, frame, session, shm
from cachestore.client import StoreUnavailable
from cachestore.config import StoreConfig
from cachestore.frame import Frame
from cachestore.retirement import Retirement
from cachestore.session import SessionServer
from cachestore.store import Store
from tests.support import entries
from tests.support.daemons import Cachestore, short_directory, start_cachestore
from tests.support.waiting import until

HELLO = {"v": 1, "role": "engine"}


@pytest.fixture(scope="module")
def running() -> Iterator[Cachestore]:
    with short_directory() as directory, start_cachestore(directory) as daemon:
        with daemon.client() as client:
            entries.write(client, entries.tokens(10))  # so that there is a slab
        yield daemon
        assert daemon.process.poll() is None
        assert daemon.stats().sessions == 0


@contextlib.contextmanager
def connected(daemon: Cachestore) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(10)
        peer.connect(str(endpoint.session_path(daemon.socket)))
        yield peer


def ask(peer: socket.socket, question: Frame) -> tuple[Frame, list[int]]:
    peer.sendall(frame.encode(question))
    return receive(peer)


def receive(peer: socket.socket) -> tuple[Frame, list[int]]:
    header, fds, _, _ = socket.recv_fds(peer, 4, 4)
    (length,) = struct.unpack("<I", header)
    return msgpack.unpackb(peer.recv(length, socket.MSG_WAITALL)), list(fds)


def is_ended(peer: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        return peer.recv(1) == b""
    return True


def test_hello_is_answered_with_a_token(running: Cachestore) -> None:
    tokens = set()
    for _ in range(3):
        with connected(running) as peer:
            answer, fds = ask(peer, HELLO)
            assert (answer["v"], answer["pid"], fds) == (1, running.pid, [])
            assert answer["version"]
            assert len(bytes.fromhex(answer["token"])) == 32
            tokens.add(answer["token"])
    assert len(tokens) == 3


def test_engines_are_counted_until_their_connection_ends(running: Cachestore) -> None:
    with connected(running) as peer:
        ask(peer, HELLO)
        assert running.stats().sessions == 1
        with connected(running) as admin:
            ask(admin, {"v": 1, "role": "admin"})
            assert running.stats().sessions == 1
        peer.shutdown(socket.SHUT_WR)
        assert is_ended(peer)
    assert running.stats().sessions == 0


@pytest.mark.parametrize(
    ("hello", "complaint"),
    [
        (
            {"v": 2, "role": "engine"},
            "version 2 of the session protocol, this cachestore version 1",
        ),
        ({"role": "engine"}, "version None"),
        ({"v": 1, "role": "king"}, "role: 'king' is none of engine, admin"),
        ({"v": 1}, "role: None"),
    ],
)
def test_a_wrong_hello_is_told_why(running: Cachestore, hello: Frame, complaint: str) -> None:
    with connected(running) as peer:
        answer, _ = ask(peer, hello)
        assert complaint in answer["error"]
        assert is_ended(peer)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", 0),
        struct.pack("<I", 4097),
        struct.pack("<I", 2**32 - 1),
        struct.pack("<I", 1) + b"\xc1",
        struct.pack("<I", 2) + msgpack.packb([1]),
        struct.pack("<I", 3) + msgpack.packb({1: 1}),
        struct.pack("<I", 2) + b"\x81\x90",
        struct.pack("<I", 4096) + b"\x91" * 4096,
    ],
)
def test_bad_frames_end_only_their_own_session(running: Cachestore, data: bytes) -> None:
    with connected(running) as good:
        ask(good, HELLO)
        for greeted in (False, True):
            with connected(running) as peer:
                if greeted:
                    ask(peer, HELLO)
                peer.sendall(data)
                assert "error" in receive(peer)[0]
                assert is_ended(peer)
        assert running.stats().sessions == 1
        assert "error" in ask(good, {"slab": 999})[0]


@pytest.mark.parametrize("seed", range(30))
def test_random_bytes_do_no_harm(running: Cachestore, seed: int) -> None:
    chance = random.Random(seed)
    with connected(running) as peer:
        if chance.random() < 0.5:
            ask(peer, HELLO)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(chance.randrange(1, 5)):
                body = chance.randbytes(chance.randrange(1, 100))
                framed = chance.random() < 0.7
                peer.sendall(struct.pack("<I", len(body)) + body if framed else body)
    assert running.stats().sessions == 0


def test_a_slab_comes_as_a_descriptor(running: Cachestore) -> None:
    with connected(running) as peer:
        ask(peer, HELLO)
        for _ in range(3):
            answer, (fd,) = ask(peer, {"slab": 1})
            peer.sendall(frame.ACKNOWLEDGE)
            mapping = shm.map_slab(fd, answer["size"])
            os.close(fd)
            assert answer == {"slab": 1, "size": len(mapping)}
            assert entries.payload(0, 10) in mapping[:]


@pytest.mark.parametrize("slab_id", [0, 2, 2**64 - 1])
def test_an_unknown_slab_is_an_answer(running: Cachestore, slab_id: int) -> None:
    with connected(running) as peer:
        ask(peer, HELLO)
        for _ in range(2):
            assert ask(peer, {"slab": slab_id}) == ({"error": f"there is no slab {slab_id}"}, [])


@pytest.mark.parametrize(
    "request_", [{}, {"slab": "1"}, {"slab": -1}, {"slab": True}, {"slab": 1.0}]
)
def test_anything_but_a_slab_id_ends_the_session(running: Cachestore, request_: Frame) -> None:
    with connected(running) as peer:
        ask(peer, HELLO)
        assert "slab: not a number" in ask(peer, request_)[0]["error"]
        assert is_ended(peer)


def test_no_second_descriptor_before_the_first_is_acknowledged(running: Cachestore) -> None:
    with connected(running) as peer:
        ask(peer, HELLO)
        _, (fd,) = ask(peer, {"slab": 1})
        os.close(fd)
        answer, fds = ask(peer, {"slab": 1})
        assert "no acknowledgement" in answer["error"]
        assert fds == []
        assert is_ended(peer)


def test_a_client_that_never_reads_does_not_hold_up_the_others(running: Cachestore) -> None:
    with connected(running) as stuck:
        stuck.setblocking(False)
        stuck.send(frame.encode(HELLO))
        with contextlib.suppress(BlockingIOError):
            while True:
                stuck.send(frame.encode({"slab": 999}))
        assert running.stats().sessions == 1


def test_connections_are_limited(running: Cachestore) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(session.CONNECTIONS_MAX):
            peer = stack.enter_context(connected(running))
            assert "token" in ask(peer, HELLO)[0]
        peer = stack.enter_context(connected(running))
        assert "64 sessions are open" in receive(peer)[0]["error"]
        assert is_ended(peer)

    def all_ended() -> bool:
        # To ask takes a session, too: as long as none of the others has ended there is no room.
        with contextlib.suppress(StoreUnavailable):
            return running.stats().sessions == 0
        return False

    until(all_ended, "the end of the sessions")


def test_of_a_crowd_as_many_are_let_in_as_there_is_room_for(directory: Path) -> None:
    path = directory / "x.fd"

    async def first_frame(peer: socket.socket) -> bytes:
        peer.setblocking(False)
        return await asyncio.get_running_loop().sock_recv(peer, 4096)

    async def scenario() -> list[bytes]:
        store = Store(StoreConfig(budget_bytes=16 << 20))
        server = SessionServer(path, store, Retirement(store, {}), time.monotonic, "0")
        server.start()
        with contextlib.ExitStack() as stack:

            def join() -> socket.socket:
                peer = stack.enter_context(socket.socket(socket.AF_UNIX))
                peer.connect(str(path))
                peer.sendall(frame.encode(HELLO))
                return peer

            first = await first_frame(join())
            # They wait in the queue together, for the server has no turn meanwhile.
            crowd = [join() for _ in range(session.CONNECTIONS_MAX)]
            answers = [first, *[await first_frame(peer) for peer in crowd]]
        await server.stop()
        return answers

    answers = asyncio.run(scenario())
    assert sum(b"token" in answer for answer in answers) == session.CONNECTIONS_MAX


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_is_sent_away() -> None:
    with short_directory() as directory, start_cachestore(directory) as daemon:
        directory.chmod(0o755)
        endpoint.session_path(daemon.socket).chmod(0o777)  # even then
        os.seteuid(65534)
        try:
            with connected(daemon) as peer:
                assert "belongs to another user" in receive(peer)[0]["error"]
                assert is_ended(peer)
        finally:
            os.seteuid(0)


def test_who_does_not_say_hello_is_not_waited_for(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "HELLO_SECONDS", 0.05)

    async def scenario() -> None:
        store = Store(StoreConfig(budget_bytes=16 << 20))
        server = SessionServer(
            directory / "x.fd", store, Retirement(store, {}), time.monotonic, "0"
        )
        server.start()
        reader, writer = await asyncio.open_unix_connection(directory / "x.fd")
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        await server.stop()

    asyncio.run(scenario())
    assert list(directory.iterdir()) == []
