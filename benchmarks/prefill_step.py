"""How many prompt tokens to compute in one forward: alone, and while other rows decode.

    python -m benchmarks.prefill_step --model smollm2 [--tokens 1536] [--rows 4] [--json]

For each step: time of a cold prompt that has the engine for itself, and the longest gap between
two tokens of rows that decode meanwhile. PREFILL_STEPS in engine/config.py comes from this.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from engine import backend

backend.prepare()

import numpy as np  # noqa: E402

from engine.batch import Batch, BatchMode, BatchShape  # noqa: E402
from engine.config import PrefillStep  # noqa: E402
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


def measure(model: Any, vocabulary: int, step: int, tokens: int, rows: int) -> Measured:
    shape = BatchShape(BatchMode.BATCHED, rows + 1, PrefillStep(step, step))
    batch = Batch(model, shape)
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
    return Measured(step, alone, beside, longest, longest / float(np.median(plain)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=1536, help="prompt length (1536)")
    parser.add_argument("--rows", type=int, default=4, help="rows that decode meanwhile (4)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    device = backend.describe()
    backend.apply_memory_limits(backend.memory_limits(device))
    loaded = load(ModelSpec(options.model), device)
    steps = [step for step in STEPS if step <= 2 * options.tokens]
    # The first run pays for pages and kernels.
    measure(loaded.model, loaded.vocabulary_tokens, steps[0], 64, 1)
    found = [
        measure(loaded.model, loaded.vocabulary_tokens, step, options.tokens, options.rows)
        for step in steps
    ]
    if options.json:
        print(json.dumps([asdict(row) for row in found], indent=2))
        return
    title = f"{options.tokens} tokens, {options.rows} rows decoding, {device.device_name}"
    table = Table(title=title)
    for name in ("step", "alone", "beside", "longest gap", "gap / decode step"):
        table.add_column(name, justify="right")
    for row in found:
        table.add_row(
            str(row.step),
            f"{row.alone_seconds:.2f} s",
            f"{row.beside_seconds:.2f} s",
            f"{row.longest_gap_seconds:.2f} s",
            f"{row.gap_ratio:.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
