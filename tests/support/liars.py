"""A store that lies: a real daemon whose answers are altered on their way to an engine."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from cachestore import endpoint

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
        ask = self._daemon.unary_unary(method)
        lie = self.lies.get(method.rpartition("/")[2])

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            metadata = [
                pair for pair in context.invocation_metadata() if pair[0].startswith("cachestore")
            ]
            try:
                truth: bytes = ask(request, metadata=metadata)
            except grpc.RpcError as error:
                context.abort(error.code(), error.details())
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
