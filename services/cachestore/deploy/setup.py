"""What a person says at installation, checked before anything is changed."""

import os
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cachestore import endpoint, variables
from cachestore.budget import parse_budget, physical_memory_bytes
from cachestore.deploy.place import Place
from cachestore.deploy.service import CACHESTORE, ENGINE, DeployError, Setup, carried

Tables = Mapping[str, Mapping[str, Any]]


def make_setup(
    model: str | None, budget: str | None, config: Path | None, place: Place, *, engine: bool
) -> Setup:
    """Raises DeployError. `engine` is whether that is to be installed, which needs a model."""
    chosen_file = config or os.environ.get(variables.CONFIG) or None
    path = None if chosen_file is None else Path(os.path.abspath(chosen_file))
    tables = read_tables(path, place)
    settings = tables.get(ENGINE, {})
    if engine and model is None and "model" not in settings:
        raise DeployError("--model: the engine needs one, here or in [engine] of --config")
    if budget is not None:
        _check_budget(budget)
    chosen = settings.get("cachestore")
    if chosen == "auto":
        raise DeployError(
            f'{path or place.config}: cachestore = "auto" in [engine] would start a second store '
            "beside the service: leave it out"
        )
    if "idle-exit" in tables.get(CACHESTORE, {}):
        raise DeployError(
            f"{path or place.config}: idle-exit in [cachestore] would end the service for good: "
            "leave it out"
        )
    setup = Setup(
        python=Path(sys.executable),
        model=None if model is None else _model(model),
        budget=budget,
        config=path,
        drain_seconds=settings.get("drain-seconds"),
        attach=cachestore_socket(tables, place) if chosen is None else None,
        environment=carried(os.environ) if place.user is None else {},
    )
    _refuse_control_characters(setup, place)
    return setup


def read_tables(path: Path | None, place: Place) -> Tables:
    """The tables of the file that --config names, or of the usual one; the daemons check what is
    in them.
    """
    if path is None:
        if not place.config.exists():
            return {}
        path = place.config
    try:
        found = tomllib.loads(path.read_text())
    except OSError as error:
        raise DeployError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DeployError(f"{path}: {error}") from error
    return {name: table for name, table in found.items() if isinstance(table, dict)}


def cachestore_socket(tables: Tables, place: Place) -> Path:
    """Where the store of this configuration listens. Raises DeployError."""
    chosen = tables.get(CACHESTORE, {}).get("socket", place.runtime / "cachestore.sock")
    return _socket(chosen, suffix=endpoint.SESSION_SUFFIX)


def address(name: str, tables: Tables, place: Place) -> str:
    """Where a daemon listens: unix:PATH or HOST:PORT. Raises DeployError."""
    if name == CACHESTORE:
        return f"unix:{cachestore_socket(tables, place)}"
    chosen = str(tables.get(ENGINE, {}).get("listen", f"unix:{place.runtime / 'engine.sock'}"))
    if not chosen.startswith("unix:"):
        return chosen
    return f"unix:{_socket(chosen.removeprefix('unix:'))}"


def _socket(text: str | Path, suffix: str = "") -> Path:
    try:
        return endpoint.socket_path(text, flag="socket", suffix=suffix)
    except endpoint.EndpointError as error:
        raise DeployError(str(error)) from error


def _check_budget(text: str) -> None:
    try:
        parse_budget(text, physical_memory_bytes())
    except ValueError as error:
        raise DeployError(f"--budget: {error}") from error


def _model(text: str) -> str:
    """A folder is named absolutely; everything else is a name that the engine resolves."""
    folder = os.path.abspath(os.path.expanduser(text))
    if os.path.isdir(folder):
        return folder
    if text.startswith((".", "/", "~")):
        raise DeployError(f"--model: no such folder: {folder}")
    return text


def _refuse_control_characters(setup: Setup, place: Place) -> None:
    """Neither kind of definition can hold them, and nobody means them."""
    texts = [setup.model, setup.config, setup.attach, place.home, place.logs, setup.python]
    for text in (*texts, *setup.environment.values()):
        if text is not None and not str(text).isprintable():
            raise DeployError(f"a service cannot have {str(text)!r} in its command")
