"""Services under a user's systemd, through systemctl."""

import getpass
from pathlib import Path

from cachestore.deploy import systemd
from cachestore.deploy.manager import State
from cachestore.deploy.place import Place
from cachestore.deploy.service import UNITS, DeployError, Service
from cachestore.deploy.shell import Shell

_SYSTEMCTL = ("systemctl", "--user")
_SHOWN = ("MainPID", "ExecMainCode", "ExecMainStatus", "ExecMainStartTimestamp")
_CLD_EXITED = "1"


class Systemctl:
    def __init__(self, shell: Shell, place: Place) -> None:
        self._shell = shell
        self._place = place

    def check(self, *, change: bool) -> None:
        found = self._shell.ask(*_SYSTEMCTL, "show-environment")
        if found.code:
            raise DeployError(
                f"no systemd for user {getpass.getuser()} ({found.reason}): log in as that user, "
                f"not through su or sudo, after: sudo loginctl enable-linger {getpass.getuser()}"
            )

    def path(self, name: str) -> Path:
        return self._place.definitions / UNITS[name]

    def render(self, service: Service) -> bytes:
        return systemd.unit(service).encode()

    def arguments(self, name: str) -> tuple[str, ...]:
        path = self.path(name)
        try:
            return systemd.arguments(path.read_text())
        except (OSError, ValueError, StopIteration) as error:
            raise DeployError(f"{path} cannot be read ({error}): install it again") from error

    def user(self, name: str) -> str | None:
        return None  # its units are the user's own

    def install(self, service: Service) -> None:
        self._shell.write(self.path(service.name), self.render(service), 0o644)
        self._must("daemon-reload")
        self._must("enable", UNITS[service.name])
        self.restart(service.name)

    def remove(self, name: str) -> None:
        self._must("disable", "--now", UNITS[name])
        self._shell.remove(self.path(name))
        self._must("daemon-reload")
        # Otherwise a failed one stays in the list; fails when there is nothing to forget.
        self._shell.ask(*_SYSTEMCTL, "reset-failed", UNITS[name])

    def start(self, name: str) -> None:
        self._must("start", "--no-block", UNITS[name])

    def stop(self, name: str) -> None:
        self._must("stop", UNITS[name])

    def restart(self, name: str) -> None:
        self._must("restart", "--no-block", UNITS[name])

    def state(self, name: str) -> State:
        shown = self._shell.ask(*_SYSTEMCTL, "show", f"--property={','.join(_SHOWN)}", UNITS[name])
        found = dict(line.split("=", 1) for line in shown.output.splitlines() if "=" in line)
        pid = int(found.get("MainPID") or 0)
        code, status = found.get("ExecMainCode", "0"), int(found.get("ExecMainStatus") or 0)
        ended = {"0": None, _CLD_EXITED: status}.get(code, -status)
        since = found.get("ExecMainStartTimestamp", "") if pid else ""
        return State(pid=pid or None, since=since, exit_status=ended)

    def _must(self, *arguments: str) -> None:
        self._shell.must(*_SYSTEMCTL, *arguments)
