"""Services under launchd, through launchctl.

Its subcommands return before they are done: after `bootout` a service may be there for seconds,
and `bootstrap` then fails. So we wait until `print` no longer knows it, and try again a few times.
"""

import contextlib
import os
import plistlib
import re
from pathlib import Path
from typing import Any
from xml.parsers.expat import ExpatError

from cachestore.deploy import launchd
from cachestore.deploy.manager import State
from cachestore.deploy.place import Place
from cachestore.deploy.service import LABELS, DeployError, Service
from cachestore.deploy.shell import Shell

_EIO, _EALREADY = 5, 37
_RETRIED = (_EIO, _EALREADY)
_RETRY_PAUSES_SECONDS = (1.0, 2.0, 4.0)
# "No such process", "Operation now in progress", the same as above, "Could not find service".
_GOING_OR_GONE = (3, 36, _EALREADY, 113)
# Above what the definition allows a process for its end.
_MARGIN_SECONDS = 10
_STOP_SECONDS_DEFAULT = 60


class Launchctl:
    def __init__(self, shell: Shell, place: Place) -> None:
        self._shell = shell
        self._place = place
        self._domain = f"gui/{os.getuid()}" if place.user is None else "system"

    def check(self, *, change: bool) -> None:
        if self._place.user is not None:
            if change and os.geteuid() != 0:
                raise DeployError("--system changes the whole machine: run it with sudo")
        elif os.geteuid() == 0:
            raise DeployError("root has no login at the screen: leave sudo out, or add --system")
        elif self._shell.ask("launchctl", "print", self._domain).code:
            raise DeployError(
                f"launchd has no {self._domain}: log in at the screen of this Mac, not only over "
                "ssh, or install for the whole machine with sudo and --system"
            )

    def path(self, name: str) -> Path:
        return self._place.definitions / f"{LABELS[name]}.plist"

    def render(self, service: Service) -> bytes:
        return launchd.plist(service)

    def arguments(self, name: str) -> tuple[str, ...]:
        words = self._definition(name).get("ProgramArguments")
        if not (isinstance(words, list) and words and all(isinstance(word, str) for word in words)):
            raise DeployError(f"{self.path(name)} names no program: install it again")
        return tuple(words)

    def user(self, name: str) -> str | None:
        found = self._definition(name).get("UserName")
        return found if isinstance(found, str) else None

    def install(self, service: Service) -> None:
        if self._loaded(service.name):
            self.stop(service.name)
        self._shell.write(self.path(service.name), self.render(service), 0o644)
        self._bootstrap(service.name)

    def remove(self, name: str) -> None:
        self.stop(name)
        self._shell.remove(self.path(name))

    def start(self, name: str) -> None:
        if not self._loaded(name):
            self._bootstrap(name)
        elif self.state(name).pid is None:
            self._shell.must("launchctl", "kickstart", self._target(name))

    def stop(self, name: str) -> None:
        result = self._shell.run("launchctl", "bootout", self._target(name))
        if result.code and result.code not in _GOING_OR_GONE:
            raise DeployError(f"launchctl cannot stop {LABELS[name]}: {result.reason}")
        if not self._shell.wait(lambda: not self._loaded(name), self._stop_seconds(name)):
            raise DeployError(f"launchd still holds {LABELS[name]}: try again in a minute")

    def restart(self, name: str) -> None:
        """As a signal first: `kickstart -k` kills at once, whatever the service is doing."""
        old = self.state(name).pid
        if old is None and not self._shell.dry:
            return self.start(name)
        self._shell.run("launchctl", "kill", "SIGTERM", self._target(name))
        ended = self._shell.wait(lambda: self.state(name).pid != old, self._stop_seconds(name))
        force = [] if ended else ["-k"]
        if not ended or self.state(name).pid is None:
            self._shell.must("launchctl", "kickstart", *force, self._target(name))
        return None

    def state(self, name: str) -> State:
        found = self._shell.ask("launchctl", "print", self._target(name))
        if found.code:
            return State()
        pid, status = _number("pid", found.output), _number("last exit code", found.output)
        signal = re.search(r"^\s*last terminating signal = .*?(\d+)\s*$", found.output, re.M)
        if signal:
            status = -int(signal[1])
        since = self._shell.ask("ps", "-o", "lstart=", "-p", str(pid)).output if pid else ""
        return State(pid=pid, since=since.strip(), exit_status=status)

    def _bootstrap(self, name: str) -> None:
        # Somebody may have disabled it, which outlives the file.
        self._shell.run("launchctl", "enable", self._target(name))
        path = str(self.path(name))
        for pause in (*_RETRY_PAUSES_SECONDS, 0.0):
            result = self._shell.run("launchctl", "bootstrap", self._domain, path)
            if result.code == 0:
                return
            if self._loaded(name):
                # By somebody else at the same time, or at the login of this very moment.
                self._shell.must("launchctl", "kickstart", self._target(name))
                return
            if result.code not in _RETRIED or not pause:
                raise DeployError(f"launchctl cannot load {path}: {result.reason}")
            self._shell.sleep(pause)

    def _loaded(self, name: str) -> bool:
        return self._shell.ask("launchctl", "print", self._target(name)).code == 0

    def _target(self, name: str) -> str:
        return f"{self._domain}/{LABELS[name]}"

    def _definition(self, name: str) -> dict[str, Any]:
        path = self.path(name)
        try:
            found = plistlib.loads(path.read_bytes())
        except (OSError, ValueError, ExpatError) as error:
            raise DeployError(f"{path} cannot be read ({error}): install it again") from error
        return found if isinstance(found, dict) else {}

    def _stop_seconds(self, name: str) -> float:
        allowed = None
        # Also one whose file somebody broke can be removed or replaced.
        with contextlib.suppress(DeployError):
            allowed = self._definition(name).get("ExitTimeOut")
        return (allowed if isinstance(allowed, int) else _STOP_SECONDS_DEFAULT) + _MARGIN_SECONDS


def _number(key: str, text: str) -> int | None:
    """What `launchctl print` says of a key; its output is for people and may change."""
    found = re.search(rf"^\s*{key} = (-?\d+)", text, re.M)
    return int(found[1]) if found else None
