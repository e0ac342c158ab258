"""What commands that ask an engine share: flags, the engine that answers, a reply as it comes."""

import argparse
import contextlib
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

import grpc

from cachestore import endpoint
from cachestore.flags import whole
from engine import config, kvflags, signals
from engine.config import Listen, parse_listen
from engine.flags import ConfigError, bias, model_name, text_of, utf8
from engine.remote import EngineAway, EngineProcess, connect, loads, model_of
from engine.request import InvalidRequest, ModelLimits, request_from
from engine.v1 import engine_pb2 as pb
from engine.v1 import engine_pb2_grpc

_POLL_SECONDS = 0.25
# Of a model that takes whatever a message can say.
_LARGEST = ModelLimits(2**33, 2**32, frozenset())
# What a refusal begins with.
_FIELD = re.compile(r"^(?:sampling\.)?(\w+)")
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("repetition_penalty", "repetition_context_size"),
    *("presence_penalty", "presence_context_size"),
    *("frequency_penalty", "frequency_context_size"),
)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that say whom to ask, and how one that is started holds rows."""
    parser.add_argument(
        "--engine", metavar="ADDRESS", help="unix:PATH or HOST:PORT (default: ours)"
    )
    parser.add_argument(
        "--model",
        type=model_name,
        help="what to serve when no engine runs, and what a running one must serve "
        f"(default: what runs, else {config.MODEL_DEFAULT})",
    )
    kvflags.add_flags(parser)


def add_asking_flags(parser: argparse.ArgumentParser) -> None:
    """Those, and flags that say what to ask and how to sample."""
    system = parser.add_mutually_exclusive_group()
    system.add_argument(
        "--system",
        type=utf8,
        default="",
        metavar="TEXT",
        help="system message (default: none)",
    )
    system.add_argument(
        "--system-file",
        dest="system",
        type=text_of,
        default=argparse.SUPPRESS,  # that of --system, which is no file
        metavar="FILE",
        help="system message, in a file: all of it, as `engine warm FILE` keeps it (default: none)",
    )
    parser.add_argument(
        "--max-tokens",
        type=whole(1),
        metavar="N",
        help=f"tokens of a reply at most (default: {config.MAX_TOKENS_DEFAULT}, or what the "
        "context leaves)",
    )
    parser.add_argument(
        "--stop",
        type=utf8,
        action="append",
        default=[],
        metavar="TEXT",
        help="a reply ends before this text; may be given again for others (default: none)",
    )
    _add_sampling_flags(parser)
    add_engine_flags(parser)


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    def number(flag: str, effect: str) -> None:
        parser.add_argument(flag, type=float, metavar="X", help=effect)

    def count(flag: str, effect: str, most: int = 2**32 - 1) -> None:
        parser.add_argument(flag, type=whole(0, most), metavar="N", help=effect)

    number("--temperature", "0: the best token, greedily; larger: more random (default: 0)")
    number("--top-p", "choose of the best tokens that together are so probable (default: off)")
    count("--top-k", "choose of so many best tokens; 0: off (default: 0)")
    number(
        "--min-p",
        "choose of tokens with so large a part of the best one's probability (default: 0)",
    )
    count("--seed", "of the choice; the same one gives the same reply (default: random)", 2**64 - 1)
    for kind, effect in (
        ("repetition", "divides positive logits of tokens that occurred, multiplies negative ones"),
        ("presence", "subtracted from the logits of tokens that occurred"),
        ("frequency", "subtracted for each time that a token occurred"),
    ):
        number(f"--{kind}-penalty", f"{effect} (default: off)")
        count(
            f"--{kind}-context-size",
            f"the last tokens that it looks at (default: {config.PENALTY_CONTEXT_DEFAULT})",
        )
    parser.add_argument(
        "--logit-bias",
        type=bias,
        action="append",
        default=[],
        metavar="TOKEN=X",
        help="added to the logit of this token id; may be given again for others (default: none)",
    )


def request_of(flags: argparse.Namespace, logprobs: int | None = None) -> pb.GenerateRequest:
    """What the flags say, without a prompt. Raises ConfigError for what no engine serves: better
    now than by one that has loaded a model for it."""
    request = pb.GenerateRequest(
        model=flags.model or "",
        sampling=pb.Sampling(
            **{name: getattr(flags, name) for name in _SAMPLING}, logit_bias=dict(flags.logit_bias)
        ),
        max_tokens=flags.max_tokens,
        stop=flags.stop,
        logprobs=logprobs,
    )
    try:
        request_from(request, [0], _LARGEST)
    except InvalidRequest as error:
        raise ConfigError(_FIELD.sub(_flag, str(error))) from None
    return request


def _flag(field: "re.Match[str]") -> str:
    return "--" + field[1].replace("_", "-")


@contextlib.contextmanager
def answering(flags: argparse.Namespace) -> Iterator[engine_pb2_grpc.EngineStub]:
    """An engine that answers while the body runs: the running one, or, unless --engine names one,
    one that ends with the body. Raises EngineAway, ConfigError and EndpointError."""
    if flags.engine is not None:
        if flags.model is not None:
            raise ConfigError("--engine starts nothing that --model could name; leave --model out")
        kvflags.refuse(flags, "--engine starts no engine")
    address = f"unix:{endpoint.engine_socket()}" if flags.engine is None else flags.engine
    listen = parse_listen(address, "--engine")
    words = kvflags.serve_words(flags.model or config.MODEL_DEFAULT, listen, flags)
    with contextlib.ExitStack() as stack:
        found = _found(listen)
        if found is not None and flags.model not in (None, found.name):
            raise EngineAway(
                f"the engine at {listen} serves {found.name}, not {flags.model}: leave --model "
                "out to ask it, or end it first"
            )
        if found is not None:
            kvflags.refuse(flags, f"an engine runs already at {listen}")
        else:
            if flags.engine is not None:
                raise EngineAway(
                    f"no engine answers at {listen}; start one: engine serve --model MODEL "
                    f"--listen {listen}"
                )
            for number in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, _leave)
            started = EngineProcess(listen, words)
            stack.callback(started.stop)
            started.wait_ready()
        yield stack.enter_context(connect(listen))


def _found(listen: Listen) -> pb.GetModelResponse | None:
    """What the engine at this address serves, once it has loaded that; None when none is there."""
    said = False
    while (found := model_of(listen)) is None and loads(listen):
        if not said:
            sys.stderr.write(
                f"The engine at {listen} is still loading its model; waiting for it.\n"
            )
            said = True
        time.sleep(_POLL_SECONDS)
    return found


def said_why(error: EngineAway | grpc.RpcError) -> int:
    """Say in one line why there is no answer; the exit code."""
    why = str(error)
    if isinstance(error, grpc.RpcError):
        assert isinstance(error, grpc.Call)
        why = f"{error.code().name}: {error.details()}"
    sys.stderr.write(f"error: {why}\n")
    return 1


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    """Unwinds, so that the engine that was started here does not stay behind."""
    sys.exit(signals.exit_code(number))


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole reply, with times as the client saw them. `logprobs`: one for each of `token_ids`,
    or empty."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[pb.TokenLogprobs, ...]
    done: pb.Done
    ttft_seconds: float
    seconds: float

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens after the first one, by the time they took; 0 when there is only one."""
        tokens = self.done.usage.completion_tokens - 1
        decode = self.seconds - self.ttft_seconds
        return tokens / decode if tokens > 0 and decode > 0 else 0.0

    def summary(self) -> str:
        """What it cost, in a line."""
        usage = self.done.usage
        return (
            f"{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} cached; first token after "
            f"{1000 * self.ttft_seconds:.0f} ms; {usage.completion_tokens} tokens at "
            f"{self.decode_tokens_per_second:.1f}/s"
        )


class Reply:
    """A reply as it comes. `text` is what has come, also when it was cancelled or failed."""

    def __init__(self, stub: engine_pb2_grpc.EngineStub, request: pb.GenerateRequest) -> None:
        self._began = time.monotonic()
        self._first: float | None = None
        self._done: pb.Done | None = None
        self._token_ids: list[int] = []
        self._logprobs: list[pb.TokenLogprobs] = []
        self._call = stub.Generate(request)
        self.text = ""

    def pieces(self) -> Iterator[str]:
        """Its text; raises grpc.RpcError."""
        for message in self._call:
            if message.HasField("done"):
                self._done = message.done
                continue
            self._first = self._first or time.monotonic()
            self.text += message.delta.text
            self._token_ids += message.delta.token_ids
            self._logprobs += message.delta.logprobs
            yield message.delta.text

    def cancel(self) -> None:
        self._call.cancel()

    def answer(self) -> Answer:
        """All of it, once the pieces have ended."""
        assert self._done is not None, "the stream ended with OK and without Done"
        ended = time.monotonic()
        first = self._first or ended
        return Answer(
            self.text,
            tuple(self._token_ids),
            tuple(self._logprobs),
            self._done,
            first - self._began,
            ended - self._began,
        )


def ask(listen: Listen, request: pb.GenerateRequest) -> Answer:
    """Send it and collect the reply; raises grpc.RpcError."""
    with connect(listen) as stub:
        reply = Reply(stub, request)
        for _ in reply.pieces():
            pass
        return reply.answer()
