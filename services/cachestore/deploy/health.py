"""Whether a daemon serves, asked as any client of gRPC can; needs no session."""

from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cachestore import endpoint

_ANSWER_SECONDS = 2.0


def serving(address: str) -> bool:
    """Of the daemon at unix:PATH or HOST:PORT."""
    path = address.removeprefix("unix:")
    target = address if path == address else endpoint.grpc_target(Path(path))
    with grpc.insecure_channel(target, options=endpoint.CHANNEL_OPTIONS) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=_ANSWER_SECONDS
            )
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
