"""Runs the cells of one architecture, in a process of its own."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from tests.matrix.bench import Bench, bench
from tests.matrix.cells import Cell
from tests.matrix.results import Ran
from tests.support.daemons import short_directory, start_cachestore

_MESSAGE_CHARACTERS = 300


def run(name: str, wanted: Sequence[Cell], tell: Callable[[tuple[str, Ran]], object]) -> None:
    """All of one architecture; each is told as soon as it has run."""
    # Of transformers, which does not know all architectures.
    logging.disable(logging.WARNING)
    with short_directory() as directory, start_cachestore(directory) as store:
        for codec in dict.fromkeys(cell.codec for cell in wanted):
            said: dict[str, str] = {str(cell): "" for cell in wanted if cell.codec == codec}
            try:
                with bench(name, codec, store, directory) as running:
                    described = _described(running)
                    for cell in wanted:
                        if cell.codec == codec:
                            said[str(cell)] = _wrong(running, cell)
                            tell((name, replace(described, cells={str(cell): said[str(cell)]})))
            except Exception as error:
                # It does not start, or does not end: nothing that it said holds.
                wrong = f"no engine: {_text(error)}"
                tell((name, Ran(cells={cell: told or wrong for cell, told in said.items()})))


def _described(running: Bench) -> Ran:
    served = running.engine.engine.served
    assert served is not None
    reason = running.engine.prefix.status.not_cached_reason
    return Ran(served.batch_mode, running.layers, reason)


def _wrong(running: Bench, cell: Cell) -> str:
    try:
        running.assert_holds(cell)
    except Exception as error:
        return _text(error)
    return ""


def _text(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text.replace("|", "/").removeprefix("AssertionError: ")[:_MESSAGE_CHARACTERS]
