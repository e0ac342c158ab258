from pathlib import Path

import pytest

from tests.support.managers import Machine, launchd_machine, systemd_machine


@pytest.fixture
def mac(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return launchd_machine(directory, monkeypatch)


@pytest.fixture
def linux(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return systemd_machine(directory, monkeypatch)


@pytest.fixture(params=["mac", "linux"])
def machine(request: pytest.FixtureRequest) -> Machine:
    """Each of them."""
    found: Machine = request.getfixturevalue(request.param)
    return found
