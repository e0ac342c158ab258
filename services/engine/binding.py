"""The address that is served: reserved before MLX is, bound before the model is loaded."""

import contextlib
import os
import socket
from collections.abc import Iterator

import grpc

from cachestore import endpoint
from engine.config import Listen
from engine.flags import ConfigError

FLAG = "--listen"


@contextlib.contextmanager
def reserved(listen: Listen) -> Iterator[None]:
    """Hold the lock of a Unix socket path, with nothing in the way of the bind; see that a TCP
    port is free. Raises ConfigError and EndpointError."""
    path = listen.unix_path
    if path is None:
        _check_port(listen)
        yield
        return
    endpoint.check_directory(path, flag=FLAG)
    lock = endpoint.Lock(path, flag=FLAG)
    try:
        lock.remove_socket(path)
        try:
            yield
        finally:
            lock.remove_socket(path)
    finally:
        lock.release()


def bind(server: grpc.aio.Server, listen: Listen) -> str:
    """The address that was bound, with the port that port 0 came to. Raises ConfigError."""
    # A socket takes its mode from the umask: without this others could connect for a moment.
    umask = os.umask(0o077)
    try:
        port = server.add_insecure_port(listen.target)
    except RuntimeError as error:
        raise ConfigError(f"{FLAG} {listen}: cannot be bound: {error}") from None
    finally:
        os.umask(umask)
    if listen.unix_path is not None:
        listen.unix_path.chmod(0o600)
        return str(listen)
    return f"{listen.target.rpartition(':')[0]}:{port}"


def _check_port(listen: Listen) -> None:
    """gRPC does not say why it cannot bind."""
    host, _, port = listen.target.rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.socket(family) as probe:
        # As gRPC does: connections that lately ended are not in the way.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), int(port)))
        except OSError as error:
            raise ConfigError(f"{FLAG} {listen}: cannot be bound: {error.strerror}") from None
