"""The matrix has the cells that it says it has, and a selection meets every pair."""

import itertools

import pytest

from tests.matrix.cells import (
    ARCHITECTURES,
    CHECKPOINT_AT,
    Cell,
    Match,
    Reach,
    Rest,
    all_cells,
    cells,
    course,
)
from tests.matrix.pairwise import pairs, pairwise
from tests.support.zoo.window import WINDOW

ALL = all_cells()


def test_cells_are_of_every_architecture_and_unlike_each_other() -> None:
    assert {cell.architecture for cell in ALL} == set(ARCHITECTURES)
    assert len({str(cell) for cell in ALL}) == len(ALL)


@pytest.mark.parametrize("cell", list(cells("gemma3_text")), ids=str)
def test_a_course_is_what_its_cell_says(cell: Cell) -> None:
    planned, at = course(cell), CHECKPOINT_AT[cell.window]
    assert (at < WINDOW, at == WINDOW, at > WINDOW).index(True) == list(CHECKPOINT_AT).index(
        cell.window
    )
    assert at in planned.checkpoints
    earlier = [each for each in planned.checkpoints if each < at]
    expected = {Reach.BEFORE: max(earlier), Reach.AT: at, Reach.AFTER: at}[cell.reach]
    assert planned.cached(checkpointed=True) == expected
    assert planned.cached(checkpointed=False) == planned.matched
    left = planned.request - planned.matched
    assert (left == 1) is (cell.rest is Rest.ONE)
    ends = planned.shared == planned.sequence
    assert ends is (cell.match in (Match.EXACT, Match.PREFIX))
    assert (planned.other > 0) is (cell.match in (Match.PREFIX, Match.LCP))


def test_rows_can_be_cut_anywhere() -> None:
    for cell in cells("llama"):
        assert course(cell).cached(cell.checkpointed) == course(cell).matched


def test_a_selection_meets_every_pair_that_there_is() -> None:
    some = [cell for name in ("llama", "gemma3_text", "mamba2") for cell in cells(name)]
    chosen = pairwise(some)
    assert len(chosen) < len(some) / 10
    meet = set(itertools.chain.from_iterable(pairs(cell) for cell in some))
    assert set(itertools.chain.from_iterable(pairs(cell) for cell in chosen)) == meet
    assert pairwise(some) == chosen
