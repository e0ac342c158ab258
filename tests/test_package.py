"""The wheel and the sdist, built as `python -m build` builds them: what is in them, and that the
commands of the wheel run. scripts/check-package installs both with all that they need."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
# Kept out of the sdist on purpose.
NOT_IN_SDIST = {".gitignore"}
# No PYTHONPATH, which could lead to the sources.
ENVIRONMENT = {"PATH": os.environ["PATH"]}

pytestmark = pytest.mark.slow


def sources() -> set[str]:
    """What the repository holds: not what lies about."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return {name for name in listed if (ROOT / name).exists()}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, built of the sources alone."""
    place = tmp_path_factory.mktemp("package")
    for name in sources():
        (place / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, place / "tree" / name)
    built = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", place / "dist", place / "tree"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return place / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    assert found.name == f"mlx_cachestore-{VERSION}-py3-none-any.whl"
    return found


def test_the_sdist_has_the_whole_repository(dist: Path) -> None:
    root = f"mlx_cachestore-{VERSION}"
    with tarfile.open(dist / f"{root}.tar.gz") as archive:
        files = {m.name.removeprefix(f"{root}/") for m in archive.getmembers() if m.isfile()}
    assert sources() - files == NOT_IN_SDIST


def test_the_wheel_has_the_packages_with_their_data_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
        information = f"mlx_cachestore-{VERSION}.dist-info/"
        metadata = archive.read(information + "METADATA").decode()
    services = {name.removeprefix("services/") for name in sources() if name.startswith("services")}
    assert {name for name in files if not name.startswith(information)} == services
    assert {name.rpartition("/")[2] for name in files if "/licenses/" in name} == {
        "LICENSE",
        "NOTICE",
    }
    assert f"Version: {VERSION}\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata


def test_its_commands_run_from_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-index", "--no-deps", str(wheel)], env=ENVIRONMENT, check=True)
    # All that it needs is here already; what is installed in its own environment comes first.
    own = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")}))
    (own / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for command in ("engine", "cachestore", "cachestore-admin"):
        for flag, said in (("--version", f"{command} {VERSION}\n"), ("--help", "usage: ")):
            ran = subprocess.run(
                [tmp_path / "venv" / "bin" / command, flag],
                cwd=tmp_path,
                env=ENVIRONMENT,
                capture_output=True,
                text=True,
                check=False,
            )
            assert (ran.returncode, ran.stderr) == (0, "")
            assert ran.stdout.startswith(said)
    where = [str(python), "-P", "-c", "import cachestore, engine; print(cachestore, engine)"]
    shown = subprocess.run(where, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert shown.stdout.count(str(own)) == 2
