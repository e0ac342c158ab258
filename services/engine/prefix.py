"""The engine's side of the cachestore: lookups, copies and writes on helper threads.

Nothing here can fail a request: whatever goes wrong is a miss, or a write that is dropped and
counted. Helper threads run no MLX operation; what they find out is posted to the worker.

    asking threads   lookup, which may wait for rows that others compute; record headers
    copying threads  slab ─▶ buffers, renewal of the lease
    writer thread    reserve, buffers ─▶ slab, commit, release: in the order they were given
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from cachestore.client import StoreRefused, StoreUnavailable, Unwanted
from cachestore.record import RecordError
from engine import checkpoints, config, pack
from engine.attach import Block
from engine.found import Found, plan
from engine.kv.codec import CodecPolicy
from engine.kv.history import Rows, sliced
from engine.kv.kinds import Snapshot
from engine.kv.layout import CacheLayout
from engine.link import StoreLink
from engine.pack import PackedCheckpoint, PackedRows
from engine.pool import WaitingPool
from engine.request import Request
from engine.status import NOTHING, Pinned, PrefixStatus
from engine.storing import Destination, PathLost, Tail, packed_tokens

log = logging.getLogger(__name__)

# How long a lookup waits for writes of the same conversation that are still on their way.
OWN_WRITES_SECONDS = 0.25


class Receiver(Protocol):
    """Where results go: the Core, on the worker thread."""

    def looked_up(self, request_id: int, found: Found | None) -> None: ...
    def copied(self, request_id: int, valid: bool) -> None: ...
    def stored(self, request_id: int, tokens: int) -> None: ...


Post = Callable[[Callable[[Receiver], None]], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Write:
    """`nbytes`: of what is packed; `found`: under whose lease the rows are computed; `report`: the
    request that waits for the outcome."""

    tail: Tail
    nbytes: int
    found: Found | None
    report: int | None


class Prefix:
    """Made on the worker thread once the model's layout is known. Without `link` and `policy`,
    which go together, every lookup is unanswered and nothing is written."""

    def __init__(
        self,
        post: Post,
        link: StoreLink | None = None,
        policy: CodecPolicy | None = None,
        label: str = "",
        not_cached_reason: str = "",
        checkpoint_stride: int = config.CHECKPOINT_STRIDE_DEFAULT,
    ) -> None:
        self._post = post
        assert (link is None) == (policy is None)
        self._link = link
        self._policy = policy
        self._label = label
        self._not_cached_reason = not_cached_reason
        self._checkpoint_stride = checkpoint_stride
        self._namespace = b""
        # As many as may wait for rows that others compute.
        self._askers = WaitingPool(config.QUEUE_REQUESTS_MAX, "store-ask")
        self._copiers = ThreadPoolExecutor(2, thread_name_prefix="store-copy")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store-write")
        self._lock = threading.Lock()
        self._pending: dict[_Write, Future[None]] = {}
        self._committed = 0
        self._dropped = 0
        self._attached = self._stored = NOTHING

    def identify(self, namespace: bytes) -> None:
        """Begin to use the store: the content of the weights is known now. Any thread."""
        self._namespace = namespace

    @property
    def status(self) -> PrefixStatus:
        return PrefixStatus(
            codec=self._policy.codec.name if self._policy is not None else "",
            not_cached_reason=self._not_cached_reason,
            namespace=self._namespace,
            connected=self._link is not None and self._link.connected,
            writes_committed=self._committed,
            writes_dropped=self._dropped,
            attached=self._attached,
            stored=self._stored,
        )

    @property
    def writes(self) -> bool:
        """Whether rows given to `write` now have a chance to be stored."""
        return self._usable and self._backlog_bytes < config.WRITE_BACKLOG_BYTES_MAX

    def has_room(self, kept_bytes: int) -> bool:
        """Whether more checkpoints may be kept for later beside so many bytes of them."""
        return self._backlog_bytes + kept_bytes < config.WRITE_BACKLOG_BYTES_MAX

    @property
    def _backlog_bytes(self) -> int:
        with self._lock:
            return sum(write.nbytes for write in self._pending)

    @property
    def _usable(self) -> bool:
        return self._link is not None and self._link.connected and bool(self._namespace)

    @property
    def layout(self) -> CacheLayout:
        """What of live caches is stored."""
        assert self._policy is not None
        return self._policy.codec.layout

    @property
    def checkpointed(self) -> bool:
        """Whether rows are of no use without a checkpoint."""
        return self._policy is not None and self.layout.checkpointed

    def planned(self, request: Request) -> tuple[int, ...]:
        """Where the request takes checkpoints, unless it is cached beyond."""
        if not self.checkpointed:
            return ()
        return checkpoints.planned(
            len(request.tokens),
            request.boundaries.partings,
            self._checkpoint_stride,
            whole=request.warm,
        )

    # --- reading ---------------------------------------------------------------------------

    def look_up(
        self,
        request_id: int,
        tokens: tuple[int, ...],
        planned: tuple[int, ...],
        wanted: Callable[[], bool],
    ) -> None:
        """Find the longest usable prefix; posts `looked_up`, unless it is not `wanted` any more.

        While somebody, in this engine or another one, computes more of the same tokens, this
        waits for those rows; where rows need checkpoints, for the `planned` ones of the other,
        and for the one that it takes where others part from it.
        """
        if not self._usable:
            self._post(lambda core: core.looked_up(request_id, None))
            return
        try:
            self._askers.submit(lambda: self._look_up(request_id, tokens, planned, wanted))
        except RuntimeError as error:
            log.warning("lookup failed: %s", error)
            self._post(lambda core: core.looked_up(request_id, None))

    def _look_up(
        self,
        request_id: int,
        tokens: tuple[int, ...],
        planned: tuple[int, ...],
        wanted: Callable[[], bool],
    ) -> None:
        found = None
        try:
            if not wanted():
                return
            found = self._find(tokens, planned, wanted)
        except Unwanted:
            return
        except (StoreUnavailable, StoreRefused, RecordError) as error:
            log.debug("lookup failed: %s", error)
        except Exception:
            log.exception("lookup failed")
        self._post(lambda core: core.looked_up(request_id, found))

    def _find(
        self, tokens: tuple[int, ...], planned: tuple[int, ...], wanted: Callable[[], bool]
    ) -> Found:
        assert self._link is not None
        assert self._policy is not None
        self._await_own_writes(tokens)
        packed = packed_tokens(tokens)
        with self._link.borrow() as client:
            lease = client.lookup(
                self._namespace,
                packed,
                # At least one token is computed: its logits are what the reply begins with.
                len(tokens) - 1,
                announce=True,
                wait_seconds=config.LOOKUP_WAIT_SECONDS,
                checkpointed=self.checkpointed,
                checkpoints=planned,
                parting_distance=checkpoints.PARTING_DISTANCE if self.checkpointed else 0,
                wanted=wanted,
            )
            self._link.hold(client, lease.id)
            try:
                return Found(
                    client, lease, plan(self._policy, client, self._namespace, lease, packed)
                )
            except Exception:
                self._link.drop(lease.id)
                raise

    def _await_own_writes(self, tokens: tuple[int, ...]) -> None:
        """A client that goes on from a reply at once must find its rows."""
        with self._lock:
            pending = list(self._pending.items())
        wait(
            [
                done
                for write, done in pending
                if tokens[: len(write.tail.tokens)] == write.tail.tokens
            ],
            OWN_WRITES_SECONDS,
        )

    def copy(self, request_id: int, found: Found, block: Block, last: bool) -> None:
        """Fill an allocated block; posts `copied`. With the last one the lease is renewed, which
        tells whether the rows were there all the while."""
        # One thread does not reach the rate of the memory. The one that is waited for is given
        # first, so it has begun, whatever else the threads do.
        share = self._copiers.submit(block.copy)
        self._copiers.submit(self._copy, request_id, found, block, last, share)

    def _copy(
        self, request_id: int, found: Found, block: Block, last: bool, share: Future[int]
    ) -> None:
        valid = False
        began = time.monotonic()
        try:
            copied = block.copy() + share.result()
            with self._lock:
                self._attached = self._attached.plus(copied, time.monotonic() - began)
            valid = not last or found.client.renew([found.lease.id]) == [True]
        except (StoreUnavailable, StoreRefused) as error:
            log.debug("renewal failed: %s", error)
        except CancelledError:
            log.debug("rows are not copied any more: the engine stops")
        except Exception:
            log.exception("copying rows failed")
        self._post(lambda core: core.copied(request_id, valid))

    def release(self, found: Found) -> None:
        """End the lease, after the writes that were given before."""
        assert self._link is not None
        # Not once it is closing: then the leases end with the session.
        with contextlib.suppress(RuntimeError):
            self._writer.submit(self._link.drop, found.lease.id)

    def give_up(self, found: Found | None) -> None:
        """A write will not come, or be shorter than was announced: count it, and end the lease
        after the writes that were given before, for others may wait for these rows. Once more
        for the same lease is harmless."""
        if self._link is None:
            return
        self._count_write(False)
        if found is not None:
            self.release(found)

    # --- writing ---------------------------------------------------------------------------

    def is_settled(self, path_tokens: int) -> bool:
        """Whether all longer paths are stored in the same codecs as one of this length."""
        assert self._policy is not None
        return self._policy.is_settled(path_tokens)

    def pack(self, path_tokens: int, rows: Sequence[Rows], span: range) -> list[PackedRows]:
        """Encode rows `span` of a path of this length, on the worker thread; one for each
        codec that they are stored with, in order.

        They are encoded before this returns, and no reference to `rows` is kept.
        """
        assert self._policy is not None
        packed = []
        for codec, run in self._policy.runs(path_tokens, span):
            cut = slice(run.start - span.start, run.stop - span.start)
            packed.append(pack.pack(codec, [sliced(layer, cut) for layer in rows], run))
        return packed

    def pack_checkpoint(self, snapshot: Snapshot, position: int) -> PackedCheckpoint:
        """As `pack`, of what layers without rows hold at this position."""
        assert self._policy is not None
        return pack.pack_checkpoint(self._policy, snapshot, position)

    def write(self, tail: Tail, found: Found | None, report: int | None) -> None:
        """Store the end of a sequence. With `report`, posts `stored` for that request."""
        write = _Write(tail, tail.nbytes, found, report)
        with self._lock:
            self._pending[write] = self._writer.submit(self._write, write)

    def _write(self, write: _Write) -> None:
        stored = False
        began = time.monotonic()
        try:
            nbytes = self._store(write.tail)
            self._stored = self._stored.plus(nbytes, time.monotonic() - began)
            stored = True
        except (StoreUnavailable, StoreRefused, PathLost) as error:
            log.info("rows not stored: %s", error)
        except Exception:
            log.exception("rows not stored")
        with self._lock:
            self._pending.pop(write, None)
        if stored:
            self._count_write(True)
        else:
            self.give_up(write.found)
        if write.report is not None:
            request_id = write.report
            held = len(write.tail.tokens) if stored else write.tail.rows[0].first_token
            self._post(lambda core: core.stored(request_id, held))

    def _store(self, tail: Tail) -> int:
        assert self._link is not None
        with self._link.borrow() as client:
            where = Destination(client, self._namespace, self._label, self.checkpointed)
            return where.store(tail)

    def _count_write(self, stored: bool) -> None:
        with self._lock:
            self._committed += stored
            self._dropped += not stored

    def pin(self, tokens: tuple[int, ...]) -> Pinned:
        """Keep all of a prompt in the store, until a person unpins it or the store ends. Blocks.

        Raises StoreUnavailable, and StoreRefused when not all of it is held (NOT_FOUND) or too
        much is pinned (RESOURCE_EXHAUSTED).
        """
        assert self._link is not None
        with self._link.borrow() as client:
            answer = client.pin_sequence(self._namespace, packed_tokens(tokens))
        return Pinned(answer.record_id, answer.bytes)

    def drain(self) -> None:
        """Wait until the writes and releases given before are done."""
        self._writer.submit(lambda: None).result()

    def close(self, seconds: float | None = None) -> None:
        """Finish what was given to be stored, then end the session, and with it every wait.

        Writes that have not begun after `seconds` are dropped and counted; None: as long as it
        takes.
        """
        self._copiers.shutdown(cancel_futures=True)
        with self._lock:
            given = list(self._pending.values())
        wait(given, seconds)
        self._writer.shutdown(cancel_futures=True)
        with self._lock:
            dropped = len(self._pending)
            self._pending.clear()
            self._dropped += dropped
        if dropped:
            log.warning("%d writes dropped: there is no time left for them", dropped)
        if self._link is not None:
            self._link.close()
        self._askers.shutdown()
