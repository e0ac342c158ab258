"""launchctl's commands fail in known ways, and return before they are done."""

import plistlib
import re
from pathlib import Path

import pytest

from cachestore.deploy.launchctl import Launchctl
from cachestore.deploy.place import launchd_place
from cachestore.deploy.service import CACHESTORE, ENGINE, LABELS, NAMES, DeployError, services
from cachestore.deploy.shell import Shell
from tests.support.managers import Machine

ONE = [CACHESTORE]


def test_an_old_service_is_awaited_before_the_new_one_is_loaded(mac: Machine) -> None:
    mac.installer().install(mac.setup(), ONE)
    mac.set(calls=[])
    mac.installer().install(mac.setup(budget="1GiB"), ONE)
    made = [call[0] for call in mac.calls("bootout", "bootstrap")]
    assert made == ["bootout", "bootstrap"]  # in time, so that it needed no second try
    loaded = mac.state["loaded"][LABELS[CACHESTORE]]
    assert "1GiB" in plistlib.loads(Path(loaded["path"]).read_bytes())["ProgramArguments"]


@pytest.mark.parametrize("codes", [[5], [37], [5, 37, 5]])
def test_loading_is_tried_again_when_launchd_was_not_ready(mac: Machine, codes: list[int]) -> None:
    mac.set(faults={"bootstrap": codes})
    mac.installer().install(mac.setup(), ONE)
    assert len(mac.pids()) == 1
    assert len(mac.calls("bootstrap")) == len(codes) + 1
    assert mac.now >= len(codes)


@pytest.mark.parametrize(("codes", "tries"), [([5] * 9, 4), ([78], 1), ([125], 1)])
def test_loading_is_given_up_with_launchds_reason(
    mac: Machine, codes: list[int], tries: int
) -> None:
    mac.set(faults={"bootstrap": codes})
    with pytest.raises(DeployError, match=r"^launchctl cannot load /.*\.plist: \S.*$"):
        mac.installer().install(mac.setup(), ONE)
    assert len(mac.calls("bootstrap")) == tries


def test_one_that_somebody_loaded_meanwhile_is_used(mac: Machine) -> None:
    mac.installer().install(mac.setup(), ONE)
    loaded = mac.state["loaded"]
    # Not there when we look, there when we load.
    mac.set(faults={"print": [0, 113]})
    mac.installer().start(ONE)
    assert mac.state["loaded"].keys() == loaded.keys()
    assert mac.calls("kickstart")


def test_what_is_loaded_without_a_file_is_replaced(mac: Machine) -> None:
    mac.installer().install(mac.setup(), ONE)
    path = mac.place.definitions / f"{LABELS[CACHESTORE]}.plist"
    path.unlink()
    mac.installer().install(mac.setup(), ONE)
    assert path.exists()
    assert len(mac.pids()) == 1


def test_one_that_has_gone_already_is_no_error(mac: Machine) -> None:
    mac.installer().install(mac.setup(), ONE)
    mac.set(loaded={})
    mac.installer().uninstall(ONE)
    assert not list(mac.place.definitions.iterdir())


def test_one_that_does_not_go_is_reported(mac: Machine) -> None:
    mac.installer().install(mac.setup(), ONE)
    loaded = mac.state["loaded"]
    loaded[LABELS[CACHESTORE]]["leaving"] = 10_000
    mac.set(loaded=loaded, faults={"bootout": [36]})
    with pytest.raises(DeployError, match="still holds"):
        mac.installer().stop(ONE)


def test_a_failure_to_stop_is_reported(mac: Machine) -> None:
    mac.installer().install(mac.setup(), ONE)
    mac.set(faults={"bootout": [150]})
    with pytest.raises(DeployError, match="cannot stop"):
        mac.installer().stop(ONE)


def test_without_a_login_at_the_screen_nothing_is_written(mac: Machine) -> None:
    mac.set(logged_in=False)
    with pytest.raises(DeployError, match=r"gui/501: log in at the screen .*--system"):
        mac.installer().install(mac.setup(), NAMES)
    assert not list(mac.place.home.iterdir())


def test_a_restart_lets_the_service_end_by_itself(mac: Machine) -> None:
    mac.installer().install(mac.setup(), NAMES)
    mac.installer().restart([ENGINE])
    assert [call[1] for call in mac.calls("kill")] == ["SIGTERM"]
    assert mac.calls("kickstart") == [["kickstart", f"gui/501/{LABELS[ENGINE]}"]]


def test_a_restart_forces_the_service_after_its_time(mac: Machine) -> None:
    mac.installer().install(mac.setup(), NAMES)
    mac.set(drains=-1)
    mac.installer().restart([ENGINE])
    assert mac.calls("kickstart") == [["kickstart", "-k", f"gui/501/{LABELS[ENGINE]}"]]
    path = mac.place.definitions / f"{LABELS[ENGINE]}.plist"
    assert mac.now > plistlib.loads(path.read_bytes())["ExitTimeOut"]


def test_a_stopped_service_is_started_by_a_restart(mac: Machine) -> None:
    mac.installer().install(mac.setup(), ONE)
    mac.installer().stop(ONE)
    mac.installer().restart(ONE)
    assert len(mac.pids()) == 1


def test_an_agent_of_root_and_a_daemon_of_a_user_are_refused(
    mac: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = Launchctl(Shell(mac.said.append), launchd_place(mac.place.home, "someone"))
    with pytest.raises(DeployError, match="sudo"):
        system.check(change=True)
    system.check(change=False)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    with pytest.raises(DeployError, match="leave sudo out"):
        mac.installer().install(mac.setup(), NAMES)
    system.check(change=True)


def test_the_system_domain_is_used_for_daemons(mac: Machine) -> None:
    place = launchd_place(mac.place.home, "someone")
    shell = Shell(mac.said.append, dry=True)
    Launchctl(shell, place).install(services(mac.setup(), place)[ENGINE])
    label = LABELS[ENGINE]
    assert f"+ launchctl bootstrap system /Library/LaunchDaemons/{label}.plist" in mac.said
    assert f"+ launchctl enable system/{label}" in mac.said


@pytest.mark.parametrize(
    "content",
    [
        b'<?xml version="1.0"?><plist><dict>',
        plistlib.dumps({}),
        plistlib.dumps([1]),
        plistlib.dumps({"ProgramArguments": []}),
        plistlib.dumps({"ProgramArguments": [1]}),
        b"",
    ],
)
def test_a_file_without_a_program_is_named(mac: Machine, content: bytes) -> None:
    mac.installer().install(mac.setup(), ONE)
    path = mac.place.definitions / f"{LABELS[CACHESTORE]}.plist"
    path.write_bytes(content)
    (status,) = mac.installer().status(ONE)
    assert re.fullmatch(rf"{CACHESTORE}: {path} .*: install it again", status.problem)
