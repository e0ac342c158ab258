"""Hostile clients of a real daemon: a good one beside them is served all the while, and nothing
of them is left when they have gone."""

import contextlib
import math
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from cachestore import endpoint, frame, session
from cachestore.client import Client, StoreRefused, StoreUnavailable
from cachestore.v1 import cachestore_pb2 as pb
from tests.support import entries
from tests.support.daemons import Cachestore, short_directory, start_cachestore
from tests.support.fuzz import is_message, mutated
from tests.support.slabs import held_slabs
from tests.support.waiting import until

HELLO: frame.Frame = {"v": 1, "role": "engine"}
SEQUENCE = entries.tokens(300)
MEMORY_GROWTH_BYTES_MAX = 8 << 20
SLOW_SECONDS = 2.0
ANSWERS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
# gRPC's own, for bytes that are no message.
NO_MESSAGE = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}


def held(daemon: Cachestore) -> dict[str, int]:
    """All that the daemon holds for sessions, but for what is 0."""
    stats = daemon.stats()
    names = ["sessions", "leases", "reservations", "announced", "waiting"]
    names += ["bytes_reserved", "bytes_quarantined"]
    return {name: getattr(stats, name) for name in names if getattr(stats, name)}


def count(daemon: Cachestore, folder: str) -> int:
    """Its descriptors ("fd") or threads ("task"), where the system tells."""
    path = Path(f"/proc/{daemon.pid}/{folder}")
    return len(list(path.iterdir())) if path.exists() else 0


def connections(daemon: Cachestore) -> int:
    """Its descriptors but for those of slabs."""
    return count(daemon, "fd") - len(held_slabs(daemon.pid))


def memory_bytes(daemon: Cachestore) -> int:
    """Resident memory of its own, shared memory aside, where the system tells."""
    status = Path(f"/proc/{daemon.pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


@pytest.fixture(scope="module")
def running() -> Iterator[Cachestore]:
    with short_directory() as directory, start_cachestore(directory) as daemon:
        with daemon.client() as client:
            entries.write(client, SEQUENCE)
            for _ in range(200):  # so that it has the memory and the threads that calls take
                client.stats()
        yield daemon
        assert daemon.process.poll() is None
        assert "a call failed" not in daemon.log
        with daemon.client(role="admin") as client:
            problems = [text for step in client.verify() for text in step.problems]
        # The records of these tests are none of an engine's: only the bookkeeping counts.
        assert not [text for text in problems if "bookkeeping" in text]


@pytest.fixture
def beside(running: Cachestore) -> Iterator[Cachestore]:
    """The daemon, while a good client uses it."""
    open_before, threads = connections(running), count(running, "task")
    memory = memory_bytes(running)
    with _used(running):
        yield running
    until(lambda: not held(running), "nothing to be held for anybody")
    # Connections close a little later.
    until(lambda: connections(running) <= open_before + 1, "the descriptors to be closed")
    assert count(running, "task") <= threads + 1
    assert memory_bytes(running) <= memory + MEMORY_GROWTH_BYTES_MAX


@contextlib.contextmanager
def _used(daemon: Cachestore) -> Iterator[None]:
    """A good client looks up and reads until the end, and is served in time."""
    over = threading.Event()
    rounds = 0

    def use(client: Client) -> None:
        nonlocal rounds
        while not over.wait(0.01):
            lease = client.lookup(entries.NAMESPACE, SEQUENCE, 299)
            assert entries.is_intact(client, lease)
            client.release([lease.id])
            rounds += 1

    with daemon.client(timeout_seconds=SLOW_SECONDS) as good, ThreadPoolExecutor(1) as pool:
        use_of_it = pool.submit(use, good)
        try:
            yield
            seen = rounds
            until(lambda: use_of_it.done() or rounds > seen + 3, "the good client to be served")
        finally:
            over.set()
        use_of_it.result()


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


LOOKUP = pb.LookupRequest(namespace=entries.NAMESPACE, tokens=SEQUENCE, limit=299)
RESERVE = pb.ReserveRequest(
    namespace=entries.NAMESPACE, tokens=SEQUENCE, record_overhead_bytes=100, row_bytes=1000
)
CHECKPOINTED = bytes(range(64, 96))
LOOKUP_STATE = pb.LookupRequest(
    namespace=CHECKPOINTED,
    tokens=SEQUENCE,
    limit=299,
    announce=True,
    checkpointed=True,
    checkpoints=[100, 299],
)


def state_request(*positions: int, nbytes: int = 1, start: int = 0) -> pb.ReserveRequest:
    """To write checkpoints at these positions."""
    return pb.ReserveRequest(
        namespace=CHECKPOINTED,
        tokens=SEQUENCE,
        row_bytes=1,
        checkpointed=True,
        checkpoints=[pb.NewCheckpoint(position=n, bytes=nbytes) for n in positions],
        conversation_start=start,
    )


RESERVE_STATE = state_request(100, 299, nbytes=1000, start=50)
REQUESTS: list[tuple[str, Message]] = [
    ("Lookup", LOOKUP),
    ("Lookup", LOOKUP_STATE),
    ("Reserve", RESERVE_STATE),
    ("Renew", pb.RenewRequest(lease_ids=[1, 2, 3])),
    ("Release", pb.ReleaseRequest(lease_ids=[1, 2, 3])),
    ("Reserve", RESERVE),
    ("Commit", pb.CommitRequest(reservation_id=7, record_bytes=[1, 2], checkpoint_bytes=[3])),
    ("Abort", pb.AbortRequest(reservation_id=7)),
    ("Stats", pb.StatsRequest()),
    ("ListNamespaces", pb.ListNamespacesRequest()),
    ("ListEntries", pb.ListEntriesRequest(namespace=entries.NAMESPACE, limit=10)),
    ("ListPrefixes", pb.ListPrefixesRequest(limit=10)),
    ("Pin", pb.PinRequest(record_id=99)),
    (
        "Pin",
        pb.PinRequest(sequence=pb.Sequence(namespace=entries.NAMESPACE, tokens=SEQUENCE[:80])),
    ),
    ("Unpin", pb.UnpinRequest(record_id=99)),
    ("Evict", pb.EvictRequest(record_id=99)),
    ("Inspect", pb.InspectRequest(record_id=1)),
]
# Fields of 1 to 9 with values that end nowhere good, behind a valid message: the last one counts.
HUGE = st.builds(
    lambda field, value: bytes([field << 3]) + value,
    st.integers(1, 9),
    st.sampled_from([b"\xff" * 9 + b"\x01", b"\x80" * 9 + b"\x01", b"\xff" * 4 + b"\x0f", b"\0"]),
)


def answer_to(channel: grpc.Channel, client: Client, method: str, data: bytes) -> grpc.StatusCode:
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes]
    call = channel.unary_unary(f"/cachestore.v1.Cachestore/{method}")
    code: grpc.StatusCode = call.future(data, timeout=5, metadata=client._metadata).code()
    return code


@pytest.mark.parametrize(("method", "valid"), REQUESTS, ids=[name for name, _ in REQUESTS])
def test_messages_of_all_kinds(beside: Cachestore, method: str, valid: Message) -> None:
    data = st.just(valid.SerializeToString())
    huge = st.builds(lambda start, ends: start + b"".join(ends), data, st.lists(HUGE, min_size=1))
    with (
        beside.client() as client,
        grpc.insecure_channel(endpoint.grpc_target(beside.socket)) as channel,
    ):

        @settings(max_examples=30)
        @given(st.binary(max_size=60) | mutated(data) | huge)
        def fuzz(request: bytes) -> None:
            expected = ANSWERS if is_message(type(valid), request) else NO_MESSAGE
            assert answer_to(channel, client, method, request) in expected

        fuzz()


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("Lookup", pb.LookupRequest(namespace=entries.NAMESPACE, tokens=SEQUENCE, limit=2**32 - 1)),
        ("Lookup", pb.LookupRequest(namespace=bytes(31), tokens=SEQUENCE)),
        ("Lookup", pb.LookupRequest(namespace=entries.NAMESPACE, tokens=SEQUENCE[:-1])),
        *(
            ("Lookup", pb.LookupRequest(wait_seconds=seconds, namespace=bytes(32), tokens=SEQUENCE))
            for seconds in (-1.0, math.inf, -math.inf, math.nan, 1e300)
        ),
        ("Renew", pb.RenewRequest(lease_ids=range(5000))),
        ("Reserve", pb.ReserveRequest(namespace=bytes(32), tokens=SEQUENCE, row_bytes=2**64 - 1)),
        (
            "Reserve",
            pb.ReserveRequest(
                namespace=bytes(32), tokens=SEQUENCE, row_bytes=1, record_overhead_bytes=2**64 - 1
            ),
        ),
        (
            "Reserve",
            pb.ReserveRequest(
                namespace=bytes(32), tokens=SEQUENCE, row_bytes=1, first_row=2**32 - 1
            ),
        ),
        ("ListEntries", pb.ListEntriesRequest(limit=2**32 - 1)),
        *(
            ("Reserve", state_request(*positions))
            for positions in ([0], [301], [2**32 - 1], [5, 4], [5, 5], range(1, 66))
        ),
        ("Reserve", state_request(5, nbytes=0)),
        ("Reserve", state_request(start=301)),
        *(
            (
                "Lookup",
                pb.LookupRequest(
                    namespace=CHECKPOINTED,
                    tokens=SEQUENCE,
                    checkpointed=checkpointed,
                    checkpoints=positions,
                ),
            )
            for checkpointed, positions in (
                (True, [0]),
                (True, [301]),
                (True, [5, 4]),
                (True, [5, 5]),
                (True, range(1, 66)),
                (False, [5]),
            )
        ),
    ],
)
def test_negative_and_huge_numbers(beside: Cachestore, method: str, request_: Message) -> None:
    with (
        beside.client() as client,
        grpc.insecure_channel(endpoint.grpc_target(beside.socket)) as channel,
    ):
        code = answer_to(channel, client, method, request_.SerializeToString())
    assert code is grpc.StatusCode.INVALID_ARGUMENT


def test_a_checkpoint_that_fits_nowhere_is_refused(beside: Cachestore) -> None:
    with (
        beside.client() as client,
        grpc.insecure_channel(endpoint.grpc_target(beside.socket)) as channel,
    ):
        for nbytes in (1 << 30, 2**63, 2**64 - 1):
            request = state_request(5, nbytes=nbytes).SerializeToString()
            code = answer_to(channel, client, "Reserve", request)
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


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
