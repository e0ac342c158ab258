"""What a server says of itself to those who know none of its protos."""

import grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc


def services(target: str) -> set[str]:
    """Names of what is served there. Raises RpcError where reflection is not."""
    with grpc.insecure_channel(target) as channel:
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answer,) = stub.ServerReflectionInfo(iter([ask]), timeout=10)
    return {service.name for service in answer.list_services_response.service}
