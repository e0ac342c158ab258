"""What every gRPC server of ours answers beside its own service: health, and reflection."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio
from grpc_reflection.v1alpha import reflection

_Status = health_pb2.HealthCheckResponse


class Health:
    """grpc.health.v1 for a server as a whole and for its one service.

    NOT_SERVING until `set` says otherwise; once it is `over`, for good.
    """

    def __init__(self, servicer: aio.HealthServicer, service: str) -> None:
        """`of` makes them."""
        self._servicer = servicer
        self._names = ("", service)

    @classmethod
    async def of(cls, server: grpc.aio.Server, service: str) -> "Health":
        """For a server that has not started."""
        servicer = aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        health = cls(servicer, service)
        await health.set(False)
        return health

    async def set(self, serving: bool) -> None:
        status = _Status.SERVING if serving else _Status.NOT_SERVING
        for name in self._names:
            await self._servicer.set(name, status)

    async def over(self) -> None:
        await self._servicer.enter_graceful_shutdown()


def reflect(server: grpc.aio.Server, service: str) -> None:
    """Let tools such as grpcurl ask what is served."""
    names = (service, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
    reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
