"""Hostile clients of a real daemon: a good one beside them is served all the while, and nothing
of them is left when they have gone."""

import contextlib
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachestore import endpoint, frame, session
from cachestore.client import StoreRefused, StoreUnavailable
from tests.support import entries
from tests.support.beside import SEQUENCE, connections
from tests.support.daemons import Cachestore
from tests.support.fuzz import mutated
from tests.support.waiting import until

HELLO: frame.Frame = {"v": 1, "role": "engine"}


@contextlib.contextmanager
def connected(path: Path, *frames: frame.Frame) -> Iterator[socket.socket]:
    """A bare connection that has sent those, and read nothing."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(path))  # waits for a place in the queue
        peer.settimeout(10)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for each in frames:
                peer.sendall(frame.encode(each))
        yield peer


FRAMES = st.sampled_from(
    [HELLO, {"slab": 1}, {"unmapped": 1}, {"slab": 2**63}, {"unmapped": 0}]
).map(frame.encode)


@settings(max_examples=150)
@given(conversation=st.lists(st.binary(max_size=40) | mutated(FRAMES) | FRAMES, max_size=5))
def fuzz_session_socket(path: Path, conversation: list[bytes]) -> None:
    with connected(path) as peer, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for data in conversation:
            peer.sendall(data)


def test_frames_of_all_kinds(beside: Cachestore) -> None:
    fuzz_session_socket(endpoint.session_path(beside.socket))
    until(lambda: beside.stats().sessions == 1, "their sessions to end")


@settings(max_examples=50)
@given(data=st.binary(max_size=200) | mutated(st.just(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")))
def fuzz_grpc_socket(path: Path, data: bytes) -> None:
    with connected(path) as peer, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        peer.sendall(data)


def test_bytes_of_all_kinds_on_the_other_socket(beside: Cachestore) -> None:
    fuzz_grpc_socket(beside.socket)
    assert beside.process.poll() is None


def test_a_client_that_reserves_everything_and_sleeps(beside: Cachestore) -> None:
    with beside.client() as hog:
        # What the good client reads stays: it is leased, again and again.
        with contextlib.suppress(StoreRefused):
            for number in range(1000):
                wanted = entries.tokens(256, first=1000 * (1 + number))
                hog.reserve(bytes(32), wanted, 0, 0, 8000, "")
        stats = beside.stats()
        assert 0 < stats.reservations < 1000
        assert stats.bytes_slabs == stats.bytes_budget
        with beside.client() as other, pytest.raises(StoreRefused, match="RESOURCE_EXHAUSTED"):
            entries.write(other, entries.tokens(3000, first=10**6))
    until(lambda: beside.stats().bytes_reserved == 0, "its extents to come back")
    with beside.client() as other:
        assert entries.write(other, entries.tokens(300, first=10**7)) == 300


def test_a_thousand_sessions(beside: Cachestore) -> None:
    open_before = connections(beside)
    with contextlib.ExitStack() as stack:
        path = endpoint.session_path(beside.socket)
        for _ in range(1000):
            stack.enter_context(connected(path, HELLO))
        # Ours is refused when all of those before it have been met; the system itself refuses
        # connections while too many wait for that.
        until(lambda: "no more are possible" in refusal(beside), "our own session to be refused")
        assert connections(beside) <= open_before + session.CONNECTIONS_MAX + 5
    until(lambda: sessions_open(beside) == 1, "their sessions to end")


def refusal(daemon: Cachestore) -> str:
    with pytest.raises(StoreUnavailable) as refused:
        daemon.client()
    return str(refused.value)


def sessions_open(daemon: Cachestore) -> int:
    """As far as one can see: there may be none left to ask."""
    try:
        return daemon.stats().sessions
    except StoreUnavailable:
        return session.CONNECTIONS_MAX


def test_descriptors_that_nobody_acknowledges(beside: Cachestore) -> None:
    with contextlib.ExitStack() as stack:
        path = endpoint.session_path(beside.socket)
        for _ in range(30):
            stack.enter_context(connected(path, HELLO, {"slab": 1}))
        until(lambda: beside.stats().sessions == 31, "their sessions")
        with beside.client() as other:
            lease = other.lookup(entries.NAMESPACE, SEQUENCE, 299)
            assert entries.is_intact(other, lease)


def test_a_frame_that_never_ends(beside: Cachestore) -> None:
    path = endpoint.session_path(beside.socket)
    with connected(path, HELLO) as one, connected(path, HELLO) as other:
        one.sendall(struct.pack("<I", 4000) + b"\x81")
        other.sendall(b"\x01")
        until(lambda: beside.stats().sessions == 3, "their sessions")
        assert beside.stats().leases <= 1
