"""What systemctl says is passed on, with what to do."""

import pytest

from cachestore.deploy.service import CACHESTORE, NAMES, UNITS, DeployError
from tests.support.managers import Machine


def test_without_a_session_nothing_is_written(linux: Machine) -> None:
    linux.set(bus=False)
    with pytest.raises(DeployError, match=r"No medium found.*loginctl enable-linger"):
        linux.installer().install(linux.setup(), NAMES)
    assert not list(linux.place.home.iterdir())


@pytest.mark.parametrize("command", ["daemon-reload", "enable", "restart"])
def test_a_failed_command_is_reported_with_its_reason(linux: Machine, command: str) -> None:
    linux.set(faults={command: [1]})
    with pytest.raises(DeployError, match=rf"^systemctl --user {command}.*: Failed to {command}"):
        linux.installer().install(linux.setup(), NAMES)


def test_units_are_enabled_and_known_before_they_start(linux: Machine) -> None:
    linux.installer().install(linux.setup(), [CACHESTORE])
    made = linux.calls("daemon-reload", "enable", "restart")
    unit = UNITS[CACHESTORE]
    assert made == [["daemon-reload"], ["enable", unit], ["restart", "--no-block", unit]]
    assert linux.state["units"][unit]["enabled"]
