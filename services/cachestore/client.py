"""The cachestore as the engine and the admin tool see it. Synchronous; any thread may call.

Everything that comes back has been checked: an answer that contradicts itself is as good as
none, for the caller would otherwise read or overwrite somebody else's bytes.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cachestore import endpoint, handover, reply
from cachestore.config import ENTRIES_PER_CALL_MAX, MESSAGE_BYTES_MAX
from cachestore.extent import Extent
from cachestore.frame import SESSION_METADATA
from cachestore.launch import LaunchError, spawn
from cachestore.reply import Checkpoint, Lease, MatchKind, Reservation, Span
from cachestore.slabs import SlabError, Slabs
from cachestore.v1 import cachestore_pb2 as pb
from cachestore.v1 import cachestore_pb2_grpc
from cachestore.write import NewCheckpoint, Piece, StagedCheckpoint

__all__ = [
    "Checkpoint",
    "Client",
    "Extent",
    "LaunchError",
    "Lease",
    "MatchKind",
    "NewCheckpoint",
    "Piece",
    "Reservation",
    "Span",
    "StagedCheckpoint",
    "StoreRefused",
    "StoreUnavailable",
    "Unwanted",
    "spawn",
]

_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),  # the daemon has the say
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    *endpoint.CHANNEL_OPTIONS,
    ("grpc.enable_retries", 0),
)
_REFUSALS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)

_Request = TypeVar("_Request", bound=Message)
_Reply = TypeVar("_Reply", bound=Message)
_Checked = TypeVar("_Checked")


class StoreUnavailable(Exception):
    """No connection, session lost, deadline passed, or a reply that makes no sense.

    For a reader a miss, for a writer a dropped write. What the daemon may still hold for the
    call (a reply can be lost after it was made) ends with its deadline or with the session.
    """


class StoreRefused(Exception):
    """The daemon understood and said no."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message


class Unwanted(Exception):
    """The caller of a lookup that waited does not want its answer any more."""


class Client:
    """One session with a cachestore, from `connect` to `close`.

    Once `alive` is False it stays so, and the caller closes it and connects anew. Views of slabs
    stay valid memory whatever happens to the daemon or the client; a slab is unmapped when the
    client is closed, or the daemon has retired it, and its last view is gone. Before `close`
    the caller joins its threads that copy from or to views: the daemon takes the end of the
    session as the word that nobody writes any more.
    """

    def __init__(
        self, session: handover.Session, channel: grpc.Channel, timeout_seconds: float
    ) -> None:
        self._session = session
        self._channel = channel
        self._stub = cachestore_pb2_grpc.CachestoreStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)
        self._metadata = ((SESSION_METADATA, session.token),)
        self._timeout_seconds = timeout_seconds
        self._slabs = Slabs(session)
        self._closed = False
        self._in_doubt = False

    @classmethod
    def connect(
        cls, socket_path: str | Path, *, role: str = "engine", timeout_seconds: float = 2.0
    ) -> Self:
        """Opens a session. `role` is "engine" or "admin"; the latter is not counted in stats.

        Raises StoreUnavailable. The timeout holds for each call of the client.
        """
        path = Path(socket_path)
        try:
            session = handover.Session(endpoint.session_path(path), role, timeout_seconds)
        except handover.HandoverError as error:
            raise StoreUnavailable(f"{path}: {error}") from error
        channel = grpc.insecure_channel(endpoint.grpc_target(path), _CHANNEL_OPTIONS)
        return cls(session, channel, timeout_seconds)

    def close(self) -> None:
        """Ends the session. Views that are still held keep their slabs mapped."""
        self._closed = True
        self._session.close()
        self._slabs.close()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """False once the daemon has ended the session, or a write is in doubt. Does not wait."""
        return not self._in_doubt and self._session.alive

    @property
    def slab_bytes_mapped(self) -> int:
        return self._slabs.bytes_mapped

    def lookup(
        self,
        namespace: bytes,
        tokens: bytes,
        limit: int,
        announce: bool = False,
        wait_seconds: float = 0.0,
        *,
        checkpointed: bool = False,
        checkpoints: Sequence[int] = (),
        parting_distance: int = 0,
        wanted: Callable[[], bool] = lambda: True,
    ) -> Lease:
        """Longest prefix of `tokens` (packed uint32, little-endian) held, at most `limit` rows.

        With `announce` the caller promises to commit the rows that are missing, and has a lease
        also for a miss; the promise ends with it. With `wait_seconds` the answer may come that
        much later, when somebody else has promised rows of these tokens. Soon after `wanted` is
        False the wait ends, and Unwanted is raised.

        When `checkpointed`, rows are served up to `Lease.checkpoint`, which is None for a miss,
        and a promise is worth the positions in `checkpoints`: ascending, at most 64. With a
        `parting_distance` the promise includes one more, at `Lease.parting`: where these tokens
        part from those that others hold or have announced, if that is so many tokens behind any
        other checkpoint.
        """
        request = pb.LookupRequest(
            namespace=namespace,
            tokens=tokens,
            limit=limit,
            announce=announce,
            wait_seconds=wait_seconds,
            checkpointed=checkpointed,
            checkpoints=checkpoints,
            parting_distance=parting_distance,
        )
        answer = self._call(self._stub.Lookup, request, wait_seconds, wanted)
        self._slabs.retire(answer.retired_slab_ids)
        return _checked(lambda: reply.lease(answer, request))

    def renew(self, ids: Sequence[int]) -> list[bool]:
        """Extends leases; says of each whether it was valid all the while.

        Like a lookup, it also unmaps slabs that the daemon wants to give back, once no view of
        them is left: a client that does neither for long should call it without ids.
        """
        answer = self._call(self._stub.Renew, pb.RenewRequest(lease_ids=ids))
        self._slabs.retire(answer.retired_slab_ids)
        if len(answer.valid) != len(ids):
            raise StoreUnavailable(f"{len(answer.valid)} answers for {len(ids)} leases")
        return list(answer.valid)

    def release(self, ids: Sequence[int]) -> None:
        self._call(self._stub.Release, pb.ReleaseRequest(lease_ids=ids))

    def reserve(
        self,
        namespace: bytes,
        tokens: bytes,
        first_row: int,
        record_overhead_bytes: int,
        row_bytes: int,
        label: str,
        *,
        checkpointed: bool = False,
        checkpoints: Sequence[NewCheckpoint] = (),
        conversation_start: int = 0,
    ) -> Reservation:
        """Room for the rows of `tokens` that the store lacks, of which the caller can write
        those from `first_row` on. Each row takes `row_bytes`, each record the overhead too.
        And room for the checkpoints that it lacks: positions are ascending, at most 64.

        A long sequence takes several reservations, one after the commit of the other, until
        `Reservation.end` is its last token; give all checkpoints each time. What comes after
        `conversation_start` belongs to one conversation, which keeps a limited number of them;
        0 when that is not known."""
        request = pb.ReserveRequest(
            namespace=namespace,
            tokens=tokens,
            first_row=first_row,
            record_overhead_bytes=record_overhead_bytes,
            row_bytes=row_bytes,
            label=label,
            checkpointed=checkpointed,
            checkpoints=[
                pb.NewCheckpoint(position=new.position, bytes=new.nbytes) for new in checkpoints
            ],
            conversation_start=conversation_start,
        )
        with self._ending_on_loss():
            answer = self._call(self._stub.Reserve, request)
            return _checked(lambda: reply.reservation(answer, request))

    def commit(
        self,
        reservation_id: int,
        record_bytes: Sequence[int],
        checkpoint_bytes: Sequence[int] = (),
    ) -> int:
        """Publishes what was written, all at once; one entry for each piece and for each staged
        checkpoint. Returns the rows inserted."""
        request = pb.CommitRequest(
            reservation_id=reservation_id,
            record_bytes=record_bytes,
            checkpoint_bytes=checkpoint_bytes,
        )
        with self._ending_on_loss():
            return self._call(self._stub.Commit, request).rows_inserted

    def abort(self, reservation_id: int) -> None:
        """Drops a staged write. No thread of the caller may write to its pieces any more."""
        with self._ending_on_loss():
            self._call(self._stub.Abort, pb.AbortRequest(reservation_id=reservation_id))

    def stats(self) -> pb.StatsResponse:
        answer = self._call(self._stub.Stats, pb.StatsRequest())
        return _checked(lambda: reply.stats(answer))

    def namespaces(self) -> list[pb.NamespaceStats]:
        return list(self._call(self._stub.ListNamespaces, pb.ListNamespacesRequest()).namespaces)

    def entries(self, namespace: bytes = b"") -> Iterator[pb.Entry]:
        """Records and checkpoints of one namespace, or of all, in the order of their ids; a page
        for each call."""
        request = pb.ListEntriesRequest(namespace=namespace, limit=ENTRIES_PER_CALL_MAX)
        while True:
            page = self._call(self._stub.ListEntries, request).entries
            yield from page
            if len(page) < request.limit:
                return
            request.after_record_id = page[-1].span.record_id

    def prefixes(self, limit: int) -> list[pb.Entry]:
        """The records at which the prefixes end that lookups were served most tokens of, best
        first; `limit` is at most 256."""
        request = pb.ListPrefixesRequest(limit=limit)
        return list(self._call(self._stub.ListPrefixes, request).entries)

    def evict(self, *, namespace: bytes = b"", record_id: int = 0) -> pb.EvictResponse:
        """Drops a namespace, a record with all behind it, or everything; but not what is in use."""
        if namespace:
            request = pb.EvictRequest(namespace=namespace)
        elif record_id:
            request = pb.EvictRequest(record_id=record_id)
        else:
            request = pb.EvictRequest(everything=True)
        return self._call(self._stub.Evict, request)

    def pin(self, record_id: int) -> pb.PinResponse:
        return self._call(self._stub.Pin, pb.PinRequest(record_id=record_id))

    def pin_sequence(self, namespace: bytes, tokens: bytes) -> pb.PinResponse:
        """Keeps all of a sequence; raises StoreRefused (NOT_FOUND) when not all of it is held."""
        sequence = pb.Sequence(namespace=namespace, tokens=tokens)
        return self._call(self._stub.Pin, pb.PinRequest(sequence=sequence))

    def unpin(self, record_id: int) -> None:
        self._call(self._stub.Unpin, pb.UnpinRequest(record_id=record_id))

    def inspect(self, record_id: int) -> pb.InspectResponse:
        return self._call(self._stub.Inspect, pb.InspectRequest(record_id=record_id))

    def verify(self) -> Iterator[pb.VerifyResponse]:
        """Takes as long as it takes: the timeout does not hold."""
        try:
            yield from self._stub.Verify(pb.VerifyRequest(), metadata=self._metadata)
        except grpc.RpcError as error:
            raise _failure(error) from error

    def health(self) -> bool:
        """Whether the daemon says that it serves."""
        try:
            answer = self._call(self._health.Check, health_pb2.HealthCheckRequest())
        except (StoreUnavailable, StoreRefused):
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def record(self, held: Span | Checkpoint) -> memoryview:
        """The bytes of its record, read-only. Valid as data while its lease is."""
        return self._view(held.extent)[: held.record_bytes].toreadonly()

    def extent(self, staged: Piece | StagedCheckpoint) -> memoryview:
        """Where its record is to be written, all of the extent."""
        return self._view(staged.extent)

    @contextlib.contextmanager
    def _ending_on_loss(self) -> Iterator[None]:
        """After a lost answer the daemon may hold a reservation that nobody can name. It would
        lapse, but its extents stay set aside as long as the session lives: that must end."""
        try:
            yield
        except StoreUnavailable:
            self._in_doubt = True
            raise

    def _view(self, extent: Extent) -> memoryview:
        try:
            return self._slabs.view(extent)
        except SlabError as error:
            raise StoreUnavailable(str(error)) from error

    def _call(
        self,
        method: "grpc.UnaryUnaryMultiCallable[_Request, _Reply]",
        request: _Request,
        wait_seconds: float = 0.0,
        wanted: Callable[[], bool] = lambda: True,
    ) -> _Reply:
        """The daemon may take `wait_seconds` longer as long as it answers other calls meanwhile:
        one that hangs must not hold up its callers."""
        if self._closed:
            raise StoreUnavailable("the client is closed")
        timeout = self._timeout_seconds + wait_seconds
        try:
            if not wait_seconds:
                return method(request, timeout=timeout, metadata=self._metadata)
            call = method.future(request, timeout=timeout, metadata=self._metadata)
            try:
                return self._result(call, wanted)
            finally:
                call.cancel()
        except grpc.RpcError as error:
            raise _failure(error) from error
        except ValueError as error:
            # gRPC's way to say that another thread has closed the channel just now.
            raise StoreUnavailable(str(error)) from error

    def _result(self, call: "grpc.Future[_Reply]", wanted: Callable[[], bool]) -> _Reply:
        patience = self._timeout_seconds / 2
        while True:
            try:
                return call.result(patience)
            except grpc.FutureTimeoutError:
                if not wanted():
                    raise Unwanted from None
                self._stub.Renew(pb.RenewRequest(), timeout=patience, metadata=self._metadata)


def _failure(error: grpc.RpcError) -> StoreRefused | StoreUnavailable:
    assert isinstance(error, grpc.Call)
    if error.code() in _REFUSALS:
        return StoreRefused(error.code(), error.details() or "")
    return StoreUnavailable(f"{error.code().name}: {error.details()}")


def _checked(check: Callable[[], _Checked]) -> _Checked:
    try:
        return check()
    except reply.Contradiction as error:
        raise StoreUnavailable(f"the daemon answers nonsense: {error}") from error
