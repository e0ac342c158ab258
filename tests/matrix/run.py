"""Runs the cells of one architecture, in a process of its own."""

import logging
from collections.abc import Callable, Sequence

from tests.matrix.bench import Bench, bench
from tests.matrix.cells import Cell, cells
from tests.matrix.results import Architecture
from tests.support.daemons import short_directory, start_cachestore

_MESSAGE_CHARACTERS = 300


def run(name: str, wanted: Sequence[Cell], tick: Callable[[None], object]) -> Architecture:
    """All of one architecture; `tick` is called after each."""
    # Of transformers, which does not know all architectures.
    logging.disable(logging.WARNING)
    ran = Architecture("", [])
    with short_directory() as directory, start_cachestore(directory) as store:
        for codec in dict.fromkeys(cell.codec for cell in wanted):
            of_codec = [cell for cell in wanted if cell.codec == codec]
            try:
                with bench(name, codec, store, directory) as running:
                    _describe(ran, running)
                    for cell in of_codec:
                        _run_one(ran, running, cell)
                        tick(None)
            except Exception as error:
                # It does not start, or does not end: whatever has not run is wrong.
                for cell in of_codec:
                    ran.failures.setdefault(str(cell), f"no engine: {_said(error)}")
    ran.cells, ran.of = len(wanted), len(list(cells(name)))
    return ran


def _describe(ran: Architecture, running: Bench) -> None:
    served = running.engine.engine.served
    assert served is not None
    ran.mode = served.batch_mode
    ran.layers = running.layers
    ran.not_cached_reason = running.engine.prefix.status.not_cached_reason


def _run_one(ran: Architecture, running: Bench, cell: Cell) -> None:
    try:
        running.assert_holds(cell)
    except Exception as error:
        ran.failures[str(cell)] = _said(error)


def _said(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text.replace("|", "/").removeprefix("AssertionError: ")[:_MESSAGE_CHARACTERS]
