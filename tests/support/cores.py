"""A Core that a test drives by hand: every turn, every answer of the store, one thread."""

import itertools
import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step

from cachestore.client import Lease, MatchKind
from engine.batch import BatchMode, BatchShape
from engine.checkpoints import planned
from engine.config import PrefillStep
from engine.core import Core
from engine.found import Found
from engine.kv.history import Rows
from engine.kv.kinds import Snapshot
from engine.kv.layout import CacheLayout, probe
from engine.kv.live import LiveCaches
from engine.prefix import Prefix
from engine.request import Delta, Done, Event, Failed, Request, Sampling
from engine.scheduler import Scheduler
from engine.tokenizer import Detokenizer
from tests.support.engines import Reply, nobody_leaves

STEP = PrefillStep(idle=16, busy=8)
LONG = [(5 * n + n * n) % 256 for n in range(70)]  # several chunks
SHORT = [9, 8, 7]


@dataclass
class Clock:
    """Seconds that pass only when a test says so."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


class Letters:
    """A tokenizer whose tokens are one character each."""

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return "".join(chr(256 + token) for token in tokens)


@dataclass
class FakeBlock:
    """Counts what is done to it; `broken` names the step that raises."""

    broken: str = ""
    done: list[str] = field(default_factory=list)

    def allocate(self) -> None:
        self._do("allocate")

    def decode(self) -> None:
        self._do("decode")

    def _do(self, step: str) -> None:
        self.done.append(step)
        if step == self.broken:
            raise MemoryError(step)


@dataclass
class FakeAttachment:
    """Gives caches that really hold the rows, computed by the model itself."""

    blocks: list[FakeBlock]
    make_caches: Callable[[], list[Any]]

    def caches(self) -> list[Any]:
        return self.make_caches()


@dataclass
class PackedPiece:
    # Of paths of this many tokens or more the store holds rows in another codec.
    encoded: bool
    first_token: int
    keys: Any

    @property
    def end(self) -> int:
        return self.first_token + int(self.keys.shape[1])


@dataclass
class PackedState:
    position: int
    # As kinds.snapshot gives it, copied.
    state: Any
    nbytes: int = 1000


@dataclass
class Write:
    tokens: tuple[int, ...]
    first: int
    # Keys of layer 0, (heads, rows, width), of the rows [first, len(tokens)).
    keys: Any
    report: int | None
    encoded: bool
    checkpoints: tuple[PackedState, ...]
    conversation_start: int


# Shorter paths are stored without loss.
ENCODED_TOKENS_MIN = 74


@dataclass
class FakePrefix:
    """What Core calls is recorded; its answers are given by the test."""

    layout: CacheLayout
    stride: int = 32
    writes: bool = True
    room_bytes: float = math.inf
    lookups: list[int] = field(default_factory=list)
    copies: list[tuple[int, Any, bool]] = field(default_factory=list)
    released: list[Found] = field(default_factory=list)
    written: list[Write] = field(default_factory=list)
    given_up: int = 0
    # Calls of `pack` that fail, counted from 0.
    fails: Container[int] = ()
    packs: int = 0
    snapshots: int = 0

    @property
    def checkpointed(self) -> bool:
        return self.layout.checkpointed

    def planned(self, request: Request) -> tuple[int, ...]:
        if not self.checkpointed:
            return ()
        partings = request.boundaries.partings
        return planned(len(request.tokens), partings, self.stride, whole=request.warm)

    def has_room(self, kept_bytes: int) -> bool:
        return kept_bytes < self.room_bytes

    def look_up(
        self,
        request_id: int,
        tokens: tuple[int, ...],
        planned: Sequence[int],
        wanted: Callable[[], bool],
    ) -> None:
        self.lookups.append(request_id)

    def copy(self, request_id: int, found: Found, block: Any, last: bool) -> None:
        self.copies.append((request_id, block, last))

    def give_up(self, found: Found | None) -> None:
        self.given_up += 1

    def release(self, found: Found) -> None:
        assert all(found is not other for other in self.released), "released twice"
        self.released.append(found)

    def is_settled(self, path_tokens: int) -> bool:
        return path_tokens >= ENCODED_TOKENS_MIN

    def pack(self, path_tokens: int, rows: Sequence[Rows], span: range) -> Any:
        self._count_pack()
        encoded = path_tokens >= ENCODED_TOKENS_MIN
        held = next(layer for layer in rows if layer)
        assert held[0][0].shape[2] == len(span)
        return [PackedPiece(encoded, span.start, np.array(held[0][0][0]))]

    def pack_checkpoint(self, snapshot: Snapshot, position: int) -> Any:
        self.snapshots += 1
        self._count_pack()
        copied = [
            [[np.array(array) for array in part] for part in leaf] for leaf in snapshot.leaves
        ]
        return PackedState(position, copied)

    def _count_pack(self) -> None:
        self.packs += 1
        if self.packs - 1 in self.fails:
            raise RuntimeError("cannot be encoded")

    def write(self, tail: Any, found: Found | None, report: int | None) -> None:
        position = tail.rows[0].first_token
        for piece in tail.rows:
            assert piece.first_token == position, "pieces follow each other"
            position = piece.end
        assert position >= len(tail.tokens)
        (encoded,) = {piece.encoded for piece in tail.rows}  # all of one codec
        keys = np.concatenate([piece.keys for piece in tail.rows], axis=1)
        first = tail.rows[0].first_token
        write = Write(
            tail.tokens,
            first,
            keys[:, : len(tail.tokens) - first],
            report,
            encoded,
            tail.checkpoints,
            tail.conversation_start,
        )
        self.written.append(write)


class Driven:
    """A core and what its requests were sent."""

    def __init__(self, model: Any, rows_max: int = 4, mode: BatchMode = BatchMode.BATCHED) -> None:
        self.model = model
        self.clock = Clock()
        self.prefix = FakePrefix(probe(LiveCaches(model)))
        self.events: dict[int, list[Event]] = {}
        self.made: list[Found] = []
        self.lease_ids = itertools.count(1)
        self.core = Core(
            caches=LiveCaches(model),
            shape=BatchShape(mode, rows_max, STEP),
            scheduler=Scheduler(rows_max, mode is BatchMode.BATCHED, STEP.idle),
            prefix=cast(Prefix, self.prefix),
            new_detokenizer=lambda: Detokenizer(Letters()),
            clock=self.clock,
        )

    def submit(
        self,
        request_id: int,
        tokens: Sequence[int],
        max_tokens: int = 3,
        sampling: Sampling | None = None,
        **fields: Any,
    ) -> None:
        request = Request(tuple(tokens), max_tokens, sampling or Sampling(), **fields)
        sent: list[Event] = []
        self.events[request_id] = sent
        self.core.submit(request_id, request, sent.append)

    def start(self, request_id: int, tokens: Sequence[int], *args: Any, **fields: Any) -> None:
        """Submit, and answer that nothing is stored."""
        self.submit(request_id, tokens, *args, **fields)
        self.core.looked_up(request_id, self.miss())

    def start_behind(
        self, request_id: int, tokens: Sequence[int], rows: int, *args: Any, **fields: Any
    ) -> None:
        """Submit, answer that the first rows are stored, and attach them."""
        self.submit(request_id, tokens, *args, **fields)
        self.core.looked_up(request_id, self.found(tokens, rows))
        self.core.turn()
        self.copied()

    def miss(self, parting: int = 0) -> Found:
        lease = Lease(next(self.lease_ids), MatchKind.MISS, 0, (), 30.0, parting=parting)
        self.made.append(Found(cast(Any, None), lease, None))
        return self.made[-1]

    def found(
        self,
        tokens: Sequence[int],
        rows: int,
        blocks: int = 1,
        broken: str = "",
        parting: int = 0,
    ) -> Found:
        """A match of the first rows, in so many blocks, of which the last may be broken."""

        def caches() -> list[Any]:
            made = LiveCaches(self.model).fresh()
            mx.eval(self.model(mx.array([list(tokens[:rows])]), cache=made))
            return made

        parts = [FakeBlock() for _ in range(blocks - 1)] + [FakeBlock(broken)]
        lease = Lease(next(self.lease_ids), MatchKind.PREFIX, rows, (), 30.0, parting=parting)
        found = Found(cast(Any, None), lease, cast(Any, FakeAttachment(parts, caches)))
        self.made.append(found)
        return found

    def copied(self, valid: bool = True) -> None:
        """Answer the oldest copy that was asked for."""
        request_id, _, _ = self.prefix.copies.pop(0)
        self.core.copied(request_id, valid)

    def deltas(self, request_id: int) -> list[int]:
        return [
            token
            for event in self.events[request_id]
            if isinstance(event, Delta)
            for token in event.token_ids
        ]

    def last(self, request_id: int) -> Done | Failed | None:
        """The final event, which comes once and last; None while there is none."""
        events = self.events[request_id]
        finals = [event for event in events if isinstance(event, Done | Failed)]
        assert len(finals) <= 1, finals
        assert not finals or events[-1] is finals[0]
        return finals[0] if finals else None

    def done(self, request_id: int) -> Done:
        last = self.last(request_id)
        assert isinstance(last, Done), last
        return last

    def failed(self, request_id: int) -> Failed:
        last = self.last(request_id)
        assert isinstance(last, Failed), last
        return last

    def turn_until_idle(self, turns: int = 500) -> None:
        for _ in range(turns):
            if not self.core.turn():
                return
        raise AssertionError(f"still busy after {turns} turns")

    def check_empty(self) -> None:
        """Nothing of any request is left anywhere, once those that are over are packed."""
        self.core.turn()
        while not nobody_leaves(self.core):
            self.core.turn()
        assert len(self.core) == 0
        assert len(self.core.scheduler) == 0
        assert len(self.core._batch) == 0
        assert not self.core._by_uid
        occupancy = self.core.occupancy()
        assert (occupancy.queued, occupancy.prefilling, occupancy.decoding) == (0, 0, 0)
        released = sorted(found.lease.id for found in self.prefix.released)
        assert released == sorted(found.lease.id for found in self.made)


def alone(model: Any, tokens: Sequence[int], max_tokens: int = 3, **options: Any) -> Reply:
    """mlx-lm's own generation, greedy without `options`, on the calling thread."""
    reply = Reply()
    for token, logprobs in generate_step(
        mx.array(list(tokens)),
        model,
        max_tokens=max_tokens,
        prefill_step_size=STEP.idle,
        **options,
    ):
        reply.tokens.append(int(token))
        reply.logprobs.append(np.array(logprobs.astype(mx.float32)))
    return reply
