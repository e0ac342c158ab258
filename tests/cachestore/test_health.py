"""What any gRPC client can ask of a daemon whose proto it does not have: health and reflection."""

import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cachestore import endpoint
from tests.support.daemons import start_cachestore
from tests.support.reflection import services
from tests.support.waiting import until

SERVICE = "cachestore.v1.Cachestore"
Status = health_pb2.HealthCheckResponse
# A store that contradicts itself once a file is there, and that is checked each second.
UNSOUND = """
import pathlib, sys, time
from cachestore import upkeep
from cachestore.cli import main
from cachestore.store import Store
def checks(store):
    assert not pathlib.Path({0!r}).exists()
    yield 1
upkeep.CHECK_SECONDS = 0.0
Store.changes = property(lambda store: time.monotonic_ns())
Store.checks = checks
sys.exit(main())
"""


def test_a_store_that_contradicts_itself_does_not_serve(directory: Path) -> None:
    gate = directory / "gate"
    program = (sys.executable, "-c", UNSOUND.format(str(gate)))
    with (
        start_cachestore(directory, program=program) as daemon,
        grpc.insecure_channel(endpoint.grpc_target(daemon.socket)) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)

        def told() -> set[int]:
            """Of the server as a whole, and of its service."""
            asked = [health_pb2.HealthCheckRequest(service=name) for name in ("", SERVICE)]
            return {stub.Check(each, timeout=10).status for each in asked}

        assert told() == {Status.SERVING}
        watching = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=30)
        assert next(watching).status == Status.SERVING
        gate.touch()
        assert next(watching).status == Status.NOT_SERVING
        until(lambda: told() == {Status.NOT_SERVING}, "health to say so")
        watching.cancel()
        assert daemon.terminate() == 0


@pytest.mark.parametrize("asked", ["1", "0"])
def test_reflection_is_there_for_those_who_ask(directory: Path, asked: str) -> None:
    environment = {"MLX_CACHESTORE_CACHESTORE_REFLECTION": asked}
    with start_cachestore(directory, environment=environment) as daemon:
        target = endpoint.grpc_target(daemon.socket)
        if asked == "1":
            assert services(target) >= {SERVICE, "grpc.health.v1.Health"}
        else:
            with pytest.raises(grpc.RpcError) as refused:
                services(target)
            assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
