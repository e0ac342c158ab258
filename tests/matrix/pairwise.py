"""A few cells in which every two values that can meet do meet, chosen greedily."""

import itertools
from collections.abc import Sequence
from dataclasses import astuple
from random import Random
from typing import Any

from tests.matrix.cells import Cell

Pair = tuple[tuple[int, Any], tuple[int, Any]]

# Of the cells that have a pair that is missing, as many are looked at.
_CANDIDATES = 40


def pairs(cell: Cell) -> set[Pair]:
    """Each a value of one axis and a value of another one."""
    return set(itertools.combinations(enumerate(astuple(cell)), 2))


def pairwise(cells: Sequence[Cell], seed: int = 0) -> list[Cell]:
    """The same ones for the same seed, in the order of `cells`."""
    random = Random(seed)
    holders: dict[Pair, list[int]] = {}
    for index, cell in enumerate(cells):
        for pair in pairs(cell):
            holders.setdefault(pair, []).append(index)
    missing = set(holders)
    chosen = set()
    for pair in sorted(holders, key=lambda pair: (len(holders[pair]), str(pair))):
        if pair in missing:
            of = holders[pair]
            candidates = random.sample(of, min(len(of), _CANDIDATES))
            best = max(candidates, key=lambda index: len(pairs(cells[index]) & missing))
            chosen.add(best)
            missing -= pairs(cells[best])
    return [cells[index] for index in sorted(chosen)]
