"""The daemon's life: lock, bind, serve, and leave nothing behind."""

import asyncio
import contextlib
import logging
import os
import signal
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import grpc

from cachestore import endpoint, exporter
from cachestore.config import MESSAGE_BYTES_MAX, StoreConfig
from cachestore.health import Health, reflect
from cachestore.memory import Memory
from cachestore.metrics import StoreMetrics
from cachestore.notify import Notifier
from cachestore.retirement import Retirement, Slab
from cachestore.service import CachestoreService
from cachestore.session import SessionServer
from cachestore.store import Store
from cachestore.upkeep import Upkeep, calm_collector
from cachestore.v1 import cachestore_pb2, cachestore_pb2_grpc

_TICK_SECONDS = 1.0
# Of calls that wait for rows; SIGTERM ends the daemon within a second.
_GRACE_SECONDS = 0.5
_SERVICE = cachestore_pb2.DESCRIPTOR.services_by_name["Cachestore"].full_name
_OPTIONS = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    *endpoint.SERVER_OPTIONS,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """`idle_exit_seconds` is how long no engine may be there before the daemon ends; None: ever.
    `metrics` is where they are served, if they are."""

    socket: Path
    store: StoreConfig
    idle_exit_seconds: float | None = None
    reflection: bool = False
    metrics: endpoint.TcpAddress | None = None


def run(config: ServerConfig) -> None:
    """Serves until SIGTERM, SIGINT or the idle exit.

    Raises EndpointError when the socket path cannot be had (Held: another daemon has it), or the
    address of the metrics.
    """
    os.umask(0o077)
    endpoint.check_directory(config.socket, flag="--socket")
    lock = endpoint.Lock(config.socket, flag="--socket")
    try:
        lock.remove_socket(config.socket)
        lock.remove_socket(endpoint.session_path(config.socket))
        metrics = StoreMetrics()
        with exporter.serving(config.metrics, metrics):
            asyncio.run(_serve(config, metrics))
    finally:
        lock.release()


async def _serve(config: ServerConfig, metrics: StoreMetrics) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    notifier = Notifier.take()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    release = version("mlx-cachestore")
    store, slabs = Store(config.store), dict[int, Slab]()
    path = endpoint.session_path(config.socket)
    retirement = Retirement(store, slabs)
    sessions = SessionServer(path, store, retirement, time.monotonic, release)
    service = CachestoreService(
        store=store,
        config=config.store,
        slabs=slabs,
        sessions=sessions,
        retirement=retirement,
        clock=time.monotonic,
        version=release,
    )
    server = grpc.aio.server(options=_OPTIONS)
    cachestore_pb2_grpc.add_CachestoreServicer_to_server(service, server)
    health = await Health.of(server, _SERVICE)
    if config.reflection:
        reflect(server, _SERVICE)
    feeding = asyncio.create_task(notifier.feed(lambda: True))
    try:
        await _start(server, sessions, config.socket)
        await health.set(True)
        notifier.ready(f"serving at {config.socket}")
        metrics.begin(loop, lambda: service.stats(time.monotonic()))
        _log.info("cachestore %s ready at %s", release, config.socket)
        calm_collector()
        upkeep = Upkeep(store, time.monotonic, lambda: service.calls, retirement.retire)
        while not await _ended(stop, config, sessions):
            upkeep.tick()
            await upkeep.compact(Memory(slabs).move, stop.is_set)
            await upkeep.check(stop.is_set)
            if not store.sound:
                await health.set(False)
    finally:
        feeding.cancel()
        notifier.stopping()
        await health.over()
        await sessions.stop()
        await server.stop(_GRACE_SECONDS)
        config.socket.unlink(missing_ok=True)
    _log.info("cachestore ends")


async def _start(server: grpc.aio.Server, sessions: SessionServer, path: Path) -> None:
    """The session socket comes last: a client begins there, and then finds everything ready."""
    try:
        server.add_insecure_port(endpoint.grpc_target(path))
        path.chmod(0o600)
        await server.start()
        sessions.start()
    except (RuntimeError, OSError) as error:
        raise endpoint.EndpointError(f"--socket: cannot listen at {path}: {error}") from error


async def _ended(stop: asyncio.Event, config: ServerConfig, sessions: SessionServer) -> bool:
    """Waits for one tick, or until it is time to end."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), _TICK_SECONDS)
    limit = config.idle_exit_seconds
    idle = limit is not None and sessions.idle_seconds >= limit
    if idle:
        _log.info("no engine for %s s", limit)
    return idle or stop.is_set()
