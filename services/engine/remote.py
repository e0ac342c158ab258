"""A running engine as its command-line clients see it, and starting one for them. No MLX."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cachestore import endpoint
from engine import config
from engine.v1 import engine_pb2 as pb
from engine.v1 import engine_pb2_grpc

# -P: what lies in the working directory is data, as for an installed command.
_PROGRAM = (sys.executable, "-P", "-m", "engine")
_POLL_SECONDS = 0.05
_ANSWER_SECONDS = 5.0
_OPTIONS = (
    ("grpc.max_send_message_length", config.MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", config.MESSAGE_BYTES_MAX),
    *endpoint.CHANNEL_OPTIONS,
)


class EngineAway(Exception):
    """No engine answers, or it ended while starting; one line that says what to do."""


@contextlib.contextmanager
def channel(listen: config.Listen) -> Iterator[grpc.Channel]:
    """To the engine at this address. Nothing is sent yet."""
    with grpc.insecure_channel(listen.target, _OPTIONS) as opened:
        yield opened


@contextlib.contextmanager
def connect(listen: config.Listen) -> Iterator[engine_pb2_grpc.EngineStub]:
    """A stub for the engine at this address. Nothing is sent yet."""
    with channel(listen) as opened:
        yield engine_pb2_grpc.EngineStub(opened)


def model_of(listen: config.Listen) -> pb.GetModelResponse | None:
    """What the engine at this address serves; None when none answers."""
    with connect(listen) as stub:
        try:
            return stub.GetModel(pb.GetModelRequest(), timeout=_ANSWER_SECONDS)
        except grpc.RpcError:
            return None


def loads(listen: config.Listen, timeout_seconds: float = 5.0) -> bool:
    """Whether there is an engine at this address that does not serve yet."""
    with channel(listen) as opened:
        check = health_pb2_grpc.HealthStub(opened).Check
        try:
            health = check(health_pb2.HealthCheckRequest(), timeout=timeout_seconds)
        except grpc.RpcError:
            return False
    return bool(health.status == health_pb2.HealthCheckResponse.NOT_SERVING)


class EngineProcess:
    """An `engine serve` that was started here and is ended here."""

    def __init__(
        self,
        listen: config.Listen,
        arguments: list[str],
        output: IO[bytes] | int | None = None,
        environment: dict[str, str] | None = None,
        program: Sequence[str] = _PROGRAM,
    ) -> None:
        """Start it; `wait_ready` tells when it serves. Its log goes to `output` (None: ours)."""
        self.listen = listen
        self.process = subprocess.Popen(
            [*program, "serve", "--listen", str(listen), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **(environment or {})},
            # Ctrl-C at the terminal is for us; who starts an engine ends it.
            process_group=0,
        )

    def wait_ready(self, timeout_seconds: float = 900.0) -> pb.GetModelResponse:
        """Wait until it serves; raises EngineAway when it ends before or takes too long."""
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            code = self.process.poll()
            if code is not None:
                raise EngineAway(f"the engine ended with exit code {code} while starting")
            if _exists(self.listen):
                found = model_of(self.listen)
                if found is not None:
                    return found
            time.sleep(_POLL_SECONDS)
        raise EngineAway(f"the engine does not serve after {timeout_seconds:.0f} s")

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def stop(self, timeout_seconds: float = 30.0) -> int:
        """SIGTERM, and SIGKILL if that is not enough; its exit code."""
        self.process.terminate()
        try:
            return self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def _exists(listen: config.Listen) -> bool:
    return listen.unix_path is None or Path(listen.unix_path).exists()
