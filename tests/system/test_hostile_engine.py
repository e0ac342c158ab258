"""Hostile clients of a real engine: whatever they send gets an answer, and nothing of it stays."""

import contextlib
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.remote import connect
from engine.v1 import engine_pb2 as pb
from tests.support.daemons import short_directory, start_cachestore
from tests.support.engines import EngineDaemon, chat, ids, start_engine
from tests.support.fuzz import is_message, mutated
from tests.support.models import save_tiny_model
from tests.support.waiting import until

PROMPT = [(7 * n + n * n) % 256 for n in range(60)]
ANSWERS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,  # of another model than this engine's
    grpc.StatusCode.CANCELLED,  # by this client, which reads one message of a reply
}
# gRPC's own, for bytes that are no message.
NO_MESSAGE = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}
SAMPLING = pb.Sampling(temperature=0.5, top_p=0.9, top_k=5, seed=1, logit_bias={7: 1.5})
REQUESTS: list[tuple[str, Message]] = [
    ("Generate", pb.GenerateRequest(prompt=ids(PROMPT), max_tokens=2, sampling=SAMPLING)),
    (
        "Generate",
        pb.GenerateRequest(prompt=chat(("user", "Hello")), max_tokens=2, stop=["x"], logprobs=3),
    ),
    ("Warm", pb.WarmRequest(prompt=ids(PROMPT), pin=True)),
    ("Tokenize", pb.TokenizeRequest(prompt=chat(("system", "Be brief."), ("user", "Hello")))),
    ("Stats", pb.StatsRequest()),
]


@pytest.fixture(scope="module")
def running() -> Iterator[EngineDaemon]:
    with (
        short_directory() as directory,
        start_cachestore(directory) as store,
        start_engine(
            directory,
            save_tiny_model(directory / "model"),
            *("--cachestore", f"unix:{store.socket}", "--cache-codec", "none"),
        ) as engine,
    ):
        yield engine
        # gRPC itself logs what is no message.
        log = (directory / "engine.log").read_text()
        assert "ERROR grpc._cython" in log
        assert "ERROR engine" not in log


def idle(engine: EngineDaemon) -> bool:
    with connect(engine.listen) as stub:
        stats = stub.Stats(pb.StatsRequest(), timeout=10)
    return not (stats.queued or stats.prefilling or stats.decoding)


def answer_to(channel: grpc.Channel, method: str, data: bytes) -> grpc.StatusCode:
    """The status after at most one message."""
    call: grpc.UnaryStreamMultiCallable[bytes, bytes]
    call = channel.unary_stream(f"/engine.v1.Engine/{method}")
    reply = call(data, timeout=20)
    with contextlib.suppress(grpc.RpcError):
        next(reply, None)
    reply.cancel()
    return reply.code()


@pytest.mark.parametrize(("method", "valid"), REQUESTS)
def test_messages_of_all_kinds(running: EngineDaemon, method: str, valid: Message) -> None:
    before = running.generate(prompt=ids(PROMPT), max_tokens=8)[0]
    data = st.just(valid.SerializeToString())
    with grpc.insecure_channel(running.listen.target) as channel:

        @settings(max_examples=40, deadline=None)
        @given(st.binary(max_size=60) | mutated(data))
        def fuzz(request: bytes) -> None:
            expected = ANSWERS if is_message(type(valid), request) else NO_MESSAGE
            assert answer_to(channel, method, request) in expected

        fuzz()
    until(lambda: idle(running), "nothing to be computed for anybody")
    assert running.generate(prompt=ids(PROMPT), max_tokens=8)[0] == before
