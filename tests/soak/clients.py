"""The clients of the soak: each does one operation after the other and checks every token."""

import contextlib
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc

from cachestore.client import Client, StoreRefused, StoreUnavailable
from engine.remote import connect
from engine.v1 import engine_pb2 as pb
from tests.soak import operations
from tests.soak.operations import Kind, Operation, Restart
from tests.soak.places import Place
from tests.support.daemons import Cachestore
from tests.support.engines import EngineDaemon, ids
from tests.support.fingerprints import Fingerprints

# Longer than anything takes; what runs into it hangs.
TIMEOUT_SECONDS = 100.0
PINNED_MAX = 3

RIGHT = "right"
# Ended early, as the client wanted it.
CUT = "cut short"
# Failed while its daemon was ended.
EXCUSED = "daemon ended"
# gRPC cancels a call that it has taken from the socket, and not given to the engine, when the
# server stops.
ENDED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
# The store said no, as it may: what was asked for had been evicted.
REFUSED = "refused"


@dataclass
class World:
    """What all clients share."""

    seed: int
    fingerprints: Fingerprints
    store: Place[Cachestore]
    engines: tuple[Place[EngineDaemon], Place[EngineDaemon]]
    restarts: dict[int, Restart]
    # Records that somebody has pinned, with the life of the store.
    pinned: deque[tuple[int, int]] = field(default_factory=deque)

    def place(self, name: str) -> "Place[Cachestore] | Place[EngineDaemon]":
        return next(place for place in (self.store, *self.engines) if place.name == name)


@dataclass
class Stream:
    """One reply as it came. It is compared whatever ended it."""

    expected: list[int]
    tokens: list[int] = field(default_factory=list)
    done: pb.Done | None = None

    def take(self, message: pb.GenerateResponse) -> None:
        self.tokens += message.delta.token_ids
        if message.HasField("done"):
            self.done = message.done

    def check(self, prompt: list[int]) -> None:
        right = self.expected[: len(self.tokens)]
        assert self.tokens == right, f"WRONG ROWS: {self.tokens} instead of {right}"
        if self.done is None:
            return
        assert len(self.tokens) == len(self.expected)
        usage = self.done.usage
        assert usage.prompt_tokens == len(prompt)
        assert usage.completion_tokens == len(self.tokens)
        assert usage.cached_tokens < len(prompt)


class SoakClient:
    def __init__(self, world: World) -> None:
        self._world = world
        self._conversations: deque[list[int]] = deque(maxlen=4)
        self.outcomes: Counter[tuple[Kind, str]] = Counter()
        self.tokens_checked = 0
        self._calls: dict[Kind, Callable[[Operation], str]] = {
            Kind.GENERATE: self._generate,
            Kind.CONTINUE: self._generate,
            Kind.WARM: self._warm,
            Kind.CANCEL: self._leave_early,
            Kind.DEADLINE: self._generate,
            Kind.DISCONNECT: self._leave_early,
            Kind.CROWD: self._crowd,
            Kind.RESTART: self._restart,
            Kind.STATS: self._on_store(check_stats),
            Kind.EVICT: self._on_store(self._evict),
            Kind.FLUSH: self._on_store(self._flush),
            Kind.PIN: self._on_store(self._pin),
            Kind.UNPIN: self._on_store(self._unpin),
            Kind.VERIFY: self._on_store(check_records),
        }

    def perform(self, operation: Operation) -> None:
        outcome = self._calls[operation.kind](operation)
        self.outcomes[operation.kind, outcome] += 1

    # --- engines ---------------------------------------------------------------------------

    def _engine(self, draw: random.Random) -> Place[EngineDaemon]:
        chosen, other = draw.sample(self._world.engines, 2)
        engine = chosen if chosen.serving else other
        engine.wait()
        return engine

    def _prompt(self, operation: Operation) -> list[int]:
        if operation.kind is Kind.CONTINUE and self._conversations:
            history = operation.draw.choice(self._conversations)
            if len(history) < operations.CONVERSATION_TOKENS_MAX:
                return operations.next_turn(history, operation.draw)
        return operations.prompt(self._world.seed, operation.draw)

    def _generate(self, operation: Operation) -> str:
        draw = operation.draw
        hurried = operation.kind is Kind.DEADLINE
        timeout = draw.uniform(0.001, 0.3) if hurried else TIMEOUT_SECONDS
        engine, prompt = self._engine(draw), self._prompt(operation)
        stream = self._expect(prompt, operations.reply_tokens(draw))
        wanted = grpc.StatusCode.DEADLINE_EXCEEDED if hurried else None
        with self._explained(engine, wanted) as how, connect(engine.daemon.listen) as stub:
            for message in stub.Generate(_request(prompt, stream), timeout=timeout):
                stream.take(message)
        self._check(prompt, stream)
        if stream.done is not None:
            self._conversations.append(prompt + stream.tokens)
        return how.outcome

    def _leave_early(self, operation: Operation) -> str:
        """After some tokens, perhaps none: cancel the call, or close the connection under it."""
        draw = operation.draw
        engine, prompt = self._engine(draw), self._prompt(operation)
        stream = self._expect(prompt, 40)
        leave_after = draw.choice((0, 0, 1, 1, 2, 5, 20))
        with self._explained(engine, grpc.StatusCode.CANCELLED) as how:
            with connect(engine.daemon.listen) as stub:
                call = stub.Generate(_request(prompt, stream), timeout=TIMEOUT_SECONDS)
                while len(stream.tokens) < leave_after:
                    stream.take(next(call))
                if operation.kind is Kind.CANCEL:
                    call.cancel()
                    for message in call:
                        stream.take(message)
            how.outcome = CUT
        self._check(prompt, stream)
        return how.outcome

    def _crowd(self, operation: Operation) -> str:
        """The same request several times at once, at both engines."""
        draw = operation.draw
        prompt = self._prompt(operation)
        streams = [self._expect(prompt, operations.reply_tokens(draw)) for _ in range(4)]
        outcome = RIGHT
        with contextlib.ExitStack() as stack:
            calls = []
            for stream, engine in zip(streams, self._world.engines * 2, strict=True):
                engine.wait()
                life = engine.life
                stub = stack.enter_context(connect(engine.daemon.listen))
                request = _request(prompt, stream)
                calls.append((stub.Generate(request, timeout=TIMEOUT_SECONDS), engine, life))
            for (call, engine, life), stream in zip(calls, streams, strict=True):
                with self._explained(engine, None, life) as how:
                    for message in call:
                        stream.take(message)
                self._check(prompt, stream)
                outcome = how.outcome if how.outcome != RIGHT else outcome
        return outcome

    def _warm(self, operation: Operation) -> str:
        engine, prompt = self._engine(operation.draw), self._prompt(operation)
        with self._explained(engine, None) as how, connect(engine.daemon.listen) as stub:
            reply = stub.Warm(pb.WarmRequest(prompt=ids(prompt)), timeout=TIMEOUT_SECONDS)
            assert reply.usage.prompt_tokens == len(prompt)
            assert reply.stored_tokens <= len(prompt)
        return how.outcome

    def _expect(self, prompt: list[int], count: int) -> Stream:
        return Stream(self._world.fingerprints.reply(prompt, count))

    def _check(self, prompt: list[int], stream: Stream) -> None:
        stream.check(prompt)
        self.tokens_checked += len(stream.tokens)

    @contextlib.contextmanager
    def _explained(
        self,
        engine: Place[EngineDaemon],
        wanted: grpc.StatusCode | None,
        life: int | None = None,
    ) -> Iterator["Explanation"]:
        """Lets pass a status that was wanted, or that the end of the engine explains."""
        life = engine.life if life is None else life
        how = Explanation()
        try:
            yield how
        except grpc.RpcError as error:
            if error.code() is wanted:
                how.outcome = CUT
            elif error.code() in ENDED and engine.excuses(life):
                how.outcome = EXCUSED
            else:
                raise AssertionError(f"{engine.name}: {error.code()} {error.details()}") from error

    # --- deaths ----------------------------------------------------------------------------

    def _restart(self, operation: Operation) -> str:
        restart = self._world.restarts[operation.index]
        self._world.place(restart.place).restart(restart.number)
        return RIGHT

    # --- store -----------------------------------------------------------------------------

    def _on_store(
        self, call: Callable[[Client, random.Random], None]
    ) -> Callable[[Operation], str]:
        def perform(operation: Operation) -> str:
            store = self._world.store
            store.wait()
            life = store.life
            try:
                with store.daemon.client(role="admin", timeout_seconds=30) as client:
                    call(client, operation.draw)
            except StoreUnavailable:
                if not store.excuses(life):
                    raise
                return EXCUSED
            except StoreRefused:
                return REFUSED
            return RIGHT

        return perform

    def _evict(self, client: Client, draw: random.Random) -> None:
        records = [entry.span.record_id for entry in client.entries()]
        if records:
            client.evict(record_id=draw.choice(records))

    def _flush(self, client: Client, _: random.Random) -> None:
        client.evict()

    def _pin(self, client: Client, draw: random.Random) -> None:
        if len(self._world.pinned) >= PINNED_MAX:
            self._unpin(client, draw)
        life = self._world.store.life
        records = [entry.span.record_id for entry in client.entries() if not entry.pinned]
        if records:
            record_id = draw.choice(records)
            client.pin(record_id)
            self._world.pinned.append((life, record_id))

    def _unpin(self, client: Client, _: random.Random) -> None:
        with contextlib.suppress(IndexError):
            life, record_id = self._world.pinned.popleft()
            if life == self._world.store.life:
                client.unpin(record_id)


@dataclass
class Explanation:
    outcome: str = RIGHT


def check_stats(client: Client, _: random.Random | None = None) -> None:
    """What holds at any moment."""
    stats = client.stats()
    parts = (
        *(stats.bytes_used, stats.bytes_reserved, stats.bytes_quarantined),
        *(stats.bytes_retiring, stats.bytes_free),
    )
    assert sum(parts) == stats.bytes_slabs <= stats.bytes_budget
    assert (stats.check_failures, stats.slab_failures) == (0, 0)


def check_records(client: Client, _: random.Random | None = None) -> None:
    problems = [problem for message in client.verify() for problem in message.problems]
    assert not problems, problems


def _request(prompt: list[int], stream: Stream) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt=ids(prompt), max_tokens=len(stream.expected), ignore_eos=True)
