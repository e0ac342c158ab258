"""Time to first token behind a prefix: cold, from the cachestore, and by mlx-lm in one process.

    python -m benchmarks.warm [--model smollm2 | --random windows | --random hybrid]
                              [--prefix 1000] [--rest 16] [--runs 5]

All in one run, with the same prefill step, and in turn: a run asks every engine once, so that what
else the machine does meets all of them. "mlx-lm" is generate_step behind a prompt cache that this
process kept and copied: no store, no copy between processes, no batch. "miss" is a cold prompt
that the store does not hold, against the same engine without one; beside it stands what the store
itself took of that time, from the question to the answer that there is nothing. "windows" (of
gemma3) and "hybrid" (of qwen3_next) are random models, which take checkpoints as they go.
"""

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.measure import Columns, flags, median, progress, publish, seconds
from engine import backend

backend.prepare()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from mlx_lm.generate import generate_step  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from tests.support.daemons import short_directory, start_cachestore  # noqa: E402
from tests.support.engines import InProcess, in_process  # noqa: E402
from tests.support.models import (  # noqa: E402
    gemma3_config,
    qwen3_next_config,
    save_tiny_model,
)

from engine.core import Core  # noqa: E402
from engine.kv import routing  # noqa: E402

CODECS = ("none", "q8")

# Wide enough that most of a prompt's time is its matrices, as with real ones.
WIDE = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 8}
RANDOM = {
    "windows": gemma3_config(window=512, **WIDE),
    "hybrid": qwen3_next_config(**WIDE, linear_num_value_heads=8, linear_num_key_heads=4),
}


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the runs, in seconds, and the ratio to the median called `of`.
    `store_seconds`: what the store took of it, before any row was copied."""

    name: str
    seconds: float
    of: str
    ratio: float
    store_seconds: float


@dataclass(frozen=True, slots=True)
class First:
    """Seconds to a first token, and of these until the store had answered."""

    seconds: float
    store_seconds: float


def ask(engine: InProcess, tokens: Sequence[int]) -> First:
    began = time.perf_counter()
    asked = engine.submit(tokens, max_tokens=2)
    engine.next_event(asked)
    ended = time.perf_counter()
    done = engine.finish(asked).done
    return First(ended - began, done.timing.lookup_ms / 1000)


def keep(engine: InProcess, prefix: Sequence[int]) -> list[Any]:
    """mlx-lm's prompt cache of a prefix, on the engine's own thread and weights."""

    def run(core: Core) -> list[Any]:
        kept = make_prompt_cache(core.caches.model)
        list(_steps(core, prefix, kept, max_tokens=0))
        return kept

    return list(engine.on_worker(run))


def ask_mlx_lm(engine: InProcess, kept: list[Any], rest: Sequence[int]) -> First:
    def run(core: Core) -> First:
        with routing.installed(None):
            began = time.perf_counter()
            cache = copy.deepcopy(kept)
            next(_steps(core, rest, cache, max_tokens=1))
            return First(time.perf_counter() - began, 0.0)

    found = engine.on_worker(run)
    assert isinstance(found, First)
    return found


def _steps(core: Core, tokens: Sequence[int], cache: list[Any], max_tokens: int) -> Iterator[Any]:
    return iter(
        generate_step(
            mx.array(list(tokens)),
            core.caches.model,
            max_tokens=max_tokens,
            prompt_cache=cache,
            prefill_step_size=core.shape.step.idle,
        )
    )


@contextmanager
def engines(model: str, budget: str) -> Iterator[dict[str, InProcess]]:
    """One without a store, and one for each codec, with a store of its own."""
    with ExitStack() as stack:
        found = {"no store": stack.enter_context(in_process(model, None))}
        for codec in CODECS:
            directory = stack.enter_context(short_directory())
            store = stack.enter_context(start_cachestore(directory, budget=budget))
            engine = in_process(model, store.socket, cache_codec=codec)
            found[codec] = stack.enter_context(engine)
        yield found


def measure(model: str, prefix_tokens: int, rest_tokens: int, runs: int) -> list[Row]:
    draw = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return [int(token) for token in draw.integers(0, 256, count)]

    prefix = tokens(prefix_tokens)
    found: dict[str, list[First]] = {}
    with engines(model, "1GiB") as by_name:
        plain = by_name["no store"]
        for engine in by_name.values():
            ask(engine, tokens(64))
            ask(engine, prefix)
        kept = keep(plain, prefix)

        def cold(engine: InProcess) -> Callable[[], First]:
            return lambda: ask(engine, tokens(prefix_tokens + rest_tokens))

        def hit(engine: InProcess) -> Callable[[], First]:
            return lambda: ask(engine, prefix + tokens(rest_tokens))

        def mlx_lm() -> First:
            return ask_mlx_lm(plain, kept, tokens(rest_tokens))

        calls = {"cold, no store": cold(plain), "mlx-lm, kept cache": mlx_lm}
        for codec in CODECS:
            calls[f"miss, {codec}"] = cold(by_name[codec])
            calls[f"hit, {codec}"] = hit(by_name[codec])
        for run in range(runs):
            progress(f"run {run + 1} of {runs}")
            # Another order each time: none always comes after the same other one.
            for name in draw.permutation(list(calls)):
                found.setdefault(str(name), []).append(calls[name]())
                for engine in (by_name[codec] for codec in CODECS):
                    engine.settle()
    return summary(found)


def summary(found: Mapping[str, Sequence[First]]) -> list[Row]:
    medians = {name: median(first.seconds for first in firsts) for name, firsts in found.items()}
    cold, kept = "cold, no store", "mlx-lm, kept cache"
    pairs = [(cold, cold), (kept, cold)]
    for codec in CODECS:
        pairs += [(f"miss, {codec}", cold), (f"hit, {codec}", cold), (f"hit, {codec}", kept)]
    return [
        Row(
            name,
            medians[name],
            of,
            medians[name] / medians[of],
            median(first.store_seconds for first in found[name]),
        )
        for name, of in pairs
    ]


COLUMNS: Columns = {
    "": lambda row: row.name,
    "first token": lambda row: seconds(row.seconds),
    "ratio": lambda row: f"{row.ratio:.3f}",
    "to": lambda row: row.of,
    "of it the store's answer": lambda row: seconds(row.store_seconds),
}


def main() -> None:
    parser = flags(__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", default="smollm2")
    which.add_argument("--random", choices=RANDOM, help="a random model with checkpoints instead")
    parser.add_argument("--prefix", type=int, default=1000, help="tokens of the prefix (1000)")
    parser.add_argument("--rest", type=int, default=16, help="tokens behind it (16)")
    parser.add_argument("--runs", type=int, default=5, help="runs of each, of which the median (5)")
    options = parser.parse_args()
    if options.small:
        options.prefix, options.runs = 100, 2
    with short_directory() as directory:
        model = options.model
        if options.random:
            model = str(save_tiny_model(directory / options.random, RANDOM[options.random]))
        rows = measure(model, options.prefix, options.rest, options.runs)
    title = f"Behind {options.prefix} tokens, {options.rest} more, medians of {options.runs}"
    publish(options, title, COLUMNS, rows)


if __name__ == "__main__":
    main()
