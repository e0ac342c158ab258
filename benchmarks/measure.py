"""What all benchmarks share: their flags, their table on the terminal and their JSON."""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

DISTRIBUTIONS = ("mlx-cachestore", "mlx", "mlx-lm", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13")

# Heading of a column -> what it shows of a row.
Columns = Mapping[str, Callable[[Any], str]]


def flags(doc: str) -> argparse.ArgumentParser:
    """A parser for a benchmark whose module begins with `doc`."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured there")
    parser.add_argument(
        "--small", action="store_true", help="seconds instead of minutes, and no figures to quote"
    )
    return parser


def publish(options: argparse.Namespace, title: str, columns: Columns, rows: Sequence[Any]) -> None:
    """Print dataclass instances as a table, and write them to the file that `--json` names."""
    table = Table(title=title)
    for place, heading in enumerate(columns):
        table.add_column(heading, justify="right" if place else "left")
    for row in rows:
        table.add_row(*(show(row) for show in columns.values()))
    # Without a terminal a line is 80 columns, which is too little.
    Console(width=None if sys.stdout.isatty() else 150).print(table)
    record(options, title, rows)


def record(options: argparse.Namespace, title: str, rows: Sequence[Any]) -> None:
    """Write dataclass instances to the file that `--json` names, if it does."""
    if options.json is None:
        return
    found = {
        "command": " ".join(
            ("python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:])
        ),
        "title": title,
        "machine": machine(),
        "rows": [asdict(row) for row in rows],
    }
    options.json.write_text(json.dumps(found, indent=2) + "\n")


def progress(text: str) -> None:
    """What is measured now, for whoever waits."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """Where and with what it was measured."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version for name in DISTRIBUTIONS if (version := _version(name))},
    }


def median(values: Iterable[float]) -> float:
    return float(statistics.median(values))


def seconds(value: float) -> str:
    """For a table: with three digits that mean something."""
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"


def mebibytes(value: float) -> str:
    return f"{value / (1 << 20):.1f} MiB"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
