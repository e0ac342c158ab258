"""Set-ups that are wrong in one way each, as people come to have them; `doctor` is to find them.

Each is there while its context is open, in a private directory that is the runtime directory too,
and yields what else the environment says.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from cachestore import variables
from cachestore.budget import physical_memory_bytes
from cachestore.client import StoreRefused
from cachestore.deploy import systemd
from cachestore.deploy.place import systemd_place
from cachestore.deploy.service import CACHESTORE, UNITS, Setup, services
from engine import backend
from tests.support import entries
from tests.support.daemons import start_cachestore

# What a daemon does before it is one.
MAIN = "import sys; from cachestore.cli import main; sys.exit(main())"
LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_{0}, ({1}, {1})); " + MAIN
OLDER = "from importlib import metadata; metadata.version = lambda name: '0.0.1'; " + MAIN

Environment = Mapping[str, str]


@contextlib.contextmanager
def a_runtime_directory_that_is_open(directory: Path) -> Iterator[Environment]:
    directory.chmod(0o755)
    yield {}


@contextlib.contextmanager
def a_path_that_no_socket_can_have(directory: Path) -> Iterator[Environment]:
    deep = directory / ("d" * 90)
    deep.mkdir(mode=0o700)
    yield {variables.RUNTIME_DIR: str(deep)}


@contextlib.contextmanager
def a_socket_that_is_open(directory: Path) -> Iterator[Environment]:
    with start_cachestore(directory) as store:
        store.socket.chmod(0o666)
        yield {}


@contextlib.contextmanager
def a_cachestore_that_was_killed(directory: Path) -> Iterator[Environment]:
    with start_cachestore(directory) as store:
        store.kill()
        yield {}


@contextlib.contextmanager
def a_cachestore_that_hangs(directory: Path) -> Iterator[Environment]:
    with start_cachestore(directory) as store:
        store.process.send_signal(signal.SIGSTOP)
        yield {}


@contextlib.contextmanager
def a_cachestore_of_another_version(directory: Path) -> Iterator[Environment]:
    with start_cachestore(directory, program=(sys.executable, "-c", OLDER)):
        yield {}


@contextlib.contextmanager
def a_budget_of_nearly_all_memory(directory: Path) -> Iterator[Environment]:
    with start_cachestore(directory, budget=physical_memory_bytes() * 9 // 10):
        yield {}


@contextlib.contextmanager
def a_cachestore_with_few_descriptors(directory: Path) -> Iterator[Environment]:
    program = (sys.executable, "-c", LIMITED.format("NOFILE", 40))
    with start_cachestore(directory, program=program):
        yield {}


@contextlib.contextmanager
def a_cachestore_with_little_address_space(directory: Path) -> Iterator[Environment]:
    budget = physical_memory_bytes() // 2
    program = (sys.executable, "-c", LIMITED.format("AS", budget - (1 << 20)))
    with start_cachestore(directory, program=program, budget=budget):
        yield {}


@contextlib.contextmanager
def a_cachestore_that_is_refused_memory(directory: Path) -> Iterator[Environment]:
    program = (sys.executable, "-c", LIMITED.format("FSIZE", 1 << 20))
    with start_cachestore(directory, program=program) as store, store.client() as client:
        with pytest.raises(StoreRefused, match="no shared memory"):
            entries.write(client, entries.tokens(10))
        yield {}


@contextlib.contextmanager
def a_way_to_shared_memory_that_does_not_exist(directory: Path) -> Iterator[Environment]:
    yield {variables.SHM: "file"}


@contextlib.contextmanager
def a_misspelt_setting(directory: Path) -> Iterator[Environment]:
    path = directory / "config.toml"
    path.write_text("[cachestore]\nbuget = '1GiB'\n")
    yield {variables.CONFIG: str(path)}


@contextlib.contextmanager
def a_service_whose_python_is_gone(directory: Path) -> Iterator[Environment]:
    place = systemd_place(directory, directory)
    service = services(Setup(Path("/no/such/python")), place)[CACHESTORE]
    place.definitions.mkdir(parents=True)
    (place.definitions / UNITS[CACHESTORE]).write_text(systemd.unit(service))
    yield {"HOME": str(directory)}


@contextlib.contextmanager
def a_service_that_does_not_run(directory: Path) -> Iterator[Environment]:
    with a_service_whose_python_is_gone(directory) as environment:
        (unit,) = directory.rglob(UNITS[CACHESTORE])
        unit.write_text(unit.read_text().replace("/no/such/python", sys.executable))
        yield environment


@contextlib.contextmanager
def two_backends(directory: Path) -> Iterator[Environment]:
    yield install(directory, "mlx_cuda_13", "0.32.4")


@contextlib.contextmanager
def another_mlx_lm(directory: Path) -> Iterator[Environment]:
    yield install(directory, "mlx_lm", "0.9.9")


@contextlib.contextmanager
def no_openblas(directory: Path) -> Iterator[Environment]:
    for name in backend.OPENBLAS_NAMES:
        (directory / name).write_bytes(b"no library")
    yield {"LD_LIBRARY_PATH": str(directory)}


@contextlib.contextmanager
def a_cache_folder_that_is_a_file(directory: Path) -> Iterator[Environment]:
    path = directory / "file"
    path.touch()
    yield {variables.CACHE_DIR: str(path)}


def install(directory: Path, name: str, version: str) -> Environment:
    """As pip would leave it, in front of what is installed."""
    folder = directory / "site" / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    fields = ("Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", "")
    (folder / "METADATA").write_text("\n".join(fields))
    return {"PYTHONPATH": os.pathsep.join([str(folder.parent), os.environ.get("PYTHONPATH", "")])}
