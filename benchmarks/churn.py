"""Streams that never end beside a cache that never rests, against an engine that runs.

Each stream asks one thing after the other: half of the prompts are new, so that rows are stored
and older ones leave; the others begin with one of a few prefixes, so that rows are attached.
What it is for is what happens to the machine meanwhile (docs/verify-on-mac.md): it measures
little, and fails when a reply does.

    python -m benchmarks.churn --seconds 14400
"""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.measure import flags, progress, publish
from cachestore import endpoint
from engine.ask import ask
from engine.config import Listen, parse_listen
from engine.remote import model_of
from engine.v1 import engine_pb2 as pb

PREFIXES = 4
TELL_SECONDS = 60.0


@dataclass
class Row:
    """What one stream has done."""

    stream: int
    replies: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class Size:
    """Tokens of a prompt, and of a reply."""

    prompt: int
    reply: int


class Prompts:
    """Of one stream. Its prefixes are those of all streams."""

    def __init__(self, vocabulary: int, size: Size, seed: int) -> None:
        self._vocabulary, self._size = vocabulary, size
        self._random = random.Random(seed)
        shared = random.Random(0)
        self._prefixes = [self._ids(size.prompt // 2, shared) for _ in range(PREFIXES)]

    def next(self) -> list[int]:
        new = self._ids(self._size.prompt, self._random)
        if self._random.random() < 0.5:
            return new
        return (self._random.choice(self._prefixes) + new)[: self._size.prompt]

    def _ids(self, count: int, source: random.Random) -> list[int]:
        return [source.randrange(self._vocabulary) for _ in range(count)]


def keep_asking(row: Row, listen: Listen, prompts: Prompts, size: Size, until: float) -> None:
    """Raises grpc.RpcError for a reply that fails."""
    while time.monotonic() < until:
        prompt = pb.Prompt(token_ids=pb.TokenIds(ids=prompts.next()))
        request = pb.GenerateRequest(prompt=prompt, max_tokens=size.reply, ignore_eos=True)
        usage = ask(listen, request).done.usage
        row.replies += 1
        row.prompt_tokens += usage.prompt_tokens
        row.cached_tokens += usage.cached_tokens
        row.completion_tokens += usage.completion_tokens


def churn(listen: Listen, streams: int, seconds: float, size: Size) -> list[Row]:
    """Raises what a stream has met, once all have ended."""
    model = model_of(listen)
    if model is None:
        raise SystemExit(f"no engine answers at {listen}; start one with: engine serve")
    until = time.monotonic() + seconds
    rows = [Row(stream) for stream in range(1, streams + 1)]
    failures: list[BaseException] = []

    def run(row: Row) -> None:
        try:
            prompts = Prompts(model.vocabulary_tokens, size, row.stream)
            keep_asking(row, listen, prompts, size, until)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(row,)) for row in rows]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        threads[0].join(min(TELL_SECONDS, max(0.1, until - time.monotonic())))
        progress(f"{sum(row.replies for row in rows):,} replies")
    if failures:
        raise failures[0]
    return rows


COLUMNS: dict[str, Callable[[Row], str]] = {
    "stream": lambda row: str(row.stream),
    "replies": lambda row: f"{row.replies:,}",
    "prompt tokens": lambda row: f"{row.prompt_tokens:,}",
    "cached": lambda row: f"{row.cached_tokens:,}",
    "generated": lambda row: f"{row.completion_tokens:,}",
}


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--engine", metavar="ADDRESS", help="unix:PATH or HOST:PORT (ours)")
    parser.add_argument("--streams", type=int, default=2, help="at once (2)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="how long (3600)")
    parser.add_argument("--prompt-tokens", type=int, default=4000, help="of each prompt (4000)")
    parser.add_argument("--reply-tokens", type=int, default=200, help="of each reply (200)")
    options = parser.parse_args()
    size = Size(options.prompt_tokens, options.reply_tokens)
    if options.small:
        options.seconds, size = 5.0, Size(600, 5)
    listen = parse_listen(options.engine or f"unix:{endpoint.engine_socket()}", "--engine")
    rows = churn(listen, options.streams, options.seconds, size)
    publish(options, f"{options.streams} streams, {options.seconds:g} s", COLUMNS, rows)


if __name__ == "__main__":
    main()
