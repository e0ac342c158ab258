"""Services are installed, changed and removed as a whole, on either manager."""

import errno
from pathlib import Path

import pytest

from cachestore.deploy.service import CACHESTORE, ENGINE, NAMES, DeployError, crash_log
from tests.support.managers import Machine

CHANGING = ("bootstrap", "bootout", "kickstart", "kill", "enable", "start", "stop", "restart")


def tree(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def test_both_are_installed_and_serve(machine: Machine) -> None:
    installer = machine.installer()
    installer.install(machine.setup(), NAMES)
    found = installer.status(NAMES)
    assert [(one.name, one.installed, one.serving) for one in found] == [
        (CACHESTORE, True, True),
        (ENGINE, True, True),
    ]
    assert {one.name: one.state.pid for one in found} == machine.pids()
    assert all(one.state.since and not one.problem for one in found)
    assert machine.place.logs.stat().st_mode & 0o777 == 0o700
    assert [line for line in machine.said if line.startswith("+ write")]


def test_commands_are_found_on_the_path(machine: Machine) -> None:
    machine.on_path = True
    installer = machine.installer()
    installer.install(machine.setup(), [CACHESTORE])
    assert machine.pids() == {CACHESTORE: 1001}
    installer.uninstall([CACHESTORE])
    assert machine.pids() == {}


def test_installing_again_changes_nothing(machine: Machine) -> None:
    machine.installer().install(machine.setup(), NAMES)
    pids, done = machine.pids(), len(machine.calls(*CHANGING))
    machine.installer().install(machine.setup(), NAMES)
    assert machine.pids() == pids
    assert len(machine.calls(*CHANGING)) == done
    assert [line.partition(" (")[0] for line in machine.said[-4:-2]] == [
        f"{name}: unchanged, left running" for name in NAMES
    ]


def test_only_what_changed_is_restarted(machine: Machine) -> None:
    installer = machine.installer()
    installer.install(machine.setup(), NAMES)
    before = machine.pids()
    installer.install(machine.setup(budget="1GiB"), NAMES)
    after = machine.pids()
    assert after[ENGINE] == before[ENGINE]
    assert after[CACHESTORE] != before[CACHESTORE]


def test_one_can_be_installed_without_the_other(machine: Machine) -> None:
    installer = machine.installer()
    installer.install(machine.setup(), [CACHESTORE])
    assert [one.installed for one in installer.status(NAMES)] == [True, False]
    with pytest.raises(DeployError, match="engine is not installed"):
        installer.start([ENGINE])


def test_stopped_ones_stay_installed_and_start_again(machine: Machine) -> None:
    installer = machine.installer()
    installer.install(machine.setup(), NAMES)
    installer.stop(NAMES)
    assert machine.pids() == {}
    assert all(one.installed for one in installer.status(NAMES))
    installer.start(NAMES)
    assert len(machine.pids()) == 2
    pids = machine.pids()
    installer.start(NAMES)  # nothing to do
    assert machine.pids() == pids


def test_a_restart_gives_a_new_process(machine: Machine) -> None:
    installer = machine.installer()
    installer.install(machine.setup(), NAMES)
    old = machine.pids()
    installer.restart([ENGINE])
    # Not before the new one serves, as the old one does while it drains.
    assert machine.pids()[ENGINE] != old[ENGINE]
    assert machine.said[-1].endswith(f"process {machine.pids()[ENGINE]}")
    assert machine.pids()[CACHESTORE] == old[CACHESTORE]


def test_nothing_but_data_is_left(machine: Machine) -> None:
    installer = machine.installer()
    installer.install(machine.setup(), NAMES)
    (machine.place.logs / "engine.log").write_text("a line\n")
    installer.uninstall(NAMES)
    assert tree(machine.place.home) == {machine.place.logs / "engine.log"}
    assert machine.pids() == {}
    assert machine.state["loaded"] == {}
    assert not any(unit["enabled"] for unit in machine.state["units"].values())
    assert installer.data() == [machine.place.logs]
    installer.purge()
    assert not tree(machine.place.home)


def test_the_folder_of_sockets_goes_with_the_services(mac: Machine) -> None:
    installer = mac.installer()
    installer.install(mac.setup(), NAMES)
    mac.place.runtime.mkdir(parents=True)
    stays = mac.place.runtime / "cachestore.log"
    stays.touch()
    installer.uninstall(NAMES)
    assert stays.exists()
    stays.unlink()
    installer.uninstall(NAMES)
    assert not mac.place.runtime.parent.exists()
    assert mac.place.home.exists()


def test_nothing_is_removed_from_under_one_that_was_started_by_hand(machine: Machine) -> None:
    machine.place.logs.mkdir(parents=True)
    machine.stranger = True
    with pytest.raises(DeployError, match=r"another one serves at unix:.*end it first"):
        machine.installer().purge()
    assert machine.place.logs.exists()


def test_removing_what_is_not_there_is_no_error(machine: Machine) -> None:
    machine.installer().uninstall(NAMES)
    assert machine.said == ["engine: not installed", "cachestore: not installed"]


def test_a_dry_run_shows_everything_and_touches_nothing(machine: Machine) -> None:
    installer = machine.installer(dry=True)
    installer.install(machine.setup(model="the/model"), NAMES)
    installer.restart(NAMES)
    installer.stop(NAMES)
    installer.uninstall(NAMES)
    assert machine.state["calls"] == []
    assert not tree(machine.place.home)
    said = "\n".join(machine.said)
    assert "the/model" in said
    assert str(machine.place.definitions) in said
    assert ("launchctl bootstrap" in said) != ("systemctl --user enable" in said)


def test_a_daemon_that_ends_at_once_is_reported_with_its_last_words(machine: Machine) -> None:
    machine.set(fails=2)
    machine.serves = False
    machine.place.logs.mkdir(parents=True)
    crash_log(machine.place, CACHESTORE).write_text("Traceback\nerror: --budget is wrong\n")
    with pytest.raises(DeployError, match=r"^cachestore ended with 2: error: --budget is wrong$"):
        machine.installer().install(machine.setup(), NAMES)


def test_a_daemon_that_never_serves_is_given_up(machine: Machine) -> None:
    machine.serves = False
    with pytest.raises(DeployError, match="runs but does not serve after 60 s"):
        machine.installer().install(machine.setup(), [CACHESTORE])


def test_one_that_was_started_by_hand_is_not_pushed_aside(machine: Machine) -> None:
    machine.stranger = True
    machine.place.runtime.mkdir(parents=True)
    (machine.place.runtime / "cachestore.sock.lock").write_text("4711\n")
    with pytest.raises(DeployError, match=r"another one serves at unix:.*with: kill 4711"):
        machine.installer().install(machine.setup(), NAMES)
    assert not machine.calls(*CHANGING)


def test_a_python_that_has_moved_is_named(machine: Machine) -> None:
    python = machine.place.home / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("")
    python.chmod(0o755)
    installer = machine.installer()
    installer.install(machine.setup(python=python), NAMES)
    installer.stop(NAMES)
    python.unlink()
    assert all("python is gone" in one.problem for one in installer.status(NAMES))
    with pytest.raises(DeployError, match=r"venv/bin/python is gone.*install again"):
        installer.start(NAMES)


def test_a_definition_is_written_whole_or_not_at_all(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    installer = machine.installer()
    installer.install(machine.setup(), NAMES)
    before = {path: path.read_bytes() for path in tree(machine.place.definitions)}

    def fill_up(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill_up)
    with pytest.raises(DeployError, match="No space left on device"):
        installer.install(machine.setup(budget="1GiB"), NAMES)
    assert {path: path.read_bytes() for path in tree(machine.place.definitions)} == before


def test_a_definition_that_somebody_broke_is_named(machine: Machine) -> None:
    installer = machine.installer()
    installer.install(machine.setup(), NAMES)
    broken = next(path for path in tree(machine.place.definitions) if "engine" in path.name)
    broken.write_text("nonsense")
    store, engine = installer.status(NAMES)
    assert "cannot be read" in engine.problem
    assert "install it again" in engine.problem
    assert (store.problem, store.serving) == ("", True)
    installer.install(machine.setup(), NAMES)
    assert len(machine.pids()) == 2
    broken.write_text("nonsense")
    installer.uninstall(NAMES)
    assert machine.pids() == {}
