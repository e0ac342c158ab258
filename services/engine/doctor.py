"""`engine doctor`: what is wrong with MLX, models and a running engine here.

`cachestore-admin doctor` runs it, and has more to look at. MLX is not loaded: on a device that
hangs, so would this.
"""

import argparse
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cachestore import endpoint, settings, variables
from cachestore.budget import size_text
from cachestore.doctor import places
from cachestore.doctor.finding import EngineReport, Finding, RunningEngine, settings_of
from cachestore.doctor.places import Meeting
from engine import backend, serve
from engine.config import Listen, parse_listen
from engine.folders import cache_folder
from engine.remote import channel
from engine.v1 import engine_pb2 as pb
from engine.v1 import engine_pb2_grpc

# What an engine that hangs is given, once: the first call that fails is the last.
ANSWER_SECONDS = 5.0
FREE_BYTES_MIN = 1 << 30
_PIN = re.compile(r"([\w.-]+)==([^;\s]+)\s*(;.*)?")


@dataclass(frozen=True, slots=True)
class Wheels:
    """`problem`: of MLX's backend, with what to do after a colon. `openblas`, `driver`: whether
    the library is there, None where MLX does not need it."""

    problem: str
    openblas: bool | None
    driver: bool | None


@dataclass(frozen=True, slots=True)
class Pin:
    """A package of which exactly one version will do."""

    name: str
    wanted: str
    found: str | None


@dataclass(frozen=True, slots=True)
class Folder:
    """Where models are kept. `why_not` is empty when it can be written to."""

    path: Path
    why_not: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Facts:
    """`meeting` is None for an address that is not a Unix socket. `why_not`: why no engine
    answers, where one should."""

    uid: int
    settings: tuple[Finding, ...]
    wheels: Wheels
    pins: tuple[Pin, ...]
    folders: tuple[Folder, ...]
    meeting: Meeting | None
    engine: RunningEngine | None
    why_not: str
    not_cached_reason: str


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine", metavar="ADDRESS", help="unix:PATH or HOST:PORT (default: ours)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, log_level="warning")


def run(flags: argparse.Namespace) -> int:
    """The exit code: 1 when something is wrong. Raises ConfigError."""
    facts = gather(flags.engine)
    report = EngineReport(tuple(findings(facts)), facts.engine)
    if flags.json:
        print(json.dumps(report.as_json(), indent=2))
    for finding in report.findings if not flags.json else ():
        print(finding)
    if not (flags.json or report.findings):
        print("All is well with MLX and models; cachestore-admin doctor looks at the rest.")
    return 1 if report.findings else 0


def findings(facts: Facts) -> list[Finding]:
    return [finding for check in CHECKS for finding in check(facts)]


# --- facts ---------------------------------------------------------------------------------


def gather(address: str | None) -> Facts:
    """`address`: of an engine that must answer; None for the user's own, if it runs. Raises
    ConfigError for what is no address."""
    set_up, problems = settings_of(_settings)
    chosen = address or (set_up.listen if set_up is not None else None)
    own = Listen(endpoint.runtime_path() / "engine.sock", None)
    listen = parse_listen(chosen, "--engine") if chosen else own
    path = listen.unix_path
    engine, reason, why_not = None, "", "no such path can be"
    if path is None or len(os.fsencode(path)) <= endpoint.SOCKET_BYTES_MAX:
        engine, reason, why_not = _ask(listen)
    return Facts(
        uid=os.geteuid(),
        settings=problems,
        wheels=_wheels(),
        pins=tuple(_pins()),
        folders=tuple(map(_folder, dict.fromkeys((cache_folder(), _hub_folder())))),
        meeting=places.meeting("engine", [path], why_not) if path is not None else None,
        engine=engine,
        why_not=why_not if address is not None else "",
        not_cached_reason=reason,
    )


def _settings() -> argparse.Namespace:
    parser = settings.Parser(prog="engine serve", table=serve.TABLE)
    serve.add_flags(parser)
    return parser.parse_args(["--model", "any"])


def _ask(listen: Listen) -> tuple[RunningEngine | None, str, str]:
    """The engine, why it does not cache, and why there is none where one should be."""
    answered = False
    try:
        with channel(listen) as opened:
            check = health_pb2_grpc.HealthStub(opened).Check
            health = check(health_pb2.HealthCheckRequest(), timeout=ANSWER_SECONDS)
            answered = True
            stub = engine_pb2_grpc.EngineStub(opened)
            model = stub.GetModel(pb.GetModelRequest(), timeout=ANSWER_SECONDS)
            if health.status != health_pb2.HealthCheckResponse.SERVING:
                return None, "", "it says that it does not serve"
            stats = stub.Stats(pb.StatsRequest(), timeout=ANSWER_SECONDS)
    except grpc.RpcError as error:
        # One that answers but is UNAVAILABLE loads its model, or ends: that is as it should be.
        well = answered and error.code() is grpc.StatusCode.UNAVAILABLE
        return None, "", "" if well else f"{error.code().name}: {error.details()}"
    running = RunningEngine(
        address=str(listen),
        pid=stats.pid,
        version=stats.version,
        model=model.name,
        mlx_bytes=stats.mlx_active_bytes,
        cachestore_connected=stats.cachestore_connected,
    )
    return running, model.not_cached_reason, ""


def _wheels() -> Wheels:
    if sys.platform == "darwin":
        return Wheels(_metal_problem(), None, None)
    try:
        wheel = backend.installed_wheel()
    except backend.BackendError as error:
        return Wheels(str(error), None, None)
    if wheel == backend.WHEELS["cpu"]:
        return Wheels("", backend.find_openblas() is not None, None)
    return Wheels("", None, backend.has_driver())


def _metal_problem() -> str:
    if platform.machine() != "arm64":
        return "this Python is for Intel, and MLX for Apple Silicon: install an arm64 Python"
    found, wanted = backend.version("mlx-metal"), backend.version("mlx")
    if found != wanted:
        return f"mlx {wanted} does not fit mlx-metal {found}: pip install mlx-metal=={wanted}"
    return ""


def _pins() -> Iterator[Pin]:
    for requirement in metadata.requires("mlx-cachestore") or ():
        match = _PIN.fullmatch(requirement)
        # Those with a marker are of extras: backends, and tools of developers.
        if match is not None and match[3] is None:
            yield Pin(match[1], match[2], backend.version(match[1]))


def _hub_folder() -> Path:
    """Where Hugging Face keeps what it has fetched."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub"))


def _folder(path: Path) -> Folder:
    there = next(parent for parent in (path, *path.parents) if os.path.exists(parent))
    why_not = ""
    if not os.path.isdir(there):
        why_not = f"{there} is not a folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        why_not = f"{there} is not writable for us"
    return Folder(path, why_not, shutil.disk_usage(there).free)


# --- checks --------------------------------------------------------------------------------


def _chosen(facts: Facts) -> Iterator[Finding]:
    yield from facts.settings


def _backend(facts: Facts) -> Iterator[Finding]:
    wheels = facts.wheels
    if wheels.problem:
        problem, _, advice = wheels.problem.partition(": ")
        yield Finding("mlx-backend", problem, advice)
    if wheels.openblas is False:
        yield Finding("openblas", backend.OPENBLAS_MISSING, backend.OPENBLAS_ADVICE)
    if wheels.driver is False:
        yield Finding(
            "mlx-backend",
            "MLX's CUDA backend is installed, and NVIDIA's driver is not",
            "install the driver, or mlx-cachestore[cpu] instead",
        )


def _pinned(facts: Facts) -> Iterator[Finding]:
    for pin in facts.pins:
        if pin.found != pin.wanted:
            yield Finding(
                "pinned-versions",
                f"{pin.name} is {pin.found or 'not installed'}; only {pin.wanted} is tested and "
                "right",
                f"{sys.executable} -m pip install {pin.name}=={pin.wanted}",
            )


def _models(facts: Facts) -> Iterator[Finding]:
    for folder in facts.folders:
        name = variables.CACHE_DIR if folder is facts.folders[0] else "HF_HOME"
        if folder.why_not:
            yield Finding(
                "model-cache",
                f"models cannot be kept in {folder.path}: {folder.why_not}",
                f"set {name} to a folder of yours",
            )
        elif folder.free_bytes < FREE_BYTES_MIN:
            yield Finding(
                "model-cache",
                f"{folder.path} has {size_text(folder.free_bytes)} left, and a model takes more",
                f"make room, or set {name} to a folder on another disk",
            )


def _answers(facts: Facts) -> Iterator[Finding]:
    found = list(places.check(facts.meeting, facts.uid)) if facts.meeting is not None else []
    yield from found
    if facts.why_not and not found:
        yield Finding(
            "engine-answers",
            f"no engine answers: {facts.why_not}",
            "start it: engine serve --model MODEL; if it runs, see its log",
        )


def _caches(facts: Facts) -> Iterator[Finding]:
    engine = facts.engine
    if engine is None:
        return
    if facts.not_cached_reason:
        off = facts.not_cached_reason.startswith("--cachestore off")
        yield Finding(
            "engine-caches",
            f"the engine (process {engine.pid}) caches nothing: {facts.not_cached_reason}",
            "start it without --cachestore off"
            if off
            else "docs/models.md says which models and flags can be cached",
        )
    elif not engine.cachestore_connected:
        yield Finding(
            "engine-caches",
            f"the engine (process {engine.pid}) reaches no cachestore: every request is a miss",
            "start one: cachestore serve; or the engine with --cachestore auto, its default",
        )


CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _chosen,
    _backend,
    _pinned,
    _models,
    _answers,
    _caches,
)
