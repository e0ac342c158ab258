"""The engine's process: one server from before the model is loaded until the last status.

    loading ─▶ serving ⇄ stalled ─▶ draining ─▶ stopping ─▶ exit code
       │          └──────────────────────────────▲
       └─▶ a signal or a failure ends it at once

Health is SERVING while it serves, and NOT_SERVING in all other states. The systemd watchdog hears
of it as long as the worker does not stall.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any

import grpc

from cachestore import endpoint, exporter
from cachestore.health import Health, reflect
from cachestore.notify import Notifier
from engine import binding, config, signals
from engine.account import Accounts
from engine.assembly import Engine
from engine.config import EngineConfig
from engine.metrics import EngineMetrics, Served
from engine.service import EngineService
from engine.v1 import engine_pb2, engine_pb2_grpc
from engine.worker import STOPPING, Worker, WorkerOver

log = logging.getLogger(__name__)

SERVICE = engine_pb2.DESCRIPTOR.services_by_name["Engine"].full_name
_POLL_SECONDS = 0.02
_WATCH_SECONDS = 0.25
_GRACE_SECONDS = 1.0
_OPTIONS = (
    ("grpc.max_receive_message_length", config.MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", config.MESSAGE_BYTES_MAX),
    ("grpc.so_reuseport", 0),
    *endpoint.SERVER_OPTIONS,
)


def run(settings: EngineConfig) -> int:
    """Serve at an address that is reserved, until SIGTERM or SIGINT; the exit code, which is not 0
    when the worker died.

    Raises what Engine.start raises, and Leave when a thread that cannot be stopped stays behind.
    """
    metrics = EngineMetrics()
    with exporter.serving(settings.metrics, metrics):
        engine = Engine(settings)
        with _stopped_at_the_end(engine):
            return asyncio.run(_serve(engine, metrics))


@contextlib.contextmanager
def _stopped_at_the_end(engine: Engine) -> Iterator[None]:
    try:
        yield
    except signals.Leave:
        raise  # to stop is to wait for the thread that stays behind
    except BaseException:
        engine.stop()
        raise
    engine.stop()


async def _serve(engine: Engine, metrics: EngineMetrics) -> int:
    settings, worker = engine.settings, engine.worker
    notifier = Notifier.take()
    stop = signals.ending()
    server = grpc.aio.server(options=_OPTIONS)
    service = EngineService(worker, Accounts(settings.log_requests, settings.log_prompts))
    engine_pb2_grpc.add_EngineServicer_to_server(service, server)
    health = await Health.of(server, SERVICE)
    if settings.reflection:
        reflect(server, SERVICE)
    address = binding.bind(server, settings.listen)

    def moves() -> bool:
        return worker.turn_seconds <= settings.stall_seconds

    await server.start()
    try:
        notifier.status(f"loading {settings.model}")
        await _load(engine, stop)
        assert engine.served is not None
        assert engine.prefix is not None
        service.open(engine.served, engine.prefix)
        metrics.begin(Served(service.model(), worker, service.stats, moves))
        async with _beside(_watch(moves, health), notifier.feed(moves)):
            notifier.ready(f"serving {engine.served.name} on {address}")
            log.info("serving on %s", address)
            died = asyncio.wrap_future(worker.ended)
            await asyncio.wait((stop, died), return_when=asyncio.FIRST_COMPLETED)
            notifier.stopping()
            await health.over()
            await _end(engine, service, moves)
        return 1 if worker.ended.exception() else 0
    finally:
        await server.stop(_GRACE_SECONDS)
        service.close()


async def _load(engine: Engine, stop: "asyncio.Future[None]") -> None:
    """Raises Leave when a signal comes first."""
    loading = _in_thread(engine.start)
    await asyncio.wait((loading, stop), return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        raise signals.Leave(0)
    loading.result()


async def _watch(moves: Callable[[], bool], health: Health) -> None:
    """Health follows whether the worker moves."""
    serving = True
    await health.set(serving)
    while True:
        await asyncio.sleep(_WATCH_SECONDS)
        if moves() == serving:
            continue
        serving = not serving
        await health.set(serving)
        if serving:
            log.warning("the worker moves again")
        else:
            log.error("the worker has been in one step for longer than --stall-seconds")


async def _end(engine: Engine, service: EngineService, moves: Callable[[], bool]) -> None:
    """Within the time to drain streams end by themselves, and what is computed is stored; then
    the rest gets a status. Raises Leave when the worker's step does not end."""
    loop = asyncio.get_running_loop()
    until = loop.time() + engine.settings.drain_seconds
    if not engine.worker.ended.done():
        with contextlib.suppress(TimeoutError, WorkerOver):
            async with asyncio.timeout_at(until):
                await service.drain()
                await _emptied(engine.worker)
    left = max(0.0, until - loop.time())
    # The worker first: every stream that still runs gets its status before the server goes.
    stopping = _in_thread(lambda: engine.stop(left))
    await asyncio.wait((stopping,), timeout=left + config.STOP_SECONDS)
    if not stopping.done():
        log.error("the worker is in the middle of a step; the process ends without it")
        service.fail_all(STOPPING)
        raise signals.Leave(0 if moves() else 1)
    stopping.result()


async def _emptied(worker: Worker) -> None:
    """Waits for the rows whose reply is over: they stay until they are with the writer."""
    while (await asyncio.wrap_future(worker.snapshot())).rows:
        await asyncio.sleep(_POLL_SECONDS)


@contextlib.asynccontextmanager
async def _beside(*coroutines: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run them beside the body, and no longer."""
    tasks = [asyncio.create_task(each) for each in coroutines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _in_thread(call: Callable[[], None]) -> "asyncio.Future[None]":
    """As asyncio.to_thread, but neither the loop nor the process waits for it at the end."""
    done: Future[None] = Future()

    def work() -> None:
        try:
            call()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=work, name="engine-life", daemon=True).start()
    return asyncio.wrap_future(done)
