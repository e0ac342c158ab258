"""Messages of hostile clients, on the gRPC socket of a real daemon."""

import contextlib
import math

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from cachestore import endpoint
from cachestore.client import Client, NewCheckpoint, StoreRefused
from cachestore.v1 import cachestore_pb2 as pb
from tests.support import entries
from tests.support.beside import SEQUENCE
from tests.support.daemons import Cachestore
from tests.support.fuzz import is_message, mutated

ANSWERS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
# gRPC's own, for bytes that are no message.
NO_MESSAGE = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}


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


def spoiled(data: bytes) -> st.SearchStrategy[bytes]:
    """A message that is almost this one."""
    huge = st.lists(HUGE, min_size=1).map(lambda ends: data + b"".join(ends))
    return mutated(st.just(data)) | huge


@pytest.mark.parametrize(("method", "valid"), REQUESTS, ids=[name for name, _ in REQUESTS])
def test_messages_of_all_kinds(beside: Cachestore, method: str, valid: Message) -> None:
    with (
        beside.client() as client,
        grpc.insecure_channel(endpoint.grpc_target(beside.socket)) as channel,
    ):

        @settings(max_examples=30)
        @given(st.binary(max_size=60) | spoiled(valid.SerializeToString()))
        def fuzz(request: bytes) -> None:
            expected = ANSWERS if is_message(type(valid), request) else NO_MESSAGE
            assert answer_to(channel, client, method, request) in expected

        fuzz()


@pytest.mark.parametrize("method", ["Commit", "Abort", "Renew", "Release"])
def test_messages_about_what_is_held(beside: Cachestore, method: str) -> None:
    """The sender's own leases and reservations, whose ids nobody can guess."""
    with (
        beside.client() as client,
        grpc.insecure_channel(endpoint.grpc_target(beside.socket)) as channel,
    ):

        @settings(max_examples=60)
        @given(data=st.data(), checkpoints=st.sampled_from([None, [5, 9]]))
        def fuzz(data: st.DataObject, checkpoints: list[int] | None) -> None:
            namespace = bytes(31) + bytes([checkpoints is not None])
            lease = client.lookup(entries.NAMESPACE, SEQUENCE, 299)
            staged = client.reserve(
                namespace,
                entries.tokens(9, first=data.draw(st.integers(0, 3))),
                0,
                100,
                10,
                "",
                checkpointed=checkpoints is not None,
                checkpoints=[NewCheckpoint(position, 50) for position in checkpoints or ()],
            )
            sizes = [100 + 10 * piece.rows for piece in staged.pieces]
            states = [50 for _ in staged.checkpoints]
            valid: dict[str, Message] = {
                "Commit": pb.CommitRequest(
                    reservation_id=staged.id, record_bytes=sizes, checkpoint_bytes=states
                ),
                "Abort": pb.AbortRequest(reservation_id=staged.id),
                "Renew": pb.RenewRequest(lease_ids=[lease.id] * 3),
                "Release": pb.ReleaseRequest(lease_ids=[lease.id] * 3),
            }
            request = data.draw(spoiled(valid[method].SerializeToString()))
            expected = ANSWERS if is_message(type(valid[method]), request) else NO_MESSAGE
            assert answer_to(channel, client, method, request) in expected
            with contextlib.suppress(StoreRefused):
                client.abort(staged.id)
            client.release([lease.id])

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
