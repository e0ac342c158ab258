from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemons import Cachestore, short_directory, start_cachestore


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as path:
        yield path


@pytest.fixture
def daemon(directory: Path) -> Iterator[Cachestore]:
    with start_cachestore(directory) as running:
        yield running
