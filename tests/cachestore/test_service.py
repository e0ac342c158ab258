"""The service in this process: slabs that come late, or not at all, and errors of our own."""

import asyncio
import errno
import gc
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from cachestore import endpoint, shm
from cachestore.config import StoreConfig
from cachestore.retirement import Retirement, Slab
from cachestore.service import CachestoreService
from cachestore.store import Store
from cachestore.v1 import cachestore_pb2 as pb
from cachestore.v1 import cachestore_pb2_grpc
from tests.support import entries
from tests.support.waiting import until

SLAB_BYTES = 4096
CONFIG = StoreConfig(budget_bytes=2 * SLAB_BYTES, slab_bytes_override=SLAB_BYTES)
METADATA = (("cachestore-session", "token"),)


class Running:
    """A service with one session, `token`, and a stub to call it."""

    def __init__(self, store: Store, stub: Any) -> None:
        self.store = store
        self.session: int | None = store.open_session(counted=True)
        self.slabs: dict[int, Slab] = {}
        self._stub = stub

    def find(self, token: str) -> int | None:
        return self.session if token == "token" else None

    def reserve(self, row_bytes: int, timeout: float = 10) -> Awaitable[pb.ReserveResponse]:
        request = pb.ReserveRequest(
            namespace=entries.NAMESPACE, tokens=entries.tokens(1), row_bytes=row_bytes
        )
        call: Awaitable[pb.ReserveResponse] = asyncio.ensure_future(
            self._stub.Reserve(request, timeout=timeout, metadata=METADATA)
        )
        return call

    async def status(self, call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call
        return failure.value.code(), str(failure.value.details())


def run(directory: Path, scenario: Callable[[Running], Awaitable[None]]) -> None:
    async def serve() -> None:
        target = endpoint.grpc_target(directory / "x.sock")
        server = grpc.aio.server()
        async with grpc.aio.insecure_channel(target) as channel:
            running = Running(Store(CONFIG), cachestore_pb2_grpc.CachestoreStub(channel))
            service = CachestoreService(
                store=running.store,
                config=CONFIG,
                slabs=running.slabs,
                sessions=running,  # type: ignore[arg-type]
                retirement=Retirement(running.store, running.slabs),
                clock=time.monotonic,
                version="0",
            )
            cachestore_pb2_grpc.add_CachestoreServicer_to_server(service, server)
            server.add_insecure_port(target)
            await server.start()
            await scenario(running)
            running.store.check()
            await server.stop(None)
            # Its __del__ wants the loop, which is closed by the time of a later collection.
            del server
            gc.collect()
        for slab in running.slabs.values():
            os.close(slab.fd)

    asyncio.run(serve())


async def until_soon(probe: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(until, probe, what)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Slabs are made only once `open` is set; `made` counts them."""
    gate = SimpleNamespace(open=threading.Event(), asked=0, made=0)
    create = shm.create_slab

    def slowly(size: int) -> int:
        gate.asked += 1
        assert gate.open.wait(30)
        gate.made += 1
        return create(size)

    monkeypatch.setattr(shm, "create_slab", slowly)
    return gate


def test_calls_that_need_a_slab_at_once_stay_within_the_budget(directory: Path, gate: Any) -> None:
    async def scenario(running: Running) -> None:
        calls = [running.reserve(1000) for _ in range(8)]  # four fit a slab
        await until_soon(lambda: gate.asked == 1, "the first slab")
        gate.open.set()
        assert len({(await call).reservation_id for call in calls}) == 8
        assert gate.made == len(running.slabs) == 2
        assert (await running.status(running.reserve(1000)))[0] is (
            grpc.StatusCode.RESOURCE_EXHAUSTED
        )

    run(directory, scenario)


def test_a_slab_whose_caller_has_gone_is_kept(directory: Path, gate: Any) -> None:
    async def scenario(running: Running) -> None:
        late = running.reserve(1000, timeout=0.1)
        assert (await running.status(late))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        gate.open.set()
        await until_soon(lambda: len(running.slabs) == 1, "the slab")
        found = running.store.statistics(time.monotonic())
        assert (found.slabs, found.reservations) == (1, 0)
        await running.reserve(1000)
        assert gate.made == 1

    run(directory, scenario)


def test_a_session_that_ends_meanwhile_gets_nothing(directory: Path, gate: Any) -> None:
    async def scenario(running: Running) -> None:
        call = running.reserve(1000)
        await until_soon(lambda: gate.asked == 1, "the slab")
        assert running.session is not None
        running.store.close_session(running.session, time.monotonic())
        running.session = None
        gate.open.set()
        assert (await running.status(call))[0] is grpc.StatusCode.UNAUTHENTICATED
        assert running.store.statistics(time.monotonic()).reservations == 0

    run(directory, scenario)


def test_no_memory_is_a_status(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(size: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def scenario(running: Running) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(shm, "create_slab", fail)
            code, message = await running.status(running.reserve(1000))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert message == "no shared memory for a slab of 4096 bytes: No space left on device"
        assert (await running.reserve(1000)).reservation_id

    run(directory, scenario)


@pytest.mark.parametrize("place", ["store", "slab"])
def test_an_error_of_our_own_is_logged_and_not_told(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: str,
) -> None:
    def fail(*_: object) -> int:
        raise RuntimeError("a secret")

    async def scenario(running: Running) -> None:
        with monkeypatch.context() as patch:
            if place == "store":
                patch.setattr(running.store, "reserve", fail)
            else:
                patch.setattr(shm, "create_slab", fail)
            code, message = await running.status(running.reserve(1000))
        assert code is grpc.StatusCode.INTERNAL
        assert message == "failed; see the log of cachestore"
        assert (await running.reserve(1000)).reservation_id

    with caplog.at_level(logging.ERROR):
        run(directory, scenario)
    assert "a secret" in caplog.text
