"""What a person would otherwise type: install, watch whether it serves, stop, remove."""

import contextlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cachestore import endpoint
from cachestore.deploy import health, setup
from cachestore.deploy.manager import Manager, State
from cachestore.deploy.place import APP, Place
from cachestore.deploy.service import (
    CACHESTORE,
    ENGINE,
    NAMES,
    DeployError,
    Service,
    Setup,
    crash_log,
    log,
    program_gone,
    services,
)
from cachestore.deploy.shell import Shell

# How often in a row a process is seen as failed before that counts, for one that was there and
# for one that was not yet: managers wait before they start what has just ended.
_ENDED_POLLS, _ABSENT_POLLS = 4, 60
_START_SECONDS = {CACHESTORE: 60, ENGINE: 600}


@dataclass(frozen=True, slots=True)
class Status:
    """Of one service. `address` is where it is asked, empty when that is not known; `problem` what
    keeps it from starting."""

    name: str
    installed: bool
    state: State
    serving: bool
    address: str = ""
    problem: str = ""


class Installer:
    def __init__(
        self,
        manager: Manager,
        shell: Shell,
        place: Place,
        serving: Callable[[str], bool] = health.serving,
    ) -> None:
        self._manager = manager
        self._shell = shell
        self._place = place
        self._serving = serving

    def install(self, chosen: Setup, names: Sequence[str]) -> None:
        """Over an installed one an upgrade: what did not change is left as it is."""
        self._check(change=True)
        self._shell.make_folder(self._place.logs, self._place.user)
        wanted = services(chosen, self._place)
        for name in names:
            self._refuse_stranger(name, self._address(name, wanted[name].arguments))
        began = {name: self._install(wanted[name]) for name in names}
        for name in names:
            self._await(name, began[name])

    def uninstall(self, names: Sequence[str]) -> None:
        self._check(change=True)
        # The engine first: it then has the store for what it still has to write.
        for name in reversed(names):
            if self._installed(name) or self._manager.state(name).pid:
                self._manager.remove(name)
            else:
                self._shell.say(f"{name}: not installed")
        if set(names) == set(NAMES) and not self._shell.dry:
            _remove_empty(self._place.runtime)

    def data(self) -> list[Path]:
        """What `uninstall` leaves."""
        place = self._place
        return [path for path in (place.logs, place.cache, place.runtime) if path.is_dir()]

    def purgeable(self) -> list[Path]:
        """Of the data: what is surely ours. A folder that somebody has chosen, by a variable or a
        link, may hold anything else as well."""
        chosen = self._place.chosen
        return [path for path in self.data() if path not in chosen and not path.is_symlink()]

    def purge(self) -> None:
        for name in NAMES:  # its sockets and its log would be pulled away from under it
            self._refuse_stranger(name, setup.address(name, {}, self._place))
        for path in self.purgeable():
            self._shell.say(f"+ rm -r {path}")
            if self._shell.dry:
                continue
            try:
                shutil.rmtree(path)
            except OSError as error:
                raise DeployError(f"{error.filename}: {error.strerror}") from error
            _remove_empty(path.parent)

    def start(self, names: Sequence[str]) -> None:
        for name in self._ready_to_change(names):
            self._check_program(name)
            self._manager.start(name)
        for name in names:
            self._await(name, None)

    def stop(self, names: Sequence[str]) -> None:
        for name in reversed(self._ready_to_change(names)):
            self._manager.stop(name)

    def restart(self, names: Sequence[str]) -> None:
        old = {}
        for name in self._ready_to_change(names):
            self._check_program(name)
            old[name] = self._manager.state(name).pid
            self._manager.restart(name)
        for name in names:
            self._await(name, old[name])

    def status(self, names: Sequence[str]) -> list[Status]:
        self._check(change=False)
        return [self._status(name) for name in names]

    def _install(self, service: Service) -> int | None:
        """The process that is being replaced."""
        name, state = service.name, self._manager.state(service.name)
        path, definition = self._manager.path(name), self._manager.render(service)
        if path.exists() and path.read_bytes() == definition and not self._shell.dry:
            if state.pid:
                self._shell.say(
                    f"{name}: unchanged, left running (a new version is taken up by a restart)"
                )
                return None
            self._manager.start(name)
            return None
        self._manager.install(service)
        return state.pid

    def _status(self, name: str) -> Status:
        state = self._manager.state(name)
        if not self._installed(name):
            return Status(name, False, state, False)
        try:
            arguments = self._manager.arguments(name)
            problem = self._gone(name) if program_gone(arguments) else ""
            address = self._address(name, arguments)
        except DeployError as error:  # of its definition, or of a file of settings
            return Status(name, True, state, False, problem=f"{name}: {error}")
        return Status(name, True, state, self._serving(address), address, problem)

    def _await(self, name: str, replaced: int | None) -> None:
        """Until a process other than `replaced` serves. Raises DeployError when it fails."""
        if self._shell.dry:
            return
        address = self._address(name, self._manager.arguments(name))
        state, failed_polls, limit = State(), 0, _ABSENT_POLLS

        def settled() -> bool:
            nonlocal state, failed_polls, limit
            state = self._manager.state(name)
            failed_polls = failed_polls + 1 if state.pid is None and state.exit_status else 0
            if failed_polls >= limit:
                raise DeployError(
                    f"{name} ended with {state.exit_status}: {self._last_words(name)}"
                )
            if state.pid in (None, replaced):
                return False
            limit = _ENDED_POLLS
            return self._serving(address)

        if not self._shell.wait(settled, _START_SECONDS[name]):
            raise DeployError(
                f"{name} runs but does not serve after {_START_SECONDS[name]} s: see what it does "
                f"with: cachestore-admin service logs --only {name}"
            )
        self._shell.say(f"{name}: serves at {address}, process {state.pid}")

    def _check(self, *, change: bool) -> None:
        if not self._shell.dry:
            self._manager.check(change=change)

    def _ready_to_change(self, names: Sequence[str]) -> Sequence[str]:
        self._check(change=True)
        for name in names:
            if not self._installed(name) and not self._shell.dry:
                raise DeployError(
                    f"{name} is not installed: first run cachestore-admin service install"
                )
        return names

    def _installed(self, name: str) -> bool:
        return self._manager.path(name).exists()

    def _check_program(self, name: str) -> None:
        if self._installed(name) and program_gone(self._manager.arguments(name)):
            raise DeployError(self._gone(name))

    def _gone(self, name: str) -> str:
        program = self._manager.arguments(name)[0]
        return f"{name}: {program} is gone, perhaps with its environment: install again"

    def _refuse_stranger(self, name: str, address: str) -> None:
        """One that was started by hand, or by an engine, holds the sockets that ours would use."""
        if self._shell.dry or self._manager.state(name).pid:
            return
        if self._serving(address):
            holder = _holder(address)
            raise DeployError(
                f"{name}: another one serves at {address} already: end it first"
                f"{f', with: kill {holder}' if holder else ''}"
            )

    def _address(self, name: str, arguments: tuple[str, ...]) -> str:
        return setup.address_of(name, arguments, self._place)

    def _last_words(self, name: str) -> str:
        for path in (crash_log(self._place, name), log(self._place, name)):
            with contextlib.suppress(OSError):
                lines = path.read_text(errors="replace").strip().splitlines()
                if lines:
                    return lines[-1]
        return "nothing in its logs"


def _remove_empty(folder: Path) -> None:
    """It and those around it, as far as they are ours: on macOS the first is in one that is."""
    while APP in folder.name or APP in folder.parent.name:
        with contextlib.suppress(OSError):  # not empty, or not there
            folder.rmdir()
        folder = folder.parent


def _holder(address: str) -> str:
    """The process that serves there, where it says so."""
    path = address.removeprefix("unix:")
    try:
        return "" if path == address else endpoint.lock_path(Path(path)).read_text().strip()
    except OSError:
        return ""
