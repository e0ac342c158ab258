"""Fixtures that several files share; each has a `stage` of its own."""

from collections.abc import Callable, Iterator

import pytest

from engine import link
from tests.support.liars import Deceived


@pytest.fixture
def assert_miss(stage: Deceived, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Tells a lie, and checks the reply; afterwards the truth is used again."""
    monkeypatch.setattr(link, "PAUSE_SECONDS", 0.0)
    yield stage.tell
    stage.assert_truth_is_used()
