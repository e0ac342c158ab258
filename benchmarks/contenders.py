"""The servers that benchmarks/server.py compares, each in processes of its own.

Both load the same folder on the same backend, with the same prefill step. mlx-lm's server gets
what our engine gives itself: a fast BLAS before MLX is loaded, and MLX's limits of cached buffers.
Without the BLAS it would be about 70 times slower on a CPU.
"""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from tests.support.daemons import start_cachestore
from tests.support.waiting import until

from cachestore import variables
from engine import signals
from engine.ask import Reply
from engine.config import Listen
from engine.remote import EngineProcess, connect, model_of
from engine.v1 import engine_pb2 as pb

Messages = Sequence[dict[str, str]]

START_SECONDS = 120.0
ANSWER_SECONDS = 900.0

MLX_LM_SERVER = """
from engine import backend
backend.prepare()
backend.apply_memory_limits(backend.memory_limits(backend.describe()))
from mlx_lm.server import main
main()
"""


@dataclass(frozen=True, slots=True)
class Answered:
    """One reply. Times as the client saw them, from the sending of the request; the first token
    is there when the first of its text is."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_token_seconds: float
    seconds: float


class Contender(Protocol):
    name: str

    def ask(self, messages: Messages, max_tokens: int) -> Answered: ...

    def restart(self) -> None:
        """SIGKILL, and a new process that has loaded its model."""


class MlxCachestore:
    """`engine serve` with the cachestore at `store`."""

    name = "mlx-cachestore"

    def __init__(self, model: Path, flags: list[str], directory: Path, log: IO[bytes]) -> None:
        self._listen = Listen(directory / "engine.sock", None)
        self._flags = ["--model", str(model), "--log-level", "warning", *flags]
        self._environment = {variables.CACHE_DIR: str(directory)}
        self._log = log
        self._start()

    def _start(self) -> None:
        self._process = EngineProcess(self._listen, self._flags, self._log, self._environment)
        self._process.wait_ready(START_SECONDS)
        until(self._knows_its_weights, "the weights' digest", START_SECONDS)
        # A channel of its own: the old one would back off from the address of the dead.
        self._channel = contextlib.ExitStack()
        self._stub = self._channel.enter_context(connect(self._listen))

    def _knows_its_weights(self) -> bool:
        model = model_of(self._listen)
        return model is not None and bool(model.namespace)

    def ask(self, messages: Messages, max_tokens: int) -> Answered:
        chat = pb.Chat(messages=[pb.ChatMessage(**message) for message in messages])
        request = pb.GenerateRequest(prompt=pb.Prompt(chat=chat), max_tokens=max_tokens)
        began = time.perf_counter()
        reply = Reply(self._stub, request)
        first = None
        for piece in reply.pieces():
            if piece and first is None:
                first = time.perf_counter()
        ended = time.perf_counter()
        usage = reply.answer().done.usage
        return Answered(
            reply.text,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            (first or ended) - began,
            ended - began,
        )

    def restart(self) -> None:
        self._channel.close()
        self._process.kill()
        self._start()

    def stop(self) -> None:
        self._channel.close()
        self._process.stop()


class MlxLm:
    """`mlx_lm.server`."""

    name = "mlx-lm"

    def __init__(self, model: Path, flags: list[str], log: IO[bytes]) -> None:
        self._flags = ["--model", str(model), "--log-level", "WARNING", *flags]
        self._log = log
        self._start()

    def _start(self) -> None:
        self._port = _free_port()
        command = [sys.executable, "-P", "-c", MLX_LM_SERVER, "--port", str(self._port)]
        self._process = subprocess.Popen(
            [*command, *self._flags],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        until(self._is_up, "mlx_lm.server", START_SECONDS)
        # It answers before it has loaded the model; not before it can generate.
        self.ask([{"role": "user", "content": "Hello"}], 1)

    def _is_up(self) -> bool:
        assert self._process.poll() is None, "mlx_lm.server ended while starting"
        with contextlib.suppress(OSError), contextlib.closing(self._connection()) as connection:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        return False

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_SECONDS)

    def ask(self, messages: Messages, max_tokens: int) -> Answered:
        body = json.dumps(
            {
                "messages": messages,
                "max_tokens": max_tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        text, first, usage = "", None, None
        began = time.perf_counter()
        with contextlib.closing(self._connection()) as connection:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", body, headers)
            for event in _events(connection.getresponse()):
                usage = event.get("usage", usage)
                for choice in event["choices"]:
                    piece = choice["delta"].get("content", "")
                    if piece and first is None:
                        first = time.perf_counter()
                    text += piece
        ended = time.perf_counter()
        assert usage is not None, "the stream ended without a usage"
        return Answered(
            text,
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["completion_tokens"],
            (first or ended) - began,
            ended - began,
        )

    def restart(self) -> None:
        self.stop()
        self._start()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def contenders(
    model: Path, step: int, codec: str, directory: Path, kv_bits: int | None = None
) -> Iterator[list[Contender]]:
    """Both, loaded and warm, until the end; what they say is in logs in `directory`. With
    `kv_bits` live caches are quantized from the first token on, in both."""
    # So that they end when this process is told to.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(signals.exit_code(number)))
    with (
        contextlib.ExitStack() as stack,
        (directory / "engine.log").open("ab") as engine_log,
        (directory / "mlx-lm.log").open("ab") as mlx_lm_log,
    ):
        store = stack.enter_context(start_cachestore(directory, budget="2GiB"))
        where = f"unix:{store.socket}"
        bits = [] if kv_bits is None else ["--kv-bits", str(kv_bits)]
        rows = bits or ["--cache-codec", codec]
        flags = ["--cachestore", where, *rows, "--prefill-step", str(step)]
        ours = MlxCachestore(model, flags, directory, engine_log)
        stack.callback(ours.stop)
        if bits:
            bits += ["--quantized-kv-start", "0"]
        theirs = MlxLm(model, ["--prefill-step-size", str(step), *bits], mlx_lm_log)
        stack.callback(theirs.stop)
        ours.ask([{"role": "user", "content": "Hello"}], 1)
        yield [theirs, ours]


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """What a stream of server-sent events says, comments left out."""
    assert response.status == http.HTTPStatus.OK, response.read()
    for line in response:
        field, _, value = line.decode().strip().partition(": ")
        if field == "data" and value != "[DONE]":
            yield json.loads(value)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
