"""Four clients, two engines and one store: mixed operations while the daemons die.

    python -m tests.soak [--operations 20000] [--seed 0] [--json] [--plot docs/soak.svg]

Every token of every reply is compared with what tests/support/fingerprints.py foretells, and at
rest nothing may be left: no claim on the store, no descriptor, no thread, no growing memory.
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import tests.support.mlx  # noqa: F401 - before anything imports MLX
from tests.soak import plot
from tests.soak.operations import Kind
from tests.soak.run import CLIENTS, Outcome, run
from tests.soak.watch import Growth

MATCHES = ("exact", "supersequence", "prefix", "lcp", "miss")


def report(outcome: Outcome) -> dict[str, Any]:
    operations: dict[str, dict[str, int]] = {kind.value: {} for kind in Kind}
    for (kind, how), count in outcome.outcomes.items():
        operations[kind.value][how] = count
    deaths = Counter(f"{death.place} {death.number.name}" for _, death in outcome.restarts)
    # Of each store its last counters: those of one that was killed are at most half a second old.
    stores = {sample.life: sample.stats for sample in outcome.watch.store_samples}.values()
    return {
        "operations": operations,
        "tokens_checked": outcome.tokens_checked,
        "seconds": round(outcome.watch.store_samples[-1].seconds),
        "deaths": dict(deaths),
        "lookups": {name: sum(getattr(s.lookups, name) for s in stores) for name in MATCHES},
        "tokens_served": sum(s.lookups.tokens_served for s in stores),
        "tokens_requested": sum(s.lookups.tokens_requested for s in stores),
        "commits": sum(s.writes.committed for s in stores),
        "evictions": sum(s.evictions for s in stores),
        "at_rest": [_growth(growth) for growth in outcome.growths],
    }


def _growth(growth: Growth) -> dict[str, Any]:
    return {
        "process": growth.place,
        "operations": growth.operations,
        "memory_mib": [round(b / (1 << 20), 1) for b in growth.memory_bytes],
        "descriptors": growth.descriptors,
        "threads": growth.threads,
    }


def tables(found: dict[str, Any]) -> list[Table]:
    outcomes = sorted({how for row in found["operations"].values() for how in row})
    total = sum(sum(row.values()) for row in found["operations"].values())
    operations = Table(title=f"{total:,} operations of {CLIENTS} clients in {found['seconds']} s")
    for name in ("", *outcomes):
        operations.add_column(name, justify="right" if name else "left")
    for kind, row in found["operations"].items():
        operations.add_row(kind, *(f"{row.get(how, 0):,}" for how in outcomes))
    counters = Table(title="What happened", show_header=False)
    for name in ("tokens_checked", "commits", "evictions"):
        counters.add_row(name.replace("_", " "), f"{found[name]:,}")
    for group in ("lookups", "deaths"):
        for name, count in found[group].items():
            counters.add_row(f"{group}: {name}", f"{count:,}")
    rest = Table(title="At rest, second and last third of a process's life")
    for name in ("process", "operations", "private MiB", "descriptors", "threads"):
        rest.add_column(name, justify="left" if name == "process" else "right")
    for row in found["at_rest"]:
        spans = (row["memory_mib"], row["descriptors"], row["threads"])
        rest.add_row(row["process"], f"{row['operations']:,}", *(f"{a} to {b}" for a, b in spans))
    return [operations, counters, rest]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--operations", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="memory over time, SVG")
    options = parser.parse_args()
    outcome = run(options.operations, options.seed)
    found = report(outcome)
    if options.plot is not None:
        options.plot.write_text(plot.svg(outcome))
    console = Console()
    if options.json:
        console.print_json(json.dumps(found))
    else:
        console.print(*tables(found), sep="\n")


if __name__ == "__main__":
    main()
