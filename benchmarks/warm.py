"""Time to first token behind a prefix: cold, from the cachestore, and by mlx-lm in one process.

    python -m benchmarks.warm [--model smollm2] [--prefix 1000] [--rest 16] [--runs 5] [--json]

All in one run, with the same prefill step. "mlx-lm" is generate_step behind a prompt cache that
this process kept and copied: no store, no copy between processes, no batch. "miss" is a cold
prompt with an empty store, against the same engine without one.
"""

import argparse
import copy
import json
import os
import queue
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from engine import backend

backend.prepare()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from mlx_lm.generate import generate_step  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from cachestore import client as cachestore_client  # noqa: E402
from engine.config import EngineConfig, Listen  # noqa: E402
from engine.core import Core  # noqa: E402
from engine.request import Delta, Event, Request  # noqa: E402
from engine.server import Engine  # noqa: E402

CODECS = ("none", "q8")


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians in seconds, and their ratio to `of`."""

    name: str
    seconds: float
    of: str
    ratio: float


class Asker:
    """Requests to an engine in this process, timed to their first token."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._next_id = 0

    def first_token_seconds(self, tokens: Sequence[int]) -> float:
        self._next_id += 1
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        began = time.perf_counter()
        self.engine.worker.submit(self._next_id, Request(tuple(tokens), max_tokens=2), events.put)
        event = events.get()
        seconds = time.perf_counter() - began
        assert isinstance(event, Delta), event
        while isinstance(event, Delta):
            event = events.get()
        return seconds

    def settle(self) -> None:
        """Wait until everything that was computed is stored."""
        prefix = self.engine.prefix
        assert prefix is not None
        prefix.drain()


@contextmanager
def engine_with(model: str, socket: Path | None = None, **cache: str) -> Iterator[Asker]:
    where = "off" if socket is None else f"unix:{socket}"
    settings = EngineConfig(model, Listen(None, "127.0.0.1:0"), where, **cache)
    engine = Engine(settings)
    engine.start()
    try:
        while (
            socket is not None and engine.prefix is not None and not engine.prefix.status.namespace
        ):
            time.sleep(0.01)
        yield Asker(engine)
    finally:
        engine.stop()


@contextmanager
def ended(socket: Path) -> Iterator[None]:
    """End the cachestore at `socket` afterwards."""
    try:
        yield
    finally:
        with cachestore_client.Client.connect(socket, role="admin") as client:
            os.kill(client.stats().pid, signal.SIGTERM)


def mlx_lm_seconds(asker: Asker, prefix: Sequence[int], rests: list[list[int]]) -> list[float]:
    """First tokens behind a kept cache, on the engine's own thread and weights."""
    answers: queue.SimpleQueue[list[float]] = queue.SimpleQueue()

    def run(core: Core) -> None:
        step = core.shape.step.idle
        kept = make_prompt_cache(core.model)
        for _ in generate_step(
            mx.array(list(prefix)),
            core.model,
            max_tokens=0,
            prompt_cache=kept,
            prefill_step_size=step,
        ):
            pass
        seconds = []
        for rest in rests:
            began = time.perf_counter()
            cache = copy.deepcopy(kept)
            for layer in cache:
                layer.trim(layer.offset - len(prefix))
            tokens = generate_step(
                mx.array(rest), core.model, max_tokens=1, prompt_cache=cache, prefill_step_size=step
            )
            next(iter(tokens))
            seconds.append(time.perf_counter() - began)
        answers.put(seconds)

    asker.engine.worker.post(run)
    return answers.get()


def measure(model: str, prefix_tokens: int, rest_tokens: int, runs: int) -> list[Measured]:
    draw = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return [int(token) for token in draw.integers(0, 256, count)]

    found: list[Measured] = []
    prefix = tokens(prefix_tokens)
    rests = [tokens(rest_tokens) for _ in range(runs)]
    with engine_with(model) as asker:
        asker.first_token_seconds(tokens(64))
        cold = [asker.first_token_seconds(tokens(prefix_tokens + rest_tokens)) for _ in rests]
        kept = mlx_lm_seconds(asker, prefix, rests)
    cold_seconds, kept_seconds = statistics.median(cold), statistics.median(kept)
    found.append(Measured("cold, no store", cold_seconds, "itself", 1.0))
    found.append(Measured("mlx-lm, kept cache", kept_seconds, "cold", kept_seconds / cold_seconds))
    for codec in CODECS:
        with tempfile.TemporaryDirectory(prefix="mc-", dir="/tmp") as name:
            socket = Path(name) / "cachestore.sock"
            cachestore_client.spawn(socket, "1GiB", 60, Path(name) / "log")
            with ended(socket), engine_with(model, socket, cache_codec=codec) as asker:
                asker.first_token_seconds(tokens(64))
                misses = [
                    asker.first_token_seconds(tokens(prefix_tokens + rest_tokens)) for _ in rests
                ]
                asker.first_token_seconds(prefix)
                asker.settle()
                warm = [asker.first_token_seconds(prefix + rest) for rest in rests]
        miss_seconds, warm_seconds = statistics.median(misses), statistics.median(warm)
        found.append(Measured(f"miss, {codec}", miss_seconds, "cold", miss_seconds / cold_seconds))
        found.append(Measured(f"hit, {codec}", warm_seconds, "cold", warm_seconds / cold_seconds))
        ratio = warm_seconds / kept_seconds
        found.append(Measured(f"hit, {codec}", warm_seconds, "mlx-lm, kept cache", ratio))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prefix", type=int, default=1000, help="tokens of the prefix (1000)")
    parser.add_argument("--rest", type=int, default=16, help="tokens behind it (16)")
    parser.add_argument("--runs", type=int, default=5, help="runs of each, of which the median (5)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.model, options.prefix, options.rest, options.runs)
    if options.json:
        print(json.dumps([asdict(row) for row in found], indent=2))
        return
    table = Table(title=f"First token behind {options.prefix} tokens, {options.rest} more")
    for name in ("", "first token", "ratio", "to"):
        table.add_column(name, justify="left" if name in ("", "to") else "right")
    for row in found:
        table.add_row(row.name, f"{1000 * row.seconds:.0f} ms", f"{row.ratio:.3f}", row.of)
    Console().print(table)


if __name__ == "__main__":
    main()
