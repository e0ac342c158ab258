"""Law 1 in a pairwise selection of all cells; `python -m tests.matrix --all` runs every one."""

from collections.abc import Iterator

import pytest

from tests.matrix.bench import DEPENDS_ON_CUTS, OTHER_CUTS, Bench, bench
from tests.matrix.cells import ARCHITECTURES, NOT_CACHED, Cell, all_cells
from tests.matrix.pairwise import pairwise
from tests.support.daemons import Cachestore, short_directory, start_cachestore
from tests.support.engines import assert_same

SELECTED = pairwise(all_cells())


@pytest.fixture(scope="module")
def store() -> Iterator[Cachestore]:
    with short_directory() as directory, start_cachestore(directory) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, store: Cachestore) -> Iterator[Bench]:
    architecture, codec = request.param
    with short_directory() as directory, bench(architecture, codec, store, directory) as made:
        yield made


@pytest.mark.parametrize(
    ("running", "cell"),
    [((cell.architecture, cell.codec), cell) for cell in SELECTED],
    indirect=["running"],
    ids=[str(cell) for cell in SELECTED],
)
def test_cell(running: Bench, cell: Cell) -> None:
    running.assert_holds(cell)


@pytest.mark.parametrize(
    "running", [(name, "none") for name in ARCHITECTURES], indirect=True, ids=ARCHITECTURES
)
def test_the_second_turn_of_a_chat_hits(running: Bench) -> None:
    assert running.engine.engine.served is not None
    encoder = running.engine.engine.served.encoder
    messages = [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    asked = 0
    for turn in range(2):
        tokens = encoder.encode_chat(messages)
        boundaries = encoder.boundaries(messages, tokens)
        reply = running.engine.ask(tokens, max_tokens=4, boundaries=boundaries)
        running.engine.settle()
        if running.architecture not in DEPENDS_ON_CUTS:
            assert_same(reply, running.engine.alone(tokens), OTHER_CUTS)
        cached = reply.done.usage.cached_tokens
        if turn and running.architecture not in NOT_CACHED:
            # As far as the first prompt, though the reply comes back as text.
            assert cached >= asked - 1
        else:
            assert cached == 0
        asked = len(tokens)
        messages += [
            {"role": "assistant", "content": reply.text},
            {"role": "user", "content": "And of Italy?"},
        ]
