"""`cachestore-admin service`: the two daemons as services that start by themselves."""

import argparse
import contextlib
import getpass
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cachestore.deploy import setup, tail
from cachestore.deploy.installer import Installer, Status
from cachestore.deploy.launchctl import Launchctl
from cachestore.deploy.manager import Manager
from cachestore.deploy.place import Place, own_place, system_place
from cachestore.deploy.service import ENGINE, NAMES, DeployError, crash_log, log
from cachestore.deploy.shell import Shell
from cachestore.deploy.systemctl import Systemctl
from cachestore.flags import Parser, whole

# As `systemctl status` has it.
EXIT_NOT_RUNNING = 3
_LINES = 20

_Run = Callable[[argparse.Namespace, Place, Installer], int]


def add_flags(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION", parser_class=Parser)

    def add(name: str, run: _Run, text: str, *, changes: bool = True) -> Parser:
        action = actions.add_parser(name, help=text, description=text)
        action.set_defaults(run=lambda flags: _run(run, flags))
        action.add_argument("--only", choices=NAMES, help="one of them (default: both)")
        action.add_argument(
            "--system",
            action="store_true",
            help="macOS: services that run without a login, as who calls sudo",
        )
        if changes:
            action.add_argument(
                "--dry-run", action="store_true", help="show commands and files; change nothing"
            )
        return action

    _add_install(add("install", _install, "set both up, start them and wait until they serve"))
    uninstall = add("uninstall", _uninstall, "stop and remove them; caches and logs stay")
    uninstall.add_argument("--purge", action="store_true", help="remove caches and logs as well")
    uninstall.add_argument("--yes", action="store_true", help="do not ask before that")
    add("start", _changing(Installer.start), "start them and wait until they serve")
    add("stop", _changing(Installer.stop), "stop them until the next login or boot")
    add("restart", _changing(Installer.restart), "let them finish, then start them anew")
    text = f"what runs, and since when; exit code {EXIT_NOT_RUNNING} when one does not"
    status = add("status", _status, text, changes=False)
    status.add_argument("--json", action="store_true", help="print JSON")
    logs = add("logs", _logs, "the last lines of their logs", changes=False)
    logs.add_argument("--follow", action="store_true", help="and what is added, until Ctrl-C")
    logs.add_argument(
        "--lines", type=whole(0), default=_LINES, metavar="N", help="of each (default: %(default)s)"
    )


def _add_install(install: Parser) -> None:
    install.add_argument("--model", help="what the engine serves: as in `engine serve`")
    install.add_argument("--budget", metavar="BYTES", help="of the cachestore, like 8GiB")
    install.add_argument(
        "--config", type=Path, metavar="FILE", help="settings of both: see docs/configuration.md"
    )


def _run(run: _Run, flags: argparse.Namespace) -> int:
    try:
        place = _place(system=flags.system)
        shell = Shell(_say, dry=getattr(flags, "dry_run", False))
        return run(flags, place, Installer(manager_of(shell, place), shell, place))
    except DeployError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except BrokenPipeError:
        raise  # nobody reads on: for all commands alike
    except OSError as error:
        # A folder that we may not even look into, for one.
        sys.stderr.write(f"error: {error.filename}: {error.strerror}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _install(flags: argparse.Namespace, place: Place, installer: Installer) -> int:
    names = _names(flags)
    engine = ENGINE in names
    chosen = setup.make_setup(flags.model, flags.budget, flags.config, place, engine=engine)
    installer.install(chosen, names)
    lingers = Path("/var/lib/systemd/linger", getpass.getuser())
    if sys.platform != "darwin" and not flags.dry_run and not lingers.exists():
        _say("They end with your last login. To let them stay: loginctl enable-linger")
    return 0


def _uninstall(flags: argparse.Namespace, place: Place, installer: Installer) -> int:
    if flags.purge and flags.only:
        raise DeployError("--purge removes what both share: leave --only out")
    purge = flags.purge and (flags.dry_run or _agreed(installer.purgeable(), yes=flags.yes))
    installer.uninstall(_names(flags))
    if purge:
        installer.purge()
    left = [*installer.data(), *([place.config] if place.config.exists() else [])]
    if left and not flags.dry_run:
        _say(f"What stays: {', '.join(map(str, left))}")
    return 0


def _agreed(folders: Sequence[Path], *, yes: bool) -> bool:
    """Raises DeployError when a person has not said yes, so that nothing is removed at all."""
    if yes or not folders:
        return True
    _say("This removes for good:\n" + "\n".join(f"  {path}" for path in folders))
    if not sys.stdin.isatty():
        raise DeployError("--purge asks first, and nobody is there to answer: add --yes")
    if input("Remove them? [y/N] ").strip().lower() not in ("y", "yes"):
        raise DeployError("nothing was removed")
    return True


def _changing(change: Callable[[Installer, Sequence[str]], None]) -> _Run:
    def run(flags: argparse.Namespace, _place: Place, installer: Installer) -> int:
        change(installer, _names(flags))
        return 0

    return run


def _status(flags: argparse.Namespace, _place: Place, installer: Installer) -> int:
    found = installer.status(_names(flags))
    if flags.json:
        _say(json.dumps([{**_report(one), "problem": one.problem} for one in found], indent=2))
    else:
        table = Table(box=None, pad_edge=False)
        for heading in ("service", "state", "process", "since", "last exit", "address"):
            table.add_column(heading, overflow="fold")
        for one in found:
            table.add_row(*("" if cell is None else str(cell) for cell in _report(one).values()))
        Console(highlight=False).print(table)
        for one in found:
            if one.problem:
                _say(one.problem)
    return 0 if all(one.state.pid for one in found) else EXIT_NOT_RUNNING


def _report(status: Status) -> dict[str, str | int | None]:
    """In the order of the table's columns."""
    return {
        "service": status.name,
        "state": _word(status),
        "pid": status.state.pid,
        "since": status.state.since,
        "last_exit": status.state.exit_status,
        "address": status.address,
    }


def _word(status: Status) -> str:
    if not status.installed:
        return "not installed"
    if status.state.pid is None:
        return "stopped" if not status.state.exit_status else "failed"
    if not status.address:
        return "running"
    return "serving" if status.serving else "not serving"


def _logs(flags: argparse.Namespace, place: Place, _installer: Installer) -> int:
    files = {name: (crash_log(place, name), log(place, name)) for name in _names(flags)}
    if not any(path.exists() for paths in files.values() for path in paths) and not flags.follow:
        raise DeployError(f"no logs in {place.logs}")
    with contextlib.suppress(KeyboardInterrupt):
        tail.show(files, flags.lines, follow=flags.follow)
    return 0


def _place(*, system: bool) -> Place:
    if not system:
        return own_place()
    if sys.platform != "darwin":
        raise DeployError(
            "--system is for macOS. Here services belong to a user; for some that run without a "
            "login leave --system out, and: loginctl enable-linger"
        )
    # Run by root for no one in particular there would be nobody whose models and sockets to use.
    user = os.environ.get("SUDO_USER") or getpass.getuser()
    if user == "root":
        raise DeployError("--system: run it with sudo from the account that they shall run as")
    try:
        return system_place(user)
    except KeyError:
        raise DeployError(f"--system: no such user: {user}") from None


def manager_of(shell: Shell, place: Place) -> Manager:
    """What manages services here. With a dry shell it can only tell what is installed."""
    if sys.platform == "darwin":
        return Launchctl(shell, place)
    if not shell.dry and shutil.which("systemctl") is None:
        raise DeployError("no systemd here: run cachestore serve and engine serve by other means")
    return Systemctl(shell, place)


def _names(flags: argparse.Namespace) -> tuple[str, ...]:
    return (flags.only,) if flags.only else NAMES


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
