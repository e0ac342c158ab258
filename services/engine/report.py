"""What a tool for people found: a table on the terminal, and JSON and a picture in files."""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from engine.flags import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Without a terminal rich has 80 columns, which would cut numbers.
_PIPE_COLUMNS: Final = 160
CODEC_FLAG: Final = "--codec"
_PICTURES: Final = (".png", ".svg", ".pdf")

# Heading of a column -> what it shows of a row.
Columns = Mapping[str, Callable[[Any], str]]


def add_codec_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        CODEC_FLAG,
        nargs="+",
        action="extend",
        metavar="CODEC",
        help="one or more codecs; may be repeated; an r behind a name, as in q4r, puts a Hadamard "
        "rotation before the quantizer (default: all plain ones that fit, and q4r)",
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write a list of objects, one a row, there"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw a picture there (needs mlx-cachestore[plot])",
    )


def check(flags: argparse.Namespace) -> None:
    """Raises ConfigError for files that could not be written, before anything is measured."""
    for flag, path in (("--json", flags.json), ("--plot", flags.plot)):
        if path is None:
            continue
        if path.is_dir() or not path.parent.is_dir():
            raise ConfigError(f"{flag} {path}: not a file in a folder that exists")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"{flag} {path}: may not be written")
    if flags.plot is None:
        return
    if flags.plot.suffix.lower() not in _PICTURES:
        raise ConfigError(f"--plot {flags.plot}: end its name in one of {', '.join(_PICTURES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'mlx-cachestore[plot]'")


@contextmanager
def progress(what: str, steps: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr, on a terminal only; call what it gives after each step."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=steps)
        yield lambda: bar.advance(task)


def publish(
    flags: argparse.Namespace,
    title: str,
    columns: Columns,
    rows: Sequence[Any],
    draw: "Callable[[Figure, Sequence[Any]], None]",
) -> None:
    """Prints dataclass instances, and writes the files that the flags name. Raises ConfigError."""
    _print(title, columns, rows)
    try:
        if flags.json is not None:
            text = json.dumps([asdict(row) for row in rows], indent=2)
            flags.json.write_text(text + "\n", encoding="utf-8")
        if flags.plot is not None:
            _plot(flags.plot, title, rows, draw)
    except OSError as error:
        raise ConfigError(f"--json or --plot: {error}") from None


def mark(axes: "Axes", x: float, y: float, name: str, colour: str) -> None:
    """A point with its name beside it."""
    axes.scatter(x, y, color=colour)
    axes.annotate(name, (x, y), xytext=(5, 5), textcoords="offset points")


def _print(title: str, columns: Columns, rows: Sequence[Any]) -> None:
    table = Table(title=title)
    for place, heading in enumerate(columns):
        table.add_column(heading, justify="right" if place else "left", no_wrap=place == 0)
    for row in rows:
        table.add_row(*(show(row) for show in columns.values()))
    chosen_by_user = sys.stdout.isatty() or "COLUMNS" in os.environ
    Console(highlight=False, width=None if chosen_by_user else _PIPE_COLUMNS).print(table)


def _plot(
    path: Path,
    title: str,
    rows: Sequence[Any],
    draw: "Callable[[Figure, Sequence[Any]], None]",
) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    # Without pyplot there is no window system to choose and nothing to close.
    figure = Figure(figsize=(12, 5), layout="constrained")
    figure.suptitle(title)
    draw(figure, rows)
    figure.savefig(path, dpi=120)
