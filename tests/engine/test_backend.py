"""A case of `prepare` runs in a process of its own, since MLX is imported in this one."""

import subprocess
import sys

import pytest

from engine import backend

PREAMBLE = """
import logging, sys
from importlib import metadata
from engine import backend
logging.basicConfig(level=logging.WARNING)
sys.platform = "linux"
versions = {versions!r}
def version(name):
    if name in versions:
        return versions[name]
    raise metadata.PackageNotFoundError(name)
metadata.version = version
def attempt():
    try:
        backend.prepare()
    except backend.BackendError as error:
        print(error)
"""

# A wheel that has its library, on a machine without OpenBLAS.
WHOLE = """
import ctypes
from pathlib import Path
def refuse(name, mode=0):
    raise OSError(name)
ctypes.CDLL = refuse
Path.is_file = lambda self: True
class Distribution:
    def locate_file(self, path):
        return path
metadata.distribution = lambda name: Distribution()
"""
RUN_AHEAD = "MLX_MAX_OPS_PER_BUFFER"


def outcome(
    script: str, versions: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    if versions is not None:
        script = PREAMBLE.format(versions=versions) + script
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=False, text=True
    )


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({"mlx": "1"}, "MLX has no backend: pip install 'mlx-cachestore[cpu]'"),
        (
            {"mlx": "1", "mlx-cpu": "1", "mlx-cuda-13": "1"},
            "pip uninstall -y mlx-cpu mlx-cuda-13, then pip install one of them alone",
        ),
        ({"mlx": "2", "mlx-cpu": "1"}, "mlx 2 does not fit mlx-cpu 1: pip install mlx-cpu==2"),
    ],
)
def test_wheels_that_cannot_run_say_what_to_install(versions: dict[str, str], message: str) -> None:
    said = outcome("attempt()", versions).stdout
    assert message in said
    assert said.count("\n") == 1


def test_a_library_lost_by_uninstalling_its_rival_is_named() -> None:
    script = """
class Distribution:
    def locate_file(self, path):
        return "/nowhere/" + path
metadata.distribution = lambda name: Distribution()
attempt()
"""
    said = outcome(script, {"mlx": "1", "mlx-cpu": "1"}).stdout
    assert said == (
        "mlx-cpu has lost its library: pip install --force-reinstall --no-deps mlx-cpu==1\n"
    )


def test_a_missing_openblas_is_said_once() -> None:
    said = outcome(WHOLE + "attempt()\nattempt()", {"mlx": "1", "mlx-cpu": "1"}).stderr
    assert said.count("libopenblas0-pthread") == 1


@pytest.mark.parametrize(
    ("wheel", "platform", "users", "expected"),
    [
        ("mlx-cuda-12", "linux", None, "25"),
        ("mlx-cuda-13", "linux", None, "25"),
        ("mlx-cuda-13", "linux", "7", "7"),
        ("mlx-cpu", "linux", None, "None"),
        ("mlx-cpu", "linux", "7", "7"),
        ("mlx-cuda-13", "darwin", None, "None"),
    ],
)
def test_with_cuda_the_host_runs_ahead_less_unless_the_user_says_how_far(
    wheel: str, platform: str, users: str | None, expected: str
) -> None:
    environment = {} if users is None else {RUN_AHEAD: users}
    script = f"""
import os
os.environ.pop({RUN_AHEAD!r}, None)
os.environ.update({environment!r})
sys.platform = {platform!r}
attempt()
print(os.environ.get({RUN_AHEAD!r}))
"""
    assert outcome(WHOLE + script, {"mlx": "1", wheel: "1"}).stdout == f"{expected}\n"


def test_preparing_after_mlx_was_imported_is_a_programming_error() -> None:
    result = outcome("import mlx.core; from engine import backend; backend.prepare()")
    assert "must run before the first import of mlx.core" in result.stderr
    assert result.returncode == 1


def test_preparing_does_not_import_mlx() -> None:
    script = (
        "import sys; from engine import backend; backend.prepare(); print('mlx' in sys.modules)"
    )
    assert outcome(script).stdout == "False\n"


def test_description_and_limits_of_this_machine() -> None:
    found = backend.describe()
    assert found.name in {"cpu", "metal", "cuda"}
    assert found.device_name
    backend.apply_memory_limits(backend.memory_limits(found))


def test_the_wired_limit_is_kept_off_unless_asked_for() -> None:
    metal = backend.Backend("metal", "Apple M4", 12 << 30)
    assert backend.memory_limits(metal) == backend.MemoryLimits((12 << 30) // 20, 0)
    assert backend.memory_limits(metal, 1 << 30).wired_bytes == 1 << 30
    assert backend.memory_limits(backend.Backend("metal", "?", None)).cache_bytes is None
    assert backend.memory_limits(backend.Backend("cpu", "?", None)).cache_bytes == 2 << 30
