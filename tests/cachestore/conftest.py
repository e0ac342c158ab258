from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemons import Cachestore, start_cachestore


@pytest.fixture
def daemon(directory: Path) -> Iterator[Cachestore]:
    with start_cachestore(directory) as running:
        yield running
