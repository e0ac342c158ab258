"""What the checks go by, gathered once. Nothing is changed, and nothing waits for long."""

import json
import os
import pwd
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from cachestore import endpoint, serve, shm
from cachestore.budget import default_budget_bytes, physical_memory_bytes
from cachestore.client import Client, StoreRefused, StoreUnavailable
from cachestore.deploy import setup
from cachestore.deploy.command import manager_of
from cachestore.deploy.place import Place, own_place, system_place
from cachestore.deploy.service import NAMES, DeployError, program_gone
from cachestore.deploy.shell import Shell
from cachestore.doctor import limits, places
from cachestore.doctor.finding import EngineReport, Finding, settings_of
from cachestore.doctor.places import Meeting, meeting

STORE_SECONDS = 3.0
# Longer than the engine's doctor gives an engine that hangs.
ENGINE_SECONDS = 30.0
# -P: what lies in the working directory is data.
_ENGINE = (sys.executable, "-P", "-m", "engine", "doctor", "--json")


@dataclass(frozen=True, slots=True)
class RunningStore:
    """A cachestore that answers. `descriptors`: its own limit, where the system tells."""

    pid: int
    version: str
    serving: bool
    sessions: int
    bytes_budget: int
    slab_failures: int
    check_failures: int
    descriptors: int | None


@dataclass(frozen=True, slots=True)
class Machine:
    """And who asks. `shm_bytes`: of the file system that slabs are in, None where they are in
    none; `descriptors`: the limit that a daemon gets that is started from here."""

    uid: int
    memory_bytes: int
    descriptors: int
    shm_problem: str
    shm_bytes: int | None


@dataclass(frozen=True, slots=True)
class InstalledService:
    """`problem` is why it cannot start, empty when it can. `runs`: also while it loads. `system`:
    without a login, as `service --system` installs it."""

    name: str
    path: Path
    problem: str
    runs: bool
    system: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """`settings` are findings about those of the cachestore; `budget_bytes`: of the one that runs,
    or of one that would be started, and `memory_limit` what that one is allowed, None: all."""

    version: str
    machine: Machine
    settings: tuple[Finding, ...]
    services: tuple[InstalledService, ...]
    budget_bytes: int
    meeting: Meeting
    store: RunningStore | None
    engine: EngineReport
    memory_limit: int | None = None


def gather(socket: Path | None, engine_words: Sequence[str] = ()) -> Facts:
    """Of the daemon at `socket`, or the user's own; `engine_words`: flags of `engine doctor`."""
    set_up, problems = settings_of(lambda: serve.settings_without_flags(None))
    budget = default_budget_bytes(physical_memory_bytes())
    if set_up is not None:
        socket, budget = socket or set_up.socket, set_up.budget
    path = Path(os.path.abspath(socket or endpoint.runtime_path() / "cachestore.sock"))
    store, why_not = _store(path)
    return Facts(
        version=version("mlx-cachestore"),
        machine=_machine(),
        settings=problems,
        services=tuple(installed_services()),
        budget_bytes=store.bytes_budget if store is not None else budget,
        meeting=meeting("cachestore", [path, endpoint.session_path(path)], why_not),
        store=store,
        engine=_engine(engine_words),
        memory_limit=limits.memory_bytes(os.getpid() if store is None else store.pid),
    )


def _store(path: Path) -> tuple[RunningStore | None, str]:
    try:
        with Client.connect(path, role="admin", timeout_seconds=STORE_SECONDS) as client:
            stats = client.stats()
            serving = client.health()
    except (StoreUnavailable, StoreRefused) as error:
        return None, str(error)
    found = RunningStore(
        pid=stats.pid,
        version=stats.version,
        serving=serving,
        sessions=stats.sessions,
        bytes_budget=stats.bytes_budget,
        slab_failures=stats.slab_failures,
        check_failures=stats.check_failures,
        descriptors=limits.descriptors(stats.pid),
    )
    return found, ""


def installed_services() -> Iterator[InstalledService]:
    """Those of this user, as their definitions say; the service manager is not asked."""
    yield from _installed_in(own_place())
    if sys.platform == "darwin":
        yield from _installed_in(system_place(pwd.getpwuid(os.getuid()).pw_name))


def _installed_in(place: Place) -> Iterator[InstalledService]:
    manager = manager_of(Shell(lambda _: None, dry=True), place)
    for name in NAMES:
        path, problem, runs = manager.path(name), "", False
        if not os.path.exists(path):  # and not where we may not look
            continue
        try:
            if manager.user(name) != place.user:
                continue  # somebody else's, whose folders these are not
            arguments = manager.arguments(name)
            if program_gone(arguments):
                problem = f"{arguments[0]} is gone, perhaps with its environment"
            address = setup.address_of(name, arguments, place)
            socket = address.removeprefix("unix:")
            # Of an address of TCP it is not known.
            runs = socket == address or places.runs(Path(socket))
        except DeployError as error:
            problem = str(error)
        yield InstalledService(name, path, problem, runs, place.user is not None)


def _machine() -> Machine:
    problem, size = "", None
    try:
        if shm.way_chosen() == "posix" and sys.platform == "linux":
            found = os.statvfs("/dev/shm")
            size = found.f_blocks * found.f_frsize
    except (OSError, ValueError) as error:
        problem = str(error)
    return Machine(
        uid=os.geteuid(),
        memory_bytes=physical_memory_bytes(),
        descriptors=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        shm_problem=problem,
        shm_bytes=size,
    )


def _engine(words: Sequence[str]) -> EngineReport:
    """The engine's checks run in a process of their own: this one never loads MLX."""
    try:
        said = subprocess.run(
            [*_ENGINE, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ENGINE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _no_report(f"has not ended within {ENGINE_SECONDS:.0f} s")
    except OSError as error:
        return _no_report(f"cannot be run: {error}")
    try:
        return EngineReport.of_json(json.loads(said.stdout))
    except (ValueError, KeyError, TypeError):
        lines = said.stderr.strip().splitlines() or ["it says nothing"]
        return _no_report(f"failed: {lines[-1]}")


def _no_report(problem: str) -> EngineReport:
    advice = "run it by itself; if it fails there, install mlx-cachestore again"
    return EngineReport((Finding("engine-doctor", f"`engine doctor` {problem}", advice),), None)
