"""The engine's process: serves until a signal or the worker's death."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterator

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from engine import binding, config, signals
from engine.assembly import Engine
from engine.config import EngineConfig
from engine.service import EngineService
from engine.v1 import engine_pb2, engine_pb2_grpc
from engine.worker import Worker

log = logging.getLogger(__name__)

DRAIN_SECONDS = 10.0
SERVICE_NAME = engine_pb2.DESCRIPTOR.services_by_name["Engine"].full_name


@contextlib.contextmanager
def _stopped_at_the_end(engine: Engine) -> Iterator[None]:
    try:
        yield
    except signals.Interrupted:
        raise  # to stop is to wait for the thread that loads
    except BaseException:
        engine.stop()
        raise
    engine.stop()


def run(settings: EngineConfig) -> int:
    """Serve until SIGTERM or SIGINT; the exit code, which is not 0 when the worker died.

    Raises Interrupted, with the worker still running, when a signal comes before it serves.
    """
    with binding.reserved(settings.listen):
        engine = Engine(settings)
        with _stopped_at_the_end(engine):
            engine.start()
            return asyncio.run(_serve(engine))


async def _serve(engine: Engine) -> int:
    assert engine.served is not None
    assert engine.prefix is not None
    prefix = engine.prefix
    service = EngineService(engine.served, engine.worker, lambda: prefix.status)
    checks = health.aio.HealthServicer()
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", config.MESSAGE_BYTES_MAX),
            ("grpc.max_send_message_length", config.MESSAGE_BYTES_MAX),
            ("grpc.so_reuseport", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
        ]
    )
    engine_pb2_grpc.add_EngineServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    address = binding.bind(server, engine.settings.listen)
    await server.start()
    for name in ("", SERVICE_NAME):
        await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    log.info("serving on %s", address)
    died = await _until_signal_or_death(engine.worker)
    await checks.enter_graceful_shutdown()
    if not died:
        await service.drain(DRAIN_SECONDS)
    # The worker first: every stream that still runs gets its status before the server goes.
    await asyncio.to_thread(engine.stop)
    await server.stop(grace=1.0)
    service.close()
    return 1 if died else 0


async def _until_signal_or_death(worker: Worker) -> bool:
    """True when the worker died."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def end(number: int) -> None:
        if stop.is_set():
            os._exit(signals.exit_code(number))  # whoever asks again does not want to wait
        stop.set()

    for number in signals.ENDING:
        loop.add_signal_handler(number, end, number)
    worker.ended.add_done_callback(lambda _: loop.call_soon_threadsafe(stop.set))
    await stop.wait()
    return worker.ended.done()
