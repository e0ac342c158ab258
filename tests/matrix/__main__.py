"""The matrix of docs/models.md: every way to be served from the cache, for every kind of cache."""

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from queue import Empty
from typing import Any

from rich.console import Console
from rich.progress import Progress

from tests.matrix.cells import ARCHITECTURES, Cell, all_cells, cells
from tests.matrix.pairwise import pairwise
from tests.matrix.results import COMMAND, JSON, PAGE, Architecture, Results, page
from tests.matrix.run import run

# A process that MLX runs in cannot be forked.
_CONTEXT = multiprocessing.get_context("spawn")
CONSOLE = Console(highlight=False, markup=False, soft_wrap=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--all", action="store_true", help="run every cell and write the results")
    what.add_argument("--pairwise", action="store_true", help="run those that CI runs instead")
    what.add_argument("--cell", nargs="+", metavar="CELL", help="try these cells, write nothing")
    what.add_argument(
        "--check", action="store_true", help=f"whether docs/{PAGE.name} is of today's matrix"
    )
    parser.add_argument(
        "--only", nargs="+", choices=ARCHITECTURES, metavar="NAME", help="of these architectures"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    arguments = parser.parse_args()
    if arguments.check:
        return check()
    wanted = pairwise(all_cells()) if arguments.pairwise else all_cells()
    if arguments.only:
        wanted = [cell for cell in wanted if cell.architecture in arguments.only]
    if arguments.cell:
        return _tell(_run([c for c in wanted if str(c) in arguments.cell], arguments.jobs))
    ran = _run(wanted, arguments.jobs)
    results = Results.load()
    results.update(ran)
    results.save()
    PAGE.write_text(page(results))
    return _tell(ran)


def check() -> int:
    results = Results.load()
    stale = results.stale()
    if not PAGE.exists() or PAGE.read_text() != page(results):
        stale.append(f"{PAGE.name} is not what {JSON.name} gives")
    for reason in stale:
        CONSOLE.print(f"{PAGE.name}: {reason}; run `{COMMAND}`")
    return 1 if stale else 0


def _run(wanted: Sequence[Cell], jobs: int) -> dict[str, Architecture]:
    """By architecture, several at a time."""
    by_name: dict[str, list[Cell]] = {}
    for cell in wanted:
        by_name.setdefault(cell.architecture, []).append(cell)
    with (
        _CONTEXT.Manager() as manager,
        ThreadPoolExecutor(jobs) as threads,
        Progress(console=CONSOLE) as progress,
    ):
        ticks: Any = manager.Queue()
        bar = progress.add_task("cells", total=len(wanted))
        running = {
            name: threads.submit(_apart, name, of, ticks.put) for name, of in by_name.items()
        }
        while not all(each.done() for each in running.values()):
            try:
                ticks.get(timeout=0.5)
            except Empty:
                continue
            progress.advance(bar)
        progress.update(bar, completed=len(wanted))
        return {name: each.result() for name, each in running.items()}


def _apart(name: str, wanted: Sequence[Cell], tick: Callable[[None], object]) -> Architecture:
    """In a process of its own, which may die of what it runs."""
    try:
        with ProcessPoolExecutor(1, _CONTEXT) as pool:
            return pool.submit(run, name, wanted, tick).result()
    except BrokenProcessPool as error:
        failures = {str(cell): f"the process died: {error}" for cell in wanted}
        return Architecture("", [], "", len(wanted), len(list(cells(name))), failures)


def _tell(ran: Mapping[str, Architecture]) -> int:
    failures = {cell: said for each in ran.values() for cell, said in each.failures.items()}
    for cell, said in failures.items():
        CONSOLE.print(f"{cell}: {said}")
    CONSOLE.print(
        f"{len(failures)} of {sum(each.cells for each in ran.values())} cells do not hold"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
