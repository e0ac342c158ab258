from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.cores import Driven
from tests.support.models import tiny_llama
from tests.support.served import Served, serve


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_llama()


@pytest.fixture
def driven(llama: Any) -> Driven:
    return Driven(llama)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve() as made:
        yield made
