"""Service managers for tests: fake launchctl and systemctl on the PATH, and installers on them."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cachestore.deploy.installer import Installer
from cachestore.deploy.launchctl import Launchctl
from cachestore.deploy.manager import Manager
from cachestore.deploy.place import Place, launchd_place, systemd_place
from cachestore.deploy.service import LABELS, NAMES, UNITS, Setup
from cachestore.deploy.shell import Result, Shell, execute
from cachestore.deploy.systemctl import Systemctl
from tests.support import fake_managers

_PS = "Mon Jan  1 12:00:00 2026"


@dataclass
class Machine:
    """One with a fake service manager. Nobody waits; what serves is said.

    Commands run in this process, and really only with `on_path`, for each takes a while.
    """

    manager: type[Launchctl] | type[Systemctl]
    place: Place
    state_file: Path
    said: list[str] = field(default_factory=list)
    now: float = 0.0
    # Whether a daemon with a process serves, and whether one serves that is no service.
    serves: bool = True
    stranger: bool = False
    on_path: bool = False

    def installer(self, *, dry: bool = False) -> Installer:
        runner = execute if self.on_path else self._run
        shell = Shell(
            self.said.append, dry=dry, runner=runner, clock=lambda: self.now, sleep=self._sleep
        )
        manager: Manager = self.manager(shell, self.place)
        return Installer(manager, shell, self.place, self._serving)

    def setup(self, **other: Any) -> Setup:
        attach = self.place.runtime / "cachestore.sock"
        return Setup(**{"python": Path(sys.executable), "model": "m", "attach": attach, **other})

    @property
    def state(self) -> dict[str, Any]:
        return dict(json.loads(self.state_file.read_text()))

    def set(self, **values: object) -> None:
        self.state_file.write_text(json.dumps({**self.state, **values}))

    def calls(self, *commands: str) -> list[list[str]]:
        """Those of these subcommands, oldest first."""
        return [call for call in self.state["calls"] if call[0] in commands]

    def pids(self) -> dict[str, int]:
        """Processes of services, by their names."""
        jobs = {**self.state["loaded"], **self.state["units"]}
        ids = {name: (LABELS[name], UNITS[name]) for name in NAMES}
        return {
            name: jobs[id_]["pid"]
            for name in NAMES
            for id_ in ids[name]
            if jobs.get(id_, {}).get("pid")
        }

    def _run(self, command: Sequence[str]) -> Result:
        if command[0] == "ps":
            return Result(0, _PS)
        state = self.state
        code, text = fake_managers.run(state, *command)
        self.set(**state)
        return Result(code, text)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def _serving(self, address: str) -> bool:
        name = Path(address).stem
        return self.stranger or (self.serves and name in self.pids())


def launchd_machine(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr("os.geteuid", lambda: 501)
    monkeypatch.setattr("os.getuid", lambda: 501)
    return _machine(directory, monkeypatch, "launchctl", Launchctl, launchd_place)


def systemd_machine(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    def place(home: Path) -> Place:
        return systemd_place(home, directory / "run")

    return _machine(directory, monkeypatch, "systemctl", Systemctl, place)


def _machine(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    manager: type[Launchctl] | type[Systemctl],
    place: Callable[[Path], Place],
) -> Machine:
    home, programs, state = directory / "home", directory / "bin", directory / "state.json"
    home.mkdir()
    programs.mkdir()
    fake = f'"{sys.executable}" -S "{fake_managers.__file__}" {program}'
    _script(programs / program, f'exec {fake} "$@"')
    _script(programs / "ps", f"echo '{_PS}'")
    state.write_text(json.dumps(fake_managers.START))
    monkeypatch.setenv("FAKE_MANAGER", str(state))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    return Machine(manager, place(home), state)


def _script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
