from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.beside import beside_a_good_client, sound_store
from tests.support.daemons import Cachestore, start_cachestore


@pytest.fixture
def daemon(directory: Path) -> Iterator[Cachestore]:
    with start_cachestore(directory) as running:
        yield running


@pytest.fixture(scope="module")
def running() -> Iterator[Cachestore]:
    with sound_store() as running:
        yield running


@pytest.fixture
def beside(running: Cachestore) -> Iterator[Cachestore]:
    """The daemon of this module, while a good client uses it."""
    with beside_a_good_client(running):
        yield running
