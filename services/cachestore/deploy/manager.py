"""What launchd and systemd do for us, as the rest of this package sees it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cachestore.deploy.service import Service


@dataclass(frozen=True, slots=True)
class State:
    """Of an installed service: `pid` is None while it does not run.

    `since` is when it was started, in the manager's words; `exit_status` is that of the run
    before, negative for a signal, and None before the first end.
    """

    pid: int | None = None
    since: str = ""
    exit_status: int | None = None


class Manager(Protocol):
    """One service manager. Whatever fails raises DeployError.

    `start`, `restart` and `install` do not wait until the service is ready; `stop`, `remove` and
    what `restart` and `install` replace wait until the old process has gone.
    """

    def check(self, *, change: bool) -> None:
        """Raises DeployError, with what to do, when the manager cannot be asked from here, or
        when that cannot `change` anything.
        """

    def path(self, name: str) -> Path:
        """Where the definition of a service lies, or would lie."""

    def render(self, service: Service) -> bytes:
        """The definition."""

    def arguments(self, name: str) -> tuple[str, ...]:
        """The command in an installed definition."""

    def user(self, name: str) -> str | None:
        """Whom an installed definition names to run as; None: nobody."""

    def install(self, service: Service) -> None:
        """Writes the definition, puts it in force, also at the next login or boot, and starts."""

    def remove(self, name: str) -> None: ...

    def start(self, name: str) -> None: ...

    def stop(self, name: str) -> None:
        """Until it is started by hand, or at the next login or boot."""

    def restart(self, name: str) -> None: ...

    def state(self, name: str) -> State: ...
