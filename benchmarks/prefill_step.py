"""How many prompt tokens to compute in one forward: alone, and while other rows decode.

    python -m benchmarks.prefill_step --model smollm2 [--tokens 1536] [--rows 4] [--json FILE]

For each step: time of a cold prompt that has the engine for itself, and the longest gap between
two tokens of rows that decode meanwhile. PREFILL_STEPS in engine/config.py comes from this.
"""

import time
from dataclasses import dataclass

from benchmarks.measure import Columns, flags, median, publish, seconds
from engine import backend

backend.prepare()

import numpy as np  # noqa: E402

from engine.batch import Batch, BatchMode, BatchShape  # noqa: E402
from engine.config import PrefillStep  # noqa: E402
from engine.kv.live import LiveCaches  # noqa: E402
from engine.kv.start import live_caches  # noqa: E402
from engine.kvconfig import KvConfig  # noqa: E402
from engine.model import ModelSpec, load  # noqa: E402

STEPS = (32, 64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds; `gap_ratio` is the longest gap over a plain decode step of the same rows."""

    step: int
    alone_seconds: float
    beside_seconds: float
    longest_gap_seconds: float
    gap_ratio: float


def prompt(seed: int, length: int, vocabulary: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, vocabulary, length).tolist())


def until_first_token(batch: Batch, uid: int) -> tuple[float, float]:
    """Seconds to the first token of a row, and the longest step meanwhile."""
    began = time.perf_counter()
    longest = 0.0
    while True:
        step_began = time.perf_counter()
        tokens = batch.step().tokens
        longest = max(longest, time.perf_counter() - step_began)
        if any(token.uid == uid for token in tokens):
            return time.perf_counter() - began, longest


def measure(caches: LiveCaches, vocabulary: int, step: int, tokens: int, rows: int) -> Measured:
    shape = BatchShape(BatchMode.BATCHED, rows + 1, PrefillStep(step, step))
    batch = Batch(caches, shape)
    long = prompt(1, tokens, vocabulary)
    uid = batch.insert(long, None, 0, None)
    alone, _ = until_first_token(batch, uid)
    batch.remove([uid])
    for row in range(rows):
        until_first_token(batch, batch.insert(prompt(2 + row, 64, vocabulary), None, 0, None))
    plain = []
    for _ in range(8):
        began = time.perf_counter()
        batch.step()
        plain.append(time.perf_counter() - began)
    beside, longest = until_first_token(batch, batch.insert(long, None, 0, None))
    batch.close()
    return Measured(step, alone, beside, longest, longest / median(plain))


COLUMNS: Columns = {
    "step": lambda row: str(row.step),
    "alone": lambda row: seconds(row.alone_seconds),
    "beside": lambda row: seconds(row.beside_seconds),
    "longest gap": lambda row: seconds(row.longest_gap_seconds),
    "in decode steps": lambda row: f"{row.gap_ratio:.1f}",
}


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=1536, help="prompt length (1536)")
    parser.add_argument("--rows", type=int, default=4, help="rows that decode meanwhile (4)")
    options = parser.parse_args()
    if options.small:
        options.tokens, options.rows = 64, 2
    device = backend.describe()
    backend.apply_memory_limits(backend.memory_limits(device))
    loaded = load(ModelSpec(options.model), device)
    steps = [step for step in STEPS if step <= 2 * options.tokens]
    caches = live_caches(loaded.model, KvConfig(), rotate=False, device=device.name)
    # The first run pays for pages and kernels.
    measure(caches, loaded.vocabulary_tokens, steps[0], 64, 1)
    rows = [
        measure(caches, loaded.vocabulary_tokens, step, options.tokens, options.rows)
        for step in steps
    ]
    title = f"{options.tokens} tokens, {options.rows} rows decoding, {device.device_name}"
    publish(options, title, COLUMNS, rows)


if __name__ == "__main__":
    main()
