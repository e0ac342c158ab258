"""engine.v1.Engine on asyncio: checks requests, hands them to the worker, streams what comes back.

No MLX here. Encoding runs on a thread of its own: a long prompt must not stall other streams.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NoReturn

import grpc

from cachestore.client import MatchKind
from engine import config, pinning, stats
from engine.account import Account, Accounts, Context
from engine.checkpoints import UNKNOWN, Boundaries
from engine.prefix import Prefix
from engine.request import (
    Delta,
    Done,
    Event,
    Failed,
    FinishReason,
    InvalidRequest,
    ModelLimits,
    Request,
    Sink,
    Timing,
    TokenLogprobs,
    Usage,
    check_prompt,
    request_from,
)
from engine.tokenizer import PromptEncoder
from engine.v1 import engine_pb2 as pb
from engine.v1 import engine_pb2_grpc
from engine.worker import STOPPING, Snapshot, Worker, WorkerOver

_MATCHES = {
    MatchKind.EXACT: pb.CACHE_MATCH_EXACT,
    MatchKind.SUPERSEQUENCE: pb.CACHE_MATCH_SUPERSEQUENCE,
    MatchKind.PREFIX: pb.CACHE_MATCH_PREFIX,
    MatchKind.LCP: pb.CACHE_MATCH_LCP,
    MatchKind.MISS: pb.CACHE_MATCH_MISS,
    None: pb.CACHE_MATCH_UNAVAILABLE,
}
_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is served, as plain data: everything that handlers need of the loaded model."""

    name: str
    architecture: str
    dtype: str
    backend: str
    batch_mode: str
    limits: ModelLimits
    encoder: PromptEncoder
    # Whether only checkpoints can be gone on from: then requests say where their messages end.
    checkpointed: bool = False


@dataclass(frozen=True, slots=True)
class _Opened:
    """What is there once the model is loaded."""

    served: ServedModel
    prefix: Prefix


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A prompt."""

    tokens: list[int]
    boundaries: Boundaries = UNKNOWN


class EngineService(engine_pb2_grpc.EngineServicer):
    """One per process. Every call is UNAVAILABLE until `open`, and new requests from `drain` on."""

    def __init__(self, worker: Worker, accounts: Accounts) -> None:
        self._worker = worker
        self._accounts = accounts
        self._opened: _Opened | None = None
        self._ids = itertools.count(1)
        # Requests from their arrival on: a prompt that waits for its encoding takes room as well.
        self._present = 0
        self._running: dict[int, Sink] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._started = time.monotonic()
        self._encoding = ThreadPoolExecutor(1, thread_name_prefix="encode")

    def open(self, served: ServedModel, prefix: Prefix) -> None:
        """Begin to serve: the model is loaded."""
        self._opened = _Opened(served, prefix)

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        async with self._account("Generate", request.prompt, context) as account:
            with self._worker.preparing():
                prompt = await self._encode(request.model, request.prompt, context)
            account.prompt_tokens = len(prompt.tokens)
            try:
                checked = request_from(request, prompt.tokens, self._limits, prompt.boundaries)
            except InvalidRequest as error:
                await _abort(context, error)
            async with contextlib.aclosing(self._run(checked, context, account)) as events:
                async for event in events:
                    yield _generated(event)

    async def Warm(self, request: pb.WarmRequest, context: Context) -> pb.WarmResponse:
        async with self._account("Warm", request.prompt, context) as account:
            prefix = (await self._require(context)).prefix
            if request.pin:
                await pinning.require(prefix.status, context)
            with self._worker.preparing():
                prompt = await self._encode(request.model, request.prompt, context)
            account.prompt_tokens = len(prompt.tokens)
            try:
                check_prompt(prompt.tokens, self._limits)
            except InvalidRequest as error:
                await _abort(context, error)
            tokens = tuple(prompt.tokens)
            checked = Request(tokens, max_tokens=1, warm=True, boundaries=prompt.boundaries)
            async with contextlib.aclosing(self._run(checked, context, account)) as events:
                async for event in events:
                    if isinstance(event, Done):
                        return pb.WarmResponse(
                            usage=_usage(event.usage),
                            timing=_timing(event.timing),
                            stored_tokens=event.stored_tokens,
                            pinned=await pinning.keep(prefix, tokens, context)
                            if request.pin
                            else None,
                        )
        raise AssertionError("a request ended without Done or Failed")

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        async with self._place(context):
            prompt = await self._encode(request.model, request.prompt, context)
        return pb.TokenizeResponse(token_ids=prompt.tokens)

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        await self._require(context)
        return self.model()

    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsResponse:
        await self._require(context)
        try:
            snapshot = await asyncio.wrap_future(self._worker.snapshot())
        except WorkerOver as over:
            await context.abort(over.failed.code, over.failed.message)
        return self.stats(snapshot)

    def model(self) -> pb.GetModelResponse:
        """Once it is open."""
        assert self._opened is not None
        served, prefix = self._opened.served, self._opened.prefix.status
        return pb.GetModelResponse(
            name=served.name,
            architecture=served.architecture,
            context_tokens=served.limits.context_tokens,
            vocabulary_tokens=served.limits.vocabulary_tokens,
            eos_token_ids=sorted(served.limits.eos_token_ids),
            dtype=served.dtype,
            backend=served.backend,
            batch_mode=served.batch_mode,
            cache_codec=prefix.codec,
            not_cached_reason=prefix.not_cached_reason,
            namespace=prefix.namespace,
        )

    def stats(self, snapshot: Snapshot) -> pb.StatsResponse:
        """Once it is open. Any thread."""
        assert self._opened is not None
        uptime_seconds = time.monotonic() - self._started
        prefix = self._opened.prefix.status
        return stats.response(snapshot, prefix, self._accounts.outcomes, uptime_seconds)

    async def drain(self) -> None:
        """Refuse new requests; wait for the running ones."""
        self._draining = True
        await self._idle.wait()

    def fail_all(self, failed: Failed) -> None:
        """End every request with a status, without the worker."""
        for sink in self._running.values():
            sink(failed)

    def close(self) -> None:
        self._encoding.shutdown()

    @contextlib.asynccontextmanager
    async def _account(
        self, method: str, prompt: pb.Prompt, context: Context
    ) -> AsyncIterator[Account]:
        """Of a request that runs in the body and has a place as long."""
        with self._accounts.of(next(self._ids), method, prompt, context) as account:
            async with self._place(context):
                yield account

    @contextlib.asynccontextmanager
    async def _place(self, context: Context) -> AsyncIterator[None]:
        if self._present >= config.QUEUE_REQUESTS_MAX:
            message = f"{self._present} requests are running or queued already; try again later"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        self._present += 1
        try:
            yield
        finally:
            self._present -= 1

    @property
    def _limits(self) -> ModelLimits:
        assert self._opened is not None
        return self._opened.served.limits

    async def _require(self, context: Context) -> _Opened:
        if self._opened is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine is loading its model")
        return self._opened

    async def _encode(self, model: str, prompt: pb.Prompt, context: Context) -> _Encoded:
        served = (await self._require(context)).served
        if model and model != served.name:
            message = f"model: {model!r} is not served here; {served.name!r} is"
            await context.abort(grpc.StatusCode.NOT_FOUND, message)
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._encoding, _encode_prompt, served, prompt)
        except ValueError as error:
            await _abort(context, error)

    async def _run(
        self, request: Request, context: Context, account: Account
    ) -> AsyncGenerator[Delta | Done, None]:
        """The events of a request. Ending the iteration early cancels it."""
        if self._draining:
            await context.abort(STOPPING.code, STOPPING.message)
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def sink(event: Event) -> None:
            # The loop is closed only after a stop that waited for this request long enough.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(events.put_nowait, event)

        event: Event | None = None
        self._running[account.request_id] = sink
        self._idle.clear()
        try:
            self._worker.submit(account.request_id, request, sink)
            while not isinstance(event, Done):
                event = await events.get()
                if isinstance(event, Failed):
                    await context.abort(event.code, event.message)
                account.take(event, time.monotonic(), self._accounts.prompts)
                yield event
        finally:
            if not isinstance(event, Done | Failed):
                self._worker.cancel(account.request_id)
            del self._running[account.request_id]
            if not self._running:
                self._idle.set()


def _encode_prompt(served: ServedModel, prompt: pb.Prompt) -> _Encoded:
    encoder = served.encoder
    match prompt.WhichOneof("input"):
        case "text":
            return _Encoded(encoder.encode_text(prompt.text))
        case "chat":
            messages = [{"role": m.role, "content": m.content} for m in prompt.chat.messages]
            tokens = encoder.encode_chat(messages)
            if not served.checkpointed:
                return _Encoded(tokens)
            return _Encoded(tokens, encoder.boundaries(messages, tokens))
        case "token_ids":
            return _Encoded(encoder.encode_ids(prompt.token_ids.ids))
    raise ValueError("prompt: empty; set text, chat or token_ids")


async def _abort(context: Context, error: ValueError) -> NoReturn:
    """Of a request that cannot be served, or a prompt."""
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    raise AssertionError("abort raises")


def _generated(event: Delta | Done) -> pb.GenerateResponse:
    if isinstance(event, Delta):
        logprobs = [_logprobs(token) for token in event.logprobs]
        return pb.GenerateResponse(
            delta=pb.Delta(text=event.text, token_ids=event.token_ids, logprobs=logprobs)
        )
    return pb.GenerateResponse(
        done=pb.Done(
            finish_reason=_REASONS[event.reason],
            stop=event.stop,
            usage=_usage(event.usage),
            timing=_timing(event.timing),
        )
    )


def _logprobs(token: TokenLogprobs) -> pb.TokenLogprobs:
    top = [pb.Alternative(token_id=other.token, logprob=other.logprob) for other in token.top]
    return pb.TokenLogprobs(logprob=token.logprob, top=top)


def _usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        match=_MATCHES[usage.match],
    )


def _timing(timing: Timing) -> pb.Timing:
    return pb.Timing(
        queue_ms=timing.queue_ms,
        lookup_ms=timing.lookup_ms,
        attach_ms=timing.attach_ms,
        prefill_ms=timing.prefill_ms,
        decode_ms=timing.decode_ms,
    )
