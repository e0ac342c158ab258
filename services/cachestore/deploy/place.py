"""Whose services they are, and where their files lie."""

import os
import pwd
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import platformdirs

from cachestore import endpoint, settings, variables

APP = "mlx-cachestore"


@dataclass(frozen=True, slots=True)
class Place:
    """Folders of one installation; `user` is set for services of the system, which run as it.

    `config` is the file that the daemons read unless told another; it need not be there.
    `definitions` is where the service manager looks for its files. Clients find the sockets in
    `runtime` by themselves, see `cachestore.endpoint`. `chosen` are those of these folders that
    variables of the environment name.
    """

    home: Path
    config: Path
    runtime: Path
    logs: Path
    cache: Path
    definitions: Path
    user: str | None = None
    chosen: tuple[Path, ...] = ()


def launchd_place(home: Path, user: str | None = None) -> Place:
    folder = home / "Library" / "LaunchAgents" if user is None else Path("/Library/LaunchDaemons")
    return Place(
        home=home,
        config=home / "Library" / "Application Support" / APP / "config.toml",
        runtime=home / f".{APP}" / "run",
        logs=home / "Library" / "Logs" / APP,
        cache=home / "Library" / "Caches" / APP,
        definitions=folder,
        user=user,
    )


def systemd_place(home: Path, runtime: Path) -> Place:
    return Place(
        home=home,
        config=home / ".config" / APP / "config.toml",
        runtime=runtime,
        logs=home / ".local" / "state" / APP / "log",
        cache=home / ".cache" / APP,
        definitions=home / ".config" / "systemd" / "user",
    )


def own_place() -> Place:
    """That of who runs this, with what the environment says."""
    home, runtime = Path.home(), endpoint.runtime_path()
    named = {
        name: Path(os.path.abspath(os.environ[name]))
        for name in (variables.RUNTIME_DIR, variables.CACHE_DIR)
        if os.environ.get(name)
    }
    usual = launchd_place(home) if sys.platform == "darwin" else systemd_place(home, runtime)
    return replace(
        usual,
        config=settings.default_file(),
        runtime=runtime,
        logs=platformdirs.user_log_path(APP),
        cache=named.get(variables.CACHE_DIR, platformdirs.user_cache_path(APP)),
        chosen=tuple(named.values()),
    )


def system_place(user: str) -> Place:
    """That of launchd's daemons which run as `user`. Raises KeyError for an unknown one."""
    return launchd_place(Path(pwd.getpwnam(user).pw_dir), user)
