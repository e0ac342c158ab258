"""What it costs a running batch when rows come, go and grow: ours and mlx-lm's BatchGenerator.

    python -m benchmarks.join [--model smollm2] [--history 1000 4000 16000] [--rows 4]
                              [--running 1000] [--runs 3]

Both get the same history: arrays of exactly its rows, to which the caller keeps no reference; in
ours as attaching leaves them, in mlx-lm's as a prompt cache. Rows are random numbers, which take
as long as real ones. Both run in turn in one process, on the same weights.

    join    a row with a history and 16 tokens more joins rows that decode
    alone   the same into an empty batch
    leave   the row leaves again
    growth  rows reach the end of their buffers, which grow by 256

The plain step beside "join" is one of the rows that decode, before that.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.measure import Columns, flags, mebibytes, median, progress, publish, seconds
from engine import backend

backend.prepare()

import mlx.core as mx  # noqa: E402
from mlx_lm.generate import BatchGenerator  # noqa: E402
from mlx_lm.models.cache import KVCache  # noqa: E402
from tests.support.models import tiny_llama  # noqa: E402

from engine.batch import Batch, BatchMode, BatchShape  # noqa: E402
from engine.config import PrefillStep  # noqa: E402
from engine.kv import routing  # noqa: E402
from engine.kv.attention import DEFAULTS, Strategy  # noqa: E402
from engine.kv.history import FULL, JoiningKVCache  # noqa: E402
from engine.kv.layout import probe  # noqa: E402
from engine.kv.live import LiveCaches  # noqa: E402
from engine.model import ModelSpec, load  # noqa: E402

STEP = 256
REST = 16
# Growth is measured on a row that ends this much before the end of its buffer.
BEFORE_GROWTH = 6
NEVER = 1 << 60

# Keys and values of each layer.
Parts = list[tuple[mx.array, mx.array]]


class Batcher(Protocol):
    name: str
    # What its attention is, None: mlx-lm's own.
    attention: Strategy | None

    def insert(self, tokens: list[int], parts: Parts) -> int:
        """Add a row that continues these rows."""

    def step(self) -> dict[int, int]:
        """Rows that gave a token, and which."""

    def remove(self, uid: int) -> None: ...

    def close(self) -> None: ...


class Ours:
    name = "mlx-cachestore"
    attention: Strategy | None = DEFAULTS[backend.describe().name]

    def __init__(self, model: Any, rows_max: int) -> None:
        shape = BatchShape(BatchMode.BATCHED, rows_max, PrefillStep(STEP, STEP))
        self._batch = Batch(LiveCaches(model), shape)

    def insert(self, tokens: list[int], parts: Parts) -> int:
        cached = parts[0][0].shape[2]
        caches = [JoiningKVCache.of(FULL, layer, cached) for layer in parts]
        return self._batch.insert((*([0] * cached), *tokens), caches, cached, None)

    def step(self) -> dict[int, int]:
        return {token.uid: token.token for token in self._batch.step().tokens}

    def remove(self, uid: int) -> None:
        self._batch.remove([uid])

    def close(self) -> None:
        self._batch.close()


class Theirs:
    name = "mlx-lm"
    attention: Strategy | None = None

    def __init__(self, model: Any, rows_max: int) -> None:
        self._generator: Any = BatchGenerator(
            model,
            max_tokens=NEVER,
            completion_batch_size=rows_max + 1,
            prefill_batch_size=rows_max,
            prefill_step_size=STEP,
            stream=mx.default_stream(mx.default_device()),
        )

    def insert(self, tokens: list[int], parts: Parts) -> int:
        cached = parts[0][0].shape[2]
        caches: list[Any] = []
        for keys, values in parts:
            cache: Any = KVCache()
            cache.state = (keys, values, cached)
            caches.append(cache)
        (uid,) = self._generator.insert([tokens], caches=[caches], all_tokens=[[0] * cached])
        return int(uid)

    def step(self) -> dict[int, int]:
        return {response.uid: response.token for response in self._generator.next()[1]}

    def remove(self, uid: int) -> None:
        self._generator.remove([uid])

    def close(self) -> None:
        self._generator.close()


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the runs. `seconds`: from the event until the new row has given its first
    token, or else until the next step has ended. `gap`: the longest step from the event until
    three steps after that, which is how long a stream stood still; `plain`: what a step takes
    else. `peak`: the most memory above what was held before, and the new row's history was.
    `token`: the last one seen, which must not depend on the batcher."""

    event: str
    history_tokens: int
    batcher: str
    seconds: float
    gap_seconds: float
    plain_seconds: float
    peak_bytes: int
    history_bytes: int
    token: int


@dataclass(frozen=True, slots=True)
class Histories:
    """Random rows of this model's shape."""

    layers: int
    heads: int
    width: int
    dtype: mx.Dtype

    @classmethod
    def of(cls, model: Any) -> "Histories":
        (group,) = probe(LiveCaches(model)).groups
        keys = group.parts[0]
        return cls(len(group.layers), keys.heads, keys.width, keys.mlx_dtype)

    def make(self, tokens: int) -> Parts:
        shape = (1, self.heads, tokens, self.width)
        parts = [
            (mx.random.normal(shape, self.dtype), mx.random.normal(shape, self.dtype))
            for _ in range(self.layers)
        ]
        mx.eval(parts)
        return parts

    def nbytes(self, tokens: int) -> int:
        return 2 * self.layers * self.heads * self.width * self.dtype.size * tokens


@dataclass(frozen=True, slots=True)
class Seen:
    seconds: float
    gap_seconds: float
    plain_seconds: float
    peak_bytes: int
    token: int


def watch(batcher: Batcher, begin: Callable[[], int | None], steps: int = 4) -> Seen:
    """What `begin` costs, to the end of its event and `steps` in all beyond. It returns the row
    whose first token ends the event, if one does."""
    plain = median(_step_seconds(batcher) for _ in range(4))
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    began = step_began = time.perf_counter()
    uid = begin()
    gaps: list[float] = []
    ended: tuple[float, int] | None = None
    while steps:
        tokens = batcher.step()
        now = time.perf_counter()
        gaps.append(now - step_began)
        step_began = now
        if ended is None and (uid is None or uid in tokens):
            ended = now - began, tokens[uid] if uid is not None else min(tokens.values())
        steps -= ended is not None
    assert ended is not None
    return Seen(ended[0], max(gaps), plain, mx.get_peak_memory() - before, ended[1])


def _step_seconds(batcher: Batcher) -> float:
    began = time.perf_counter()
    batcher.step()
    return time.perf_counter() - began


def running(batcher: Batcher, histories: Histories, tokens: int, rows: int, rest: int) -> None:
    """Rows that decode."""
    uids = {batcher.insert(list(range(rest)), histories.make(tokens)) for _ in range(rows)}
    while not uids <= batcher.step().keys():
        pass


def events(
    model: Any, make: type[Ours] | type[Theirs], history: int, rows: int, tokens: int
) -> Iterator[tuple[str, Seen]]:
    histories = Histories.of(model)
    mx.random.seed(0)
    batcher: Batcher = make(model, rows + 1)
    joined = []

    def join(parts: Parts) -> int:
        joined.append(batcher.insert(list(range(REST)), parts))
        return joined[-1]

    # The function that is called holds the only reference, and gives it away.
    given = [histories.make(history)]
    yield "alone", watch(batcher, lambda: join(given.pop()))
    batcher.remove(joined.pop())
    running(batcher, histories, tokens, rows, REST)
    given = [histories.make(history)]
    yield "join", watch(batcher, lambda: join(given.pop()))
    yield "leave", watch(batcher, lambda: batcher.remove(joined.pop()))
    batcher.close()
    batcher = make(model, rows)
    # What is appended first makes room for 256 tokens.
    running(batcher, histories, history, rows, STEP - BEFORE_GROWTH)
    yield "growth", watch(batcher, lambda: None, steps=2 * BEFORE_GROWTH)
    batcher.close()


def measure(model: Any, histories: list[int], rows: int, tokens: int, runs: int) -> list[Row]:
    """`rows` decode behind `tokens` each."""
    found: dict[tuple[str, int, str], list[Seen]] = {}
    for history in histories:
        for run in range(runs):
            makes: list[type[Ours] | type[Theirs]] = [Theirs, Ours]
            for make in makes if run % 2 == 0 else makes[::-1]:
                progress(f"{history} tokens, run {run + 1} of {runs}, {make.name}")
                with routing.installed(make.attention):
                    for event, seen in events(model, make, history, rows, tokens):
                        found.setdefault((event, history, make.name), []).append(seen)
                mx.clear_cache()
    order = ("alone", "join", "leave", "growth")
    return [
        Row(
            event,
            history,
            name,
            median(seen.seconds for seen in runs_seen),
            median(seen.gap_seconds for seen in runs_seen),
            median(seen.plain_seconds for seen in runs_seen),
            int(median(seen.peak_bytes for seen in runs_seen)),
            Histories.of(model).nbytes(history),
            runs_seen[-1].token,
        )
        for (event, history, name), runs_seen in sorted(
            found.items(), key=lambda item: (order.index(item[0][0]), *item[0][1:])
        )
    ]


COLUMNS: Columns = {
    "": lambda row: row.event,
    "history": lambda row: f"{row.history_tokens}",
    "batcher": lambda row: row.batcher,
    "time": lambda row: seconds(row.seconds),
    "longest gap": lambda row: seconds(row.gap_seconds),
    "plain step": lambda row: seconds(row.plain_seconds),
    "peak": lambda row: mebibytes(row.peak_bytes),
    "history's bytes": lambda row: mebibytes(row.history_bytes),
}


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--history", type=int, nargs="+", default=[1000, 4000, 16000])
    parser.add_argument("--rows", type=int, default=4, help="that decode (4)")
    parser.add_argument(
        "--running", type=int, default=1000, metavar="TOKENS", help="behind so many (1000)"
    )
    parser.add_argument("--runs", type=int, default=3, help="runs of each, of which the median (3)")
    options = parser.parse_args()
    device = backend.describe()
    backend.apply_memory_limits(backend.memory_limits(device))
    if options.small:
        model, options.history, options.rows, options.runs = tiny_llama(), [64, 300], 2, 1
    else:
        model = load(ModelSpec(options.model), device).model
    rows = measure(model, options.history, options.rows, options.running, options.runs)
    title = f"{options.rows} rows decoding, medians of {options.runs}"
    publish(options, title, COLUMNS, rows)


if __name__ == "__main__":
    main()
