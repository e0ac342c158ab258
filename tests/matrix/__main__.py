"""The matrix of docs/models.md: every way to be served from the cache, for every kind of cache."""

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from queue import Empty
from typing import Any

from rich.console import Console
from rich.progress import Progress

from engine.backend import describe
from tests.matrix.cells import ARCHITECTURES, Cell, all_cells
from tests.matrix.pairwise import pairwise
from tests.matrix.results import COMMAND, JSON, PAGE, Ran, Results, page
from tests.matrix.run import run

# A process that MLX runs in cannot be forked.
_CONTEXT = multiprocessing.get_context("spawn")
CONSOLE = Console(highlight=False, markup=False, soft_wrap=True)


def main() -> int:
    arguments = _parser().parse_args()
    path: Path = arguments.results
    if arguments.check:
        return check()
    if arguments.merge:
        results = Results.load(path)
        for other in arguments.merge:
            results.merge(Results.load(other))
        _write(results, path)
        return 0
    wanted = pairwise(all_cells()) if arguments.pairwise else all_cells()
    if arguments.only:
        wanted = [cell for cell in wanted if cell.architecture in arguments.only]
    if arguments.cell:
        tried = [cell for cell in wanted if str(cell) in arguments.cell]
        return keep(tried, arguments.jobs, Results(), None)
    results = Results.load(path)
    if not results.of_installed:
        results = Results()
    if arguments.missing:
        for known in (results, Results.load(JSON)):
            wanted = known.missing(describe().name, wanted)
    return keep(wanted, arguments.jobs, results, path)


def keep(wanted: Sequence[Cell], jobs: int, results: Results, path: Path | None) -> int:
    """Runs them. What ran is kept at once, for this may end at any moment."""
    backend = describe().name
    results.forget(backend, wanted)
    try:
        for name, ran in _run(wanted, jobs):
            results.add(name, backend, ran)
            if path is not None:
                results.save(path)
        for cell in results.missing(backend, wanted):
            results.add(cell.architecture, backend, Ran(cells={str(cell): "its process died"}))
    finally:
        if path is not None:
            _write(results, path)
    ran_there = results.on(backend)
    failures = {str(cell): ran_there[str(cell)] for cell in wanted if ran_there[str(cell)]}
    for cell_name, said in failures.items():
        CONSOLE.print(f"{cell_name}: {said}")
    CONSOLE.print(f"{len(failures)} of {len(wanted)} cells do not hold")
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--all", action="store_true", help="run every cell anew")
    what.add_argument(
        "--missing", action="store_true", help="run those that have not run on this backend yet"
    )
    what.add_argument("--pairwise", action="store_true", help="run those that CI runs")
    what.add_argument("--cell", nargs="+", metavar="CELL", help="try these cells, write nothing")
    what.add_argument(
        "--merge", nargs="+", type=_file, metavar="FILE", help="add results of another machine"
    )
    what.add_argument(
        "--check", action="store_true", help=f"whether docs/{PAGE.name} is of today's matrix"
    )
    parser.add_argument(
        "--only", nargs="+", choices=ARCHITECTURES, metavar="NAME", help="of these architectures"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=JSON,
        metavar="FILE",
        help=f"add what runs to this file, to bring it elsewhere (default: docs/{JSON.name})",
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    return parser


def _file(name: str) -> Path:
    path = Path(name)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{name} is not a file")
    return path


def check() -> int:
    results = Results.load()
    stale = results.stale()
    if not PAGE.exists() or PAGE.read_text() != page(results):
        stale.append(f"{PAGE.name} is not what {JSON.name} gives")
    for reason in stale:
        CONSOLE.print(f"{PAGE.name}: {reason}; run `{COMMAND}`")
    return 1 if stale else 0


def _write(results: Results, path: Path) -> None:
    results.save(path)
    if path == JSON:
        PAGE.write_text(page(results))


def _run(wanted: Sequence[Cell], jobs: int) -> Iterator[tuple[str, Ran]]:
    """By architecture, several at a time; what ran of one as soon as it did."""
    by_name: dict[str, list[Cell]] = {}
    for cell in wanted:
        by_name.setdefault(cell.architecture, []).append(cell)
    with (
        _CONTEXT.Manager() as manager,
        ThreadPoolExecutor(jobs) as threads,
        Progress(console=CONSOLE) as progress,
    ):
        bar = progress.add_task("cells", total=len(wanted))
        told: Any = manager.Queue()
        running = [threads.submit(_apart, name, of, told.put) for name, of in by_name.items()]
        try:
            while running or not told.empty():
                running = [each for each in running if not each.done() or each.result()]
                try:
                    name, ran = told.get(timeout=0.5)
                except Empty:
                    continue
                progress.advance(bar, len(ran.cells))
                yield name, ran
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def _apart(name: str, wanted: Sequence[Cell], tell: Callable[[tuple[str, Ran]], object]) -> None:
    """In a process of its own, which may die of what it runs."""
    with suppress(BrokenProcessPool), ProcessPoolExecutor(1, _CONTEXT) as pool:
        pool.submit(run, name, wanted, tell).result()


if __name__ == "__main__":
    sys.exit(main())
