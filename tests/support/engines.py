"""Engines for tests: in this process with everything observable, and as real daemons."""

import contextlib
import itertools
import queue
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import mlx.core as mx
import numpy as np
import numpy.typing as npt
from grpc_health.v1 import health_pb2, health_pb2_grpc
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from engine.assembly import Engine
from engine.batch import Token
from engine.config import EngineConfig, Listen
from engine.core import Core
from engine.remote import EngineProcess, connect
from engine.request import Delta, Done, Event, Failed, Request, Sampling
from engine.rows import State
from engine.v1 import engine_pb2 as pb
from tests.support.daemons import own_places
from tests.support.waiting import until

Logprobs = npt.NDArray[np.float32]


@dataclass
class Reply:
    """A finished request: tokens, their log-probabilities (vocabulary,), and the last event."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    text: str = ""
    last: Done | Failed | None = None

    @property
    def done(self) -> Done:
        assert isinstance(self.last, Done), self.last
        return self.last


def nobody_leaves(core: Core) -> bool:
    """Whether all that rows which are over have to store is packed."""
    return all(row.state is not State.LEAVING for row in core._rows.values())


class InProcess:
    """An engine without its gRPC server: requests in, replies with log-probabilities out."""

    def __init__(self, settings: EngineConfig) -> None:
        self._ids = itertools.count(1)
        self._replies: dict[int, Reply] = {}
        self._events: dict[int, queue.SimpleQueue[Event]] = {}
        self.engine = Engine(settings, self._observe)
        self.engine.start()
        if self.engine.link is not None and not self.prefix.status.not_cached_reason:
            until(lambda: bool(self.prefix.status.namespace), "the weights' digest")

    @property
    def prefix(self) -> Any:
        assert self.engine.prefix is not None
        return self.engine.prefix

    def _observe(self, request_id: int, token: Token) -> None:
        logprobs = np.array(token.logprobs.astype(mx.float32))
        reply = self._replies[request_id]
        reply.tokens.append(token.token)
        reply.logprobs.append(logprobs)

    def submit(
        self,
        tokens: Sequence[int],
        max_tokens: int = 4,
        sampling: Sampling | None = None,
        **fields: Any,
    ) -> int:
        """Start a request that never stops early; its id."""
        request_id = next(self._ids)
        self._replies[request_id] = Reply()
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._events[request_id] = events
        request = Request(tuple(tokens), max_tokens, sampling or Sampling(), **fields)
        self.engine.worker.submit(request_id, request, events.put)
        return request_id

    def next_event(self, request_id: int) -> Event:
        return self._events[request_id].get(timeout=60)

    def finish(self, request_id: int) -> Reply:
        """Wait for the end of a request."""
        reply = self._replies[request_id]
        while reply.last is None:
            event = self.next_event(request_id)
            if isinstance(event, Delta):
                reply.text += event.text
            else:
                reply.last = event
        return reply

    def ask(self, tokens: Sequence[int], max_tokens: int = 4, **fields: Any) -> Reply:
        return self.finish(self.submit(tokens, max_tokens, **fields))

    def settle(self) -> None:
        """Wait until everything that rows which are over have to store is stored or dropped."""
        until(lambda: self.on_worker(nobody_leaves), "rows that are over to leave")
        self.prefix.drain()

    def on_worker(self, call: Any) -> Any:
        """Run call(core) on the MLX thread; its result."""
        result: Future[Any] = Future()

        def run(core: Core) -> None:
            try:
                result.set_result(call(core))
            except BaseException as error:
                result.set_exception(error)

        self.engine.worker.post(run)
        return result.result(timeout=120)

    def alone(
        self,
        tokens: Sequence[int],
        max_tokens: int = 4,
        cache: Any = None,
        step: int | None = None,
    ) -> Reply:
        """mlx-lm's own single-request generation, greedy, on the same weights.

        `cache`: called on the MLX thread for a prompt cache that holds all but `tokens`.
        """

        def run(core: Core) -> Reply:
            reply = Reply()
            caches = (
                cache(core.caches.model)
                if cache is not None
                else make_prompt_cache(core.caches.model)
            )
            generated = generate_step(
                mx.array(list(tokens)),
                core.caches.model,
                max_tokens=max_tokens,
                prompt_cache=caches,
                prefill_step_size=step or core.shape.step.idle,
            )
            for token, logprobs in generated:
                reply.tokens.append(int(token))
                reply.logprobs.append(np.array(logprobs.astype(mx.float32)))
            return reply

        reply = self.on_worker(run)
        assert isinstance(reply, Reply)
        return reply

    def close(self) -> None:
        self.engine.stop()


@contextlib.contextmanager
def in_process(model: Path | str, cachestore: Path | None, **settings: Any) -> Iterator[InProcess]:
    """An in-process engine on a model folder, with the daemon at `cachestore` or without."""
    where = "off" if cachestore is None else f"unix:{cachestore}"
    config = EngineConfig(str(model), Listen(None, "127.0.0.1:0"), where, **settings)
    engine = InProcess(config)
    try:
        yield engine
    finally:
        engine.close()


def assert_same(reply: Reply, expected: Reply, tolerance: float) -> None:
    """Law 1: log-probabilities within `tolerance`, tokens equal unless the two best are a tie.

    After a tie that went the other way the two are fed different tokens, and nothing more can be
    compared.
    """
    assert len(reply.tokens) >= len(expected.tokens)
    for step, (token, logprobs) in enumerate(zip(expected.tokens, expected.logprobs, strict=True)):
        distance = float(np.abs(reply.logprobs[step] - logprobs).max())
        assert distance <= tolerance, f"step {step}: {distance:.2e} apart"
        best = np.sort(logprobs)[-2:]
        if best[1] - best[0] < 1e-3:
            return
        assert reply.tokens[step] == token, f"step {step}"


class EngineDaemon(EngineProcess):
    """A real `engine serve` for tests, with the calls that they need."""

    def serving(self) -> bool:
        """What its health says."""
        return is_serving(self.listen)

    def generate(self, **fields: Any) -> tuple[list[int], str, pb.Done]:
        """Token ids, text and the last message of one reply."""
        ids: list[int] = []
        text = ""
        done = None
        with connect(self.listen) as stub:
            for message in stub.Generate(pb.GenerateRequest(**fields), timeout=120):
                if message.HasField("done"):
                    done = message.done
                else:
                    ids += message.delta.token_ids
                    text += message.delta.text
        assert done is not None
        return ids, text, done


def is_serving(listen: Listen) -> bool:
    """Whether health says so at this address, of the server and of its service."""
    answers = set()
    with grpc.insecure_channel(listen.target) as channel:
        for name in ("", "engine.v1.Engine"):
            request = health_pb2.HealthCheckRequest(service=name)
            answers.add(health_pb2_grpc.HealthStub(channel).Check(request, timeout=10).status)
    return answers == {health_pb2.HealthCheckResponse.SERVING}


def ids(tokens: Sequence[int]) -> pb.Prompt:
    return pb.Prompt(token_ids=pb.TokenIds(ids=tokens))


def chat(*messages: tuple[str, str]) -> pb.Prompt:
    return pb.Prompt(
        chat=pb.Chat(messages=[pb.ChatMessage(role=role, content=text) for role, text in messages])
    )


@contextlib.contextmanager
def start_engine(
    directory: Path,
    model: Path | str | None,
    *flags: str,
    name: str = "engine",
    program: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[EngineDaemon]:
    """Run `engine serve` with its socket and log in `directory`, from ready until the end. Without
    a model its settings name one."""
    listen = Listen(directory / f"{name}.sock", None)
    environment = {**own_places(directory), **(environment or {})}
    log = directory / f"{name}.log"
    with log.open("ab") as output:
        other = {} if program is None else {"program": program}
        words = [*(["--model", str(model)] if model is not None else []), *flags]
        daemon = EngineDaemon(listen, words, output, environment, **other)
        try:
            daemon.wait_ready(120)
            yield daemon
        except BaseException as error:
            error.add_note(log.read_text()[-3000:])
            raise
        finally:
            daemon.stop()
