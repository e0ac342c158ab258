"""How a call ends whose client is not there any more."""

import asyncio
import logging
import threading
import time
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from cachestore.calls import Calls, Context
from cachestore.config import StoreConfig
from cachestore.session import SessionServer
from cachestore.store import Store

SECONDS = 10.0


class NoSessions:
    def find(self, token: str) -> int | None:
        return None


def test_a_client_that_goes_while_the_loop_is_busy_is_no_failure_of_the_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begun, gone = threading.Event(), threading.Event()
    ended = asyncio.Event()

    async def scenario() -> None:
        sessions = cast(SessionServer, NoSessions())
        store = Store(StoreConfig(budget_bytes=1 << 24))
        calls = Calls(store=store, slabs={}, sessions=sessions, clock=time.monotonic)

        async def handle(_: bytes, context: Context) -> Any:
            try:
                begun.set()
                # Not awaited: nothing can tell the call that its client goes.
                assert gone.wait(SECONDS)
                return await calls.run(context, lambda session, now: b"")
            finally:
                ended.set()

        server = grpc.aio.server()
        method: Any = grpc.unary_unary_rpc_method_handler(handle)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test.Calls", {"Call": method}),)
        )
        where = f"unix:{tmp_path}/socket"
        server.add_insecure_port(where)
        await server.start()
        going = asyncio.create_task(asyncio.to_thread(ask_and_go, where, begun, gone))
        await asyncio.wait_for(ended.wait(), SECONDS)
        await going
        await server.stop(None)

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
    assert [record for record in caplog.records if record.name == "cachestore.calls"] == []


def ask_and_go(where: str, begun: threading.Event, gone: threading.Event) -> None:
    with grpc.insecure_channel(where) as channel:
        ask: Any = channel.unary_unary("/test.Calls/Call")
        call = ask.future(b"")
        assert begun.wait(SECONDS)
        call.cancel()
    # Its reset has to reach the server's side of gRPC.
    time.sleep(0.2)
    gone.set()
