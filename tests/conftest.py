import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# pytest-xdist hands on how wide the terminal is; what tests run is in a pipe.
os.environ.pop("COLUMNS", None)
if "PYTEST_XDIST_WORKER" in os.environ:
    # OpenBLAS's threads wait by spinning, and would take the cores from the other workers.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import tests.support.mlx  # noqa: F401 - before anything imports MLX
from tests.support.daemons import Cachestore, short_directory, start_cachestore

# A shell's background jobs ignore Ctrl-C, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("ci", deadline=None, print_blob=True)
hypothesis.settings.load_profile("ci")


@pytest.fixture
def directory() -> Iterator[Path]:
    """A private directory with a path short enough for sockets."""
    with short_directory() as path:
        yield path


@pytest.fixture
def cachestore(directory: Path) -> Iterator[Cachestore]:
    """A real daemon of this test alone."""
    with start_cachestore(directory, budget="256MiB") as daemon:
        yield daemon
