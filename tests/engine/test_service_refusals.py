"""What the service refuses, with which status, and which field it names."""

import asyncio
import contextlib
import logging
import math
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from engine import config
from engine.account import Accounts
from engine.config import Listen
from engine.core import Core
from engine.prefix import Prefix
from engine.remote import connect
from engine.request import ModelLimits
from engine.service import EngineService, ServedModel
from engine.tokenizer import PromptEncoder
from engine.v1 import engine_pb2 as pb
from engine.v1 import engine_pb2_grpc
from engine.worker import Worker
from tests.support.engines import chat, ids
from tests.support.models import (
    CONTEXT_TOKENS,
    VOCABULARY_TOKENS,
)
from tests.support.served import Served, refusal, tokenize
from tests.support.waiting import until

BAD_PROMPTS = {
    "none": (pb.Prompt(), "prompt: empty"),
    "no text": (pb.Prompt(text=""), "prompt.text: empty"),
    "no messages": (pb.Prompt(chat=pb.Chat()), "prompt.chat.messages: empty"),
    "no ids": (ids([]), "prompt.token_ids.ids: empty"),
    "no role": (chat(("user", "hi"), ("", "hi")), "prompt.chat.messages[1].role: empty"),
    "a role that the template refuses": (chat(("robot", "hi")), "unknown role robot"),
    "an id outside": (ids([1, VOCABULARY_TOKENS]), f"prompt.token_ids.ids: {VOCABULARY_TOKENS}"),
    "an id far outside": (ids([2**32 - 1]), f"prompt.token_ids.ids: {2**32 - 1}"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_prompt_that_cannot_be_used_is_refused_by_every_call(served: Served, name: str) -> None:
    prompt, message = BAD_PROMPTS[name]
    for call in (
        lambda: served.generate(prompt=prompt),
        lambda: served.stub.Warm(pb.WarmRequest(prompt=prompt)),
        lambda: served.stub.Tokenize(pb.TokenizeRequest(prompt=prompt)),
    ):
        error = refusal(call)
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert message in (error.details() or "")


@pytest.mark.parametrize("length", [CONTEXT_TOKENS, CONTEXT_TOKENS + 1, 100_000])
def test_a_prompt_that_fills_the_context_is_refused(served: Served, length: int) -> None:
    for prompt in (ids([1] * length), pb.Prompt(text="a" * length)):
        for call in (
            lambda prompt=prompt: served.generate(prompt=prompt),
            lambda prompt=prompt: served.stub.Warm(pb.WarmRequest(prompt=prompt)),
        ):
            error = refusal(call)
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert f"prompt: {length} tokens" in (error.details() or "")
            assert str(CONTEXT_TOKENS) in (error.details() or "")
    assert len(tokenize(served, ids([1] * length))) == length


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens: 0"),
        ({"max_tokens": CONTEXT_TOKENS - 2}, f"max_tokens: {CONTEXT_TOKENS - 2}"),
        ({"max_tokens": 2**32 - 1}, "max_tokens: "),
        ({"sampling": pb.Sampling(temperature=-0.5)}, "sampling.temperature: -0.5"),
        ({"sampling": pb.Sampling(temperature=math.nan)}, "sampling.temperature: nan"),
        ({"sampling": pb.Sampling(temperature=math.inf)}, "sampling.temperature: inf"),
        ({"sampling": pb.Sampling(temperature=101)}, "sampling.temperature: 101"),
        ({"sampling": pb.Sampling(top_p=0.0)}, "sampling.top_p: 0"),
        ({"sampling": pb.Sampling(top_p=1.5)}, "sampling.top_p: 1.5"),
        ({"sampling": pb.Sampling(top_p=math.nan)}, "sampling.top_p: nan"),
        ({"sampling": pb.Sampling(min_p=-1)}, "sampling.min_p: -1"),
        ({"sampling": pb.Sampling(min_p=math.nan)}, "sampling.min_p: nan"),
        ({"sampling": pb.Sampling(top_k=VOCABULARY_TOKENS + 1)}, "sampling.top_k: "),
        ({"stop": ["x"] * 17}, "stop: 17 strings"),
        ({"stop": [""]}, "stop: "),
        ({"stop": ["x" * 257]}, "stop: "),
        ({"stop_token_ids": [VOCABULARY_TOKENS]}, f"stop_token_ids: {VOCABULARY_TOKENS}"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids: 65"),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_used_is_named(
    served: Served, fields: dict[str, Any], message: str
) -> None:
    error = refusal(lambda: served.generate(prompt=ids([1, 2, 3]), **fields))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (error.details() or "").startswith(message)


def test_another_model_is_not_found(served: Served) -> None:
    for call in (
        lambda: served.generate(model="other", prompt=ids([1])),
        lambda: served.stub.Warm(pb.WarmRequest(model="other", prompt=ids([1]))),
        lambda: served.stub.Tokenize(pb.TokenizeRequest(model="other", prompt=ids([1]))),
    ):
        error = refusal(call)
        assert error.code() == grpc.StatusCode.NOT_FOUND
        assert "model: 'other'" in (error.details() or "")
    name = served.stub.GetModel(pb.GetModelRequest()).name
    assert served.generate(model=name, prompt=ids([1]), max_tokens=1)[0]


def test_a_message_over_the_limit_is_refused(served: Served) -> None:
    unlimited = (("grpc.max_send_message_length", -1),)
    request = pb.GenerateRequest(prompt=pb.Prompt(text="a" * (config.MESSAGE_BYTES_MAX + 1)))
    with grpc.insecure_channel(served.engine.listen.target, unlimited) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        error = refusal(lambda: list(stub.Generate(request)))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert stub.Tokenize(pb.TokenizeRequest(prompt=pb.Prompt(text="a"))).token_ids
    # And our own client does not even send it.
    error = refusal(lambda: served.generate(prompt=request.prompt))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_call_that_does_not_exist_is_unimplemented(served: Served) -> None:
    with grpc.insecure_channel(served.engine.listen.target) as channel:
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes]
        call = channel.unary_unary("/engine.v1.Engine/Explode")
        assert refusal(lambda: call(b"")).code() == grpc.StatusCode.UNIMPLEMENTED


def test_more_requests_than_the_queue_holds_are_refused(served: Served) -> None:
    streams = [served.stream() for _ in range(config.QUEUE_REQUESTS_MAX)]
    try:
        until(
            lambda: (
                sum((s.queued, s.prefilling, s.decoding)) == config.QUEUE_REQUESTS_MAX
                if (s := served.stats())
                else False
            ),
            "all of them to wait",
        )
        stats = served.stats()
        assert stats.prefilling + stats.decoding <= 16
        error = refusal(lambda: served.generate(prompt=ids([1])))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(config.QUEUE_REQUESTS_MAX) in (error.details() or "")
    finally:
        for stream in streams:
            stream.cancel()
    served.wait_idle()
    assert served.generate(prompt=ids([1]), max_tokens=1)[0]


@pytest.mark.parametrize("call", ["Generate", "Warm", "Tokenize"])
def test_a_prompt_that_is_still_being_encoded_has_a_place(
    directory: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(config, "QUEUE_REQUESTS_MAX", 1)
    encoder = EncodesIds()
    encoder.go_on.clear()

    def ask(listen: Listen) -> tuple[grpc.Call, list[int]]:
        with connect(listen) as stub:
            asked = stub.Tokenize.future(pb.TokenizeRequest(prompt=ids([1])))
            assert encoder.began.wait(10)
            calls = {
                "Generate": lambda: list(stub.Generate(pb.GenerateRequest(prompt=ids([1])))),
                "Warm": lambda: stub.Warm(pb.WarmRequest(prompt=ids([1]))),
                "Tokenize": lambda: stub.Tokenize(pb.TokenizeRequest(prompt=ids([1]))),
            }
            error = refusal(calls[call])
            encoder.go_on.set()
            assert [*asked.result(10).token_ids] == [1]
            return error, [*stub.Tokenize(pb.TokenizeRequest(prompt=ids([2]))).token_ids]

    async def run() -> tuple[grpc.Call, list[int]]:
        async with serving(directory, over(), encoder) as (_, listen):
            try:
                return await asyncio.to_thread(ask, listen)
            finally:
                encoder.go_on.set()

    error, afterwards = asyncio.run(run())
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (error.details() or "").startswith("1 requests are running or queued already")
    assert afterwards == [2]


# --- when the worker is over ---------------------------------------------------------------


@pytest.mark.parametrize("lines", [True, False])
def test_when_the_worker_is_over_every_call_says_so(
    directory: Path, caplog: pytest.LogCaptureFixture, lines: bool
) -> None:
    caplog.set_level(logging.INFO, "engine.account")

    async def run() -> tuple[list[grpc.Call], list[grpc.Call]]:
        async with serving(directory, over(), EncodesIds(), lines=lines) as (service, listen):
            refused = await asyncio.to_thread(refusals, listen)
            await service.drain()
            return refused, await asyncio.to_thread(refusals, listen)

    refused, (generate, warm, stats) = asyncio.run(run())
    for error in (*refused, stats):
        assert error.code() == grpc.StatusCode.INTERNAL
        assert "the device is lost" in (error.details() or "")
    # While the engine stops, whoever asks is told to go elsewhere.
    assert generate.code() == warm.code() == grpc.StatusCode.UNAVAILABLE
    assert ("request" in caplog.messages) == lines


def over() -> Worker:
    def load() -> Core:
        raise RuntimeError("the device is lost")

    worker = Worker(load)
    worker.start()
    worker.stop()
    return worker


class EncodesIds:
    """Once it may `go_on`."""

    def __init__(self) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def encode_ids(self, tokens: Any) -> list[int]:
        self.began.set()
        assert self.go_on.wait(30)
        return [*tokens]


@contextlib.asynccontextmanager
async def serving(
    directory: Path, worker: Worker, encoder: EncodesIds, *, lines: bool = True
) -> AsyncIterator[tuple[EngineService, Listen]]:
    limits = ModelLimits(CONTEXT_TOKENS, VOCABULARY_TOKENS, frozenset())
    encodes = cast(PromptEncoder, encoder)
    model = ServedModel("m", "llama", "float32", "cpu", "batched", limits, encodes)
    listen = Listen(directory / "engine.sock", None)
    service = EngineService(worker, Accounts(lines, prompts=False))
    service.open(model, Prefix(worker.post))
    server = grpc.aio.server()
    engine_pb2_grpc.add_EngineServicer_to_server(service, server)
    server.add_insecure_port(listen.target)
    await server.start()
    try:
        yield service, listen
    finally:
        await server.stop(0)
        service.close()


def refusals(listen: Listen) -> list[grpc.Call]:
    """Of each call that needs the worker; the others answer."""
    with connect(listen) as stub:
        assert stub.GetModel(pb.GetModelRequest()).name == "m"
        assert stub.Tokenize(pb.TokenizeRequest(prompt=ids([1]))).token_ids == [1]
        return [
            refusal(lambda: list(stub.Generate(pb.GenerateRequest(prompt=ids([1])), timeout=10))),
            refusal(lambda: stub.Warm(pb.WarmRequest(prompt=ids([1])), timeout=10)),
            refusal(lambda: stub.Stats(pb.StatsRequest(), timeout=10)),
        ]
