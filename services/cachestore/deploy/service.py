"""What launchd and systemd are told about the two daemons, written once for both."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cachestore import variables
from cachestore.deploy.place import Place

CACHESTORE, ENGINE = "cachestore", "engine"
# The store is started first, but nothing depends on that: an engine without it serves uncached.
NAMES = (CACHESTORE, ENGINE)
# launchd finds a service by its label, systemd by the name of its unit.
LABELS = {name: f"io.github.mlx-cachestore.{name}" for name in NAMES}
UNITS = {CACHESTORE: "mlx-cachestore.service", ENGINE: "mlx-cachestore-engine.service"}

RESTART_SECONDS = 10
WATCHDOG_SECONDS = 30
DRAIN_SECONDS = 10
# After the drain: writes to the store land, the model is let go.
AFTER_DRAIN_SECONDS = 20
# A slab takes a descriptor on both sides; launchd gives 256 unless asked.
DESCRIPTORS = 4096
# Loading a large model, or fetching it for the first time.
ENGINE_START_SECONDS = 600
CACHESTORE_START_SECONDS = 60
CACHESTORE_STOP_SECONDS = 20

# What of the environment of an installation its daemons get as well. No flags: a file has those.
FOLDERS = (variables.RUNTIME_DIR, variables.CACHE_DIR)
CARRIED = (
    *(*FOLDERS, variables.SHM),
    *("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE"),
)


class DeployError(Exception):
    """Why a service cannot be installed, started or asked, and what to do; one line."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a person says at installation; None is what the configuration file says, or nobody.

    `attach` is the socket of the engine's store, None when the file says which store it uses.
    `drain_seconds` is what the file says: the flag is then left to it, but not the time to stop.
    """

    python: Path
    model: str | None = None
    budget: str | None = None
    config: Path | None = None
    drain_seconds: int | None = None
    attach: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Service:
    """One daemon, as either manager runs it. Paths are absolute; nothing is expanded later.

    The daemon writes `logs / name.log` itself, and renames it when it is long. A manager opens
    the file of `crash_log` once, for what Python writes when it dies.
    """

    name: str
    description: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    place: Place
    start_seconds: int
    stop_seconds: int

    @property
    def crash_log(self) -> Path:
        return crash_log(self.place, self.name)


def log(place: Place, name: str) -> Path:
    return place.logs / f"{name}.log"


def crash_log(place: Place, name: str) -> Path:
    return place.logs / f"{name}.crash.log"


def services(setup: Setup, place: Place) -> dict[str, Service]:
    """Both daemons, by name."""
    drain = DRAIN_SECONDS if setup.drain_seconds is None else setup.drain_seconds
    store_flags = _flags(budget=setup.budget)
    engine_flags = _flags(
        model=setup.model,
        # Never "auto": that would start a second store, which then holds the service's socket.
        cachestore=None if setup.attach is None else f"unix:{setup.attach}",
        drain_seconds=str(drain) if setup.drain_seconds is None else None,
    )

    def make(name: str, description: str, flags: list[str], start: int, stop: int) -> Service:
        # -P: not what happens to lie in the working directory.
        program = [str(setup.python), "-P", "-m", name, "serve"]
        shared = _flags(config=setup.config, log_file=log(place, name))
        return Service(
            name=name,
            description=description,
            arguments=(*program, *shared, *flags),
            environment=dict(setup.environment),
            place=place,
            start_seconds=start,
            stop_seconds=stop,
        )

    return {
        CACHESTORE: make(
            CACHESTORE,
            "mlx-cachestore: prefix cache of LLM engines",
            store_flags,
            CACHESTORE_START_SECONDS,
            CACHESTORE_STOP_SECONDS,
        ),
        ENGINE: make(
            ENGINE,
            "mlx-cachestore: LLM engine on MLX",
            engine_flags,
            ENGINE_START_SECONDS,
            drain + AFTER_DRAIN_SECONDS,
        ),
    }


def carried(environment: Mapping[str, str]) -> dict[str, str]:
    """Our folders absolute: the daemons run elsewhere."""
    found = {name: environment[name] for name in CARRIED if environment.get(name)}
    return {
        name: os.path.abspath(text) if name in FOLDERS else text for name, text in found.items()
    }


def command_text(arguments: tuple[str, ...]) -> str:
    return shlex.join(arguments)


def program_gone(arguments: tuple[str, ...]) -> bool:
    """Whether the Python of an installed service is no longer there, as when a venv has moved."""
    return not os.access(arguments[0], os.X_OK)


def _flags(**values: str | Path | None) -> list[str]:
    """Flags for those that are not None."""
    pairs = [("--" + name.replace("_", "-"), value) for name, value in values.items()]
    return [text for flag, value in pairs if value is not None for text in (flag, str(value))]
