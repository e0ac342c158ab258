"""A store that lies: a real daemon whose answers are altered on their way to an engine."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from cachestore import endpoint
from cachestore.client import Client
from cachestore.v1 import cachestore_pb2 as pb
from tests.support.daemons import short_directory, start_cachestore
from tests.support.engines import InProcess, in_process
from tests.support.models import Config, save_tiny_model
from tests.support.stores import packed
from tests.support.waiting import until

REPLY_TOKENS = 6

# Gets the request and the answer as bytes; gives what the caller is told.
Lie = Callable[[bytes, bytes], bytes]


class Liar(grpc.GenericRpcHandler):
    """Passes each call on to the daemon. `lies` are by the names of calls, such as "Lookup"."""

    def __init__(self, daemon: grpc.Channel) -> None:
        self.lies: dict[str, Lie] = {}
        self.told = 0
        self._daemon = daemon

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method
        ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._daemon.unary_unary(method)
        lie = self.lies.get(method.rpartition("/")[2])

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            metadata = tuple(
                pair for pair in context.invocation_metadata() if pair[0].startswith("cachestore")
            )
            try:
                truth = ask(request, metadata=metadata)
            except grpc.RpcError as error:
                context.abort(error.code(), error.details() or "")
            if lie is None:
                return truth
            self.told += 1
            return lie(request, truth)

        return grpc.unary_unary_rpc_method_handler(answer)


@contextlib.contextmanager
def lying(store: Path, path: Path) -> Iterator[Liar]:
    """Serves at `path`; sessions, and with them slabs, are those of the daemon at `store`."""
    endpoint.session_path(path).symlink_to(endpoint.session_path(store))
    options: Sequence[tuple[str, Any]] = (("grpc.max_receive_message_length", -1),)
    with (
        grpc.insecure_channel(endpoint.grpc_target(store), options) as channel,
        ThreadPoolExecutor(8) as threads,
    ):
        liar = Liar(channel)
        server = grpc.server(threads, handlers=[liar], options=options)
        server.add_insecure_port(endpoint.grpc_target(path))
        server.start()
        try:
            yield liar
        finally:
            server.stop(None).wait()


def altered(change: Callable[[pb.LookupResponse], Any]) -> Lie:
    """The truth but for one change of it."""

    def lie(_: bytes, truth: bytes) -> bytes:
        answer = pb.LookupResponse.FromString(truth)
        change(answer)
        return answer.SerializeToString()

    return lie


@dataclass
class Deceived:
    """An engine whose store lies to it. The prompt is stored, in two namespaces of models that
    differ in their weights alone."""

    engine: InProcess
    liar: Liar
    client: Client
    prompt: list[int]
    cold: list[int]
    namespace: bytes
    other_namespace: bytes

    def lookup(self, namespace: bytes, tokens: list[int]) -> pb.LookupResponse:
        """What the daemon says of those. The lease lapses some time."""
        request = pb.LookupRequest(
            namespace=namespace,
            tokens=packed(tokens),
            limit=len(tokens) - 1,
            checkpointed=self.engine.prefix.checkpointed,
        )
        return self.client._call(self.client._stub.Lookup, request)

    def tell(self, call: str, lie: Lie) -> None:
        """The engine computes the prompt as if nothing were stored."""
        self.liar.told = 0
        self.liar.lies[call] = lie
        reply = self.engine.ask(self.prompt, REPLY_TOKENS)
        self.engine.settle()
        assert self.liar.told
        assert reply.tokens == self.cold
        assert reply.done.usage.cached_tokens == 0
        assert reply.done.usage.prompt_tokens == len(self.prompt)

    def assert_truth_is_used(self) -> None:
        self.liar.lies.clear()
        until(lambda: self.engine.prefix.status.connected, "a session")
        reply = self.engine.ask(self.prompt, REPLY_TOKENS)
        assert reply.tokens == self.cold
        assert reply.done.usage.cached_tokens == len(self.prompt) - 1
        self.engine.settle()


@contextlib.contextmanager
def deceived(
    prompt: list[int], others: Sequence[list[int]], config: Config | None = None, **settings: Any
) -> Iterator[Deceived]:
    """`others` are stored beside the prompt; `settings` are of the engines that store them."""
    with short_directory() as directory:
        model = save_tiny_model(directory / "model", config)
        twin = save_tiny_model(directory / "twin", config, seed=1)
        with (
            start_cachestore(directory, budget="256MiB") as store,
            in_process(model, None) as without,
        ):
            cold = without.ask(prompt, REPLY_TOKENS).tokens
            other_namespace = _store_all(twin, store.socket, [prompt], settings)
            namespace = _store_all(model, store.socket, [prompt, *others], settings)
            assert namespace != other_namespace
            path = directory / "liar.sock"
            with (
                lying(store.socket, path) as liar,
                store.client() as client,
                in_process(model, path, cache_codec="none", **settings) as engine,
            ):
                yield Deceived(engine, liar, client, prompt, cold, namespace, other_namespace)


def _store_all(
    model: Path, socket: Path, prompts: Sequence[list[int]], settings: dict[str, Any]
) -> bytes:
    """Has another engine store those; its namespace."""
    with in_process(model, socket, cache_codec="none", **settings) as engine:
        for prompt in prompts:
            engine.ask(prompt, 1)
            engine.settle()
        namespace: bytes = engine.prefix.status.namespace
        return namespace
