"""What a person says at installation, checked before anything is changed."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cachestore import endpoint, settings, variables
from cachestore.budget import parse_budget, physical_memory_bytes
from cachestore.deploy.place import Place
from cachestore.deploy.service import CACHESTORE, ENGINE, DeployError, Setup, carried

Tables = Mapping[str, Mapping[str, Any]]

# Of a store that the engine starts, and what to do about one that is a service.
_OF_OWN_STORE = {
    "cachestore-budget": "set budget in [cachestore]",
    "idle-exit": "leave it out",
}


def make_setup(
    model: str | None, budget: str | None, config: Path | None, place: Place, *, engine: bool
) -> Setup:
    """Raises DeployError. `engine` is whether that is to be installed, which needs a model."""
    chosen_file = config or os.environ.get(variables.CONFIG) or None
    path = None if chosen_file is None else Path(os.path.abspath(chosen_file))
    tables = read_tables(path, place)
    engine_table = tables.get(ENGINE, {})
    if model == "":  # the working directory would be taken
        raise DeployError("--model: empty; give what `engine serve` takes, or leave it out")
    if engine and model is None and "model" not in engine_table:
        raise DeployError("--model: the engine needs one, here or in [engine] of --config")
    if budget is not None:
        _check_budget(budget)
    chosen = engine_table.get("cachestore")
    if chosen == "auto":
        raise DeployError(
            f'{path or place.config}: cachestore = "auto" in [engine] would start a second store '
            "beside the service: leave it out"
        )
    for key, advice in _OF_OWN_STORE.items():
        if chosen is None and key in engine_table:
            raise DeployError(
                f"{path or place.config}: {key} in [engine] is for a store that the engine starts, "
                f"and the service is none: {advice}"
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
        drain_seconds=_drain_seconds(tables),
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
        found = settings.load(path)
    except OSError as error:
        raise DeployError(f"{path}: {error.strerror}") from error
    except settings.SettingsError as error:
        raise DeployError(str(error)) from error
    return {name: table for name, table in found.items() if isinstance(table, dict)}


def cachestore_socket(tables: Tables, place: Place) -> Path:
    """Where the store of this configuration listens. Raises DeployError."""
    chosen = _text(tables, CACHESTORE, "socket", str(place.runtime / "cachestore.sock"))
    return _socket(chosen, place, suffix=endpoint.SESSION_SUFFIX)


def address(name: str, tables: Tables, place: Place) -> str:
    """Where a daemon listens: unix:PATH or HOST:PORT. Raises DeployError."""
    if name == CACHESTORE:
        return f"unix:{cachestore_socket(tables, place)}"
    chosen = _text(tables, ENGINE, "listen", f"unix:{place.runtime / 'engine.sock'}")
    if not chosen.startswith("unix:"):
        return chosen
    return f"unix:{_socket(chosen.removeprefix('unix:'), place)}"


def address_of(name: str, arguments: Sequence[str], place: Place) -> str:
    """Where a daemon with this command listens. Raises DeployError."""
    path = None
    if "--config" in arguments:
        path = Path(arguments[arguments.index("--config") + 1])
    return address(name, read_tables(path, place), place)


def _text(tables: Tables, name: str, key: str, default: str) -> str:
    found = tables.get(name, {}).get(key, default)
    if not isinstance(found, str):
        raise DeployError(f"{key} in [{name}] must be a string, not {found!r}")
    return found


def _drain_seconds(tables: Tables) -> int | None:
    found = tables.get(ENGINE, {}).get("drain-seconds")
    if found is not None and (type(found) is not int or found < 0):
        raise DeployError(f"drain-seconds in [engine] must be a whole number, not {found!r}")
    return found


def _socket(text: str, place: Place, suffix: str = "") -> Path:
    """A relative path begins where the daemons run, not where this does."""
    path = os.path.join(place.home, text) if text else text
    try:
        return endpoint.socket_path(path, flag="socket", suffix=suffix)
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
    texts = [setup.model, setup.budget, setup.config, setup.attach, setup.python]
    for text in (*texts, place.home, place.logs, *setup.environment.values()):
        if text is not None and not str(text).isprintable():
            raise DeployError(f"a service cannot have {str(text)!r} in its command")
