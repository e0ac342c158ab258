"""What one request came to: the line in the log, and what is counted."""

import asyncio
import contextlib
import enum
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from cachestore import logs
from engine.request import Delta, Done, Event
from engine.v1 import engine_pb2 as pb

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

# A deadline passes at the client first, which began to count before the request was on its way,
# and its cancellation may be here before ours has passed.
DEADLINE_SLACK_SECONDS = 0.1


class Outcome(enum.Enum):
    """How a request ended; the fields of Outcomes in the proto."""

    STOP = "stop"
    LENGTH = "length"
    WARMED = "warmed"
    CANCELLED = "cancelled"
    FAILED = "failed"
    INVALID = "invalid"
    BUSY = "busy"
    UNAVAILABLE = "unavailable"


# Of requests without a reply; any other status is FAILED.
_OUTCOMES = {
    grpc.StatusCode.CANCELLED: Outcome.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED: Outcome.CANCELLED,
    grpc.StatusCode.INVALID_ARGUMENT: Outcome.INVALID,
    grpc.StatusCode.NOT_FOUND: Outcome.INVALID,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Outcome.BUSY,
    grpc.StatusCode.UNAVAILABLE: Outcome.UNAVAILABLE,
}


@dataclass(slots=True)
class Account:
    """Of one Generate or Warm, from its arrival at `began` to its end, on the event loop.

    `prompt_tokens` is None until the prompt is encoded, and `done` unless the request ended well.
    """

    request_id: int
    method: str
    prompt: pb.Prompt
    began: float
    prompt_tokens: int | None = None
    generated_tokens: int = 0
    first_token_seconds: float | None = None
    done: Done | None = None
    status: grpc.StatusCode = grpc.StatusCode.OK
    # What the client was told with the status. It may quote the request.
    details: str = ""
    seconds: float = 0.0
    # Text of the reply, where it is to be logged.
    reply: list[str] = field(default_factory=list)

    def take(self, event: Event, now: float, keep_text: bool) -> None:
        """The next event that is sent."""
        if isinstance(event, Done):
            self.done = event
        elif isinstance(event, Delta):
            self.generated_tokens += len(event.token_ids)
            if self.first_token_seconds is None:
                self.first_token_seconds = now - self.began
            if keep_text:
                self.reply.append(event.text)

    @property
    def outcome(self) -> Outcome:
        """Once it is over."""
        if self.done is None:
            return _OUTCOMES.get(self.status, Outcome.FAILED)
        return Outcome.WARMED if self.method == "Warm" else Outcome(self.done.reason.value)

    def usage(self) -> dict[str, object]:
        """Without a Done, as far as it is known: nobody says then what was cached."""
        if self.done is None:
            return {
                "prompt_tokens": self.prompt_tokens,
                "generated_tokens": self.generated_tokens,
            }
        usage, timing = self.done.usage, self.done.timing
        return {
            "finish": self.done.reason.value if self.method == "Generate" else None,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "match": "unavailable" if usage.match is None else usage.match.name.lower(),
            "computed_tokens": usage.prompt_tokens - usage.cached_tokens,
            "generated_tokens": usage.completion_tokens,
            "stored_tokens": self.done.stored_tokens if self.method == "Warm" else None,
            "queue_seconds": round(timing.queue_ms / 1000, 4),
        }


class Accounts:
    """Opens one for each request; counts it when the request is over, and logs it with `lines`.

    With `prompts` the line has prompt, reply and what the client was told; else nothing of them
    is ever logged.
    """

    def __init__(self, lines: bool, prompts: bool) -> None:
        self._lines = lines
        self.prompts = prompts
        self.outcomes = dict.fromkeys(Outcome, 0)

    @contextlib.contextmanager
    def of(
        self, request_id: int, method: str, prompt: pb.Prompt, context: Context
    ) -> Iterator[Account]:
        """The account of a request that runs in the body, which ends with it in any way."""
        account = Account(request_id, method, prompt, time.monotonic())
        try:
            yield account
        except grpc.aio.AbortError:
            account.status, account.details = context.code(), context.details()
            raise
        except (asyncio.CancelledError, GeneratorExit):
            left = context.time_remaining()
            over = left is not None and left <= DEADLINE_SLACK_SECONDS
            codes = grpc.StatusCode
            account.status = codes.DEADLINE_EXCEEDED if over else codes.CANCELLED
            raise
        except BaseException:
            account.status = grpc.StatusCode.UNKNOWN
            raise
        finally:
            account.seconds = time.monotonic() - account.began
            self.outcomes[account.outcome] += 1
            if self._lines:
                logs.event(log, "request", self._fields(account))

    def _fields(self, account: Account) -> dict[str, object]:
        first = account.first_token_seconds
        fields = {
            "id": account.request_id,
            "method": account.method,
            "status": account.status.name,
            **account.usage(),
            "first_token_seconds": None if first is None else round(first, 4),
            "total_seconds": round(account.seconds, 4),
        }
        if self.prompts:
            fields |= {
                "details": account.details or None,
                "prompt": _plain(account.prompt),
                "reply": "".join(account.reply),
            }
        return {name: value for name, value in fields.items() if value is not None}


def _plain(prompt: pb.Prompt) -> object:
    match prompt.WhichOneof("input"):
        case "text":
            return prompt.text
        case "chat":
            return [{"role": each.role, "content": each.content} for each in prompt.chat.messages]
        case "token_ids":
            return list(prompt.token_ids.ids)
    return None
