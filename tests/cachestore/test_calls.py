"""How a call ends whose client is not there any more."""

import asyncio
import time
from typing import cast

import grpc
import pytest

from cachestore.calls import Calls, Context
from cachestore.config import StoreConfig
from cachestore.session import SessionServer
from cachestore.store import Store


class NoSessions:
    def find(self, token: str) -> int | None:
        return None


class Gone:
    """The context of a call whose client goes while the loop is busy: gRPC cannot tell the call,
    and raises an error of its own when it is to end with a status."""

    def __init__(self) -> None:
        self.statuses: list[grpc.StatusCode] = []

    def invocation_metadata(self) -> None:
        return None

    async def abort(self, code: grpc.StatusCode, message: str) -> None:
        self.statuses.append(code)
        raise RuntimeError("Failed execute_batch")


def test_a_client_that_goes_before_its_status_is_no_failure_of_the_store(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = Calls(
        store=Store(StoreConfig(budget_bytes=1 << 24)),
        slabs={},
        sessions=cast(SessionServer, NoSessions()),
        clock=time.monotonic,
    )
    gone = Gone()
    with pytest.raises(RuntimeError, match="execute_batch"):
        asyncio.run(calls.run(cast(Context, gone), lambda session, now: b""))
    assert gone.statuses == [grpc.StatusCode.UNAUTHENTICATED]
    assert not caplog.records
