"""A daemon with a store, shared by the tests of one module."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine.remote import connect
from engine.v1 import engine_pb2 as pb
from engine.v1 import engine_pb2_grpc
from tests.support.daemons import Cachestore, short_directory, start_cachestore
from tests.support.engines import EngineDaemon, ids, start_engine
from tests.support.models import Config, save_tiny_model
from tests.support.waiting import until

LONG_REPLY = 1900


@dataclass
class Served:
    engine: EngineDaemon
    store: Cachestore
    stub: engine_pb2_grpc.EngineStub
    model: Path

    def stats(self) -> pb.StatsResponse:
        return self.stub.Stats(pb.StatsRequest())

    def generate(self, **fields: Any) -> tuple[list[int], str, pb.Done]:
        return self.engine.generate(**fields)

    def stream(self, **fields: Any) -> Any:
        """A long reply, not read yet."""
        fields = {"prompt": ids([1, 2, 3]), "max_tokens": LONG_REPLY, "ignore_eos": True, **fields}
        return self.stub.Generate(pb.GenerateRequest(**fields))

    def wait_idle(self) -> None:
        def idle() -> bool:
            stats = self.stats()
            return not (stats.queued or stats.prefilling or stats.decoding)

        until(idle, "every row to be free")


@contextlib.contextmanager
def serve(*flags: str, config: Config | None = None, budget: str = "64MiB") -> Iterator[Served]:
    """An engine of a tiny model, whose store holds rows without loss and is in use already."""
    with short_directory() as directory:
        model = save_tiny_model(directory / "model", config)
        store_at = f"unix:{directory / 'cachestore.sock'}"
        lossless = ("--cachestore", store_at, "--cache-codec", "none")
        with (
            start_cachestore(directory, budget=budget) as store,
            start_engine(directory, model, *lossless, *flags) as engine,
            connect(engine.listen) as stub,
        ):
            until(lambda: stub.GetModel(pb.GetModelRequest()).namespace, "the weights' digest")
            yield Served(engine, store, stub, model)


def refusal(call: Callable[[], Any]) -> grpc.Call:
    """The status with which the call fails."""
    with pytest.raises(grpc.RpcError) as raised:
        call()
    error = raised.value
    assert isinstance(error, grpc.Call)
    return error


def tokenize(served: Served, prompt: pb.Prompt) -> list[int]:
    return [*served.stub.Tokenize(pb.TokenizeRequest(prompt=prompt)).token_ids]
