"""The commands and files of an installation: each is shown, and in a dry run only shown."""

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cachestore.deploy.service import DeployError, command_text

_POLL_SECONDS = 0.25
_NO_SUCH_COMMAND = 127


@dataclass(frozen=True, slots=True)
class Result:
    """What a command ended with, and what it wrote to both outputs."""

    code: int
    output: str = ""

    @property
    def reason(self) -> str:
        lines = self.output.strip().splitlines()
        return lines[-1].strip() if lines else f"exit code {self.code}"


Runner = Callable[[Sequence[str]], Result]


def execute(command: Sequence[str]) -> Result:
    """The runner of real commands."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        return Result(_NO_SUCH_COMMAND, f"{command[0]}: {error.strerror}")
    return Result(done.returncode, done.stdout)


class Shell:
    """Does what changes something and says so; in a dry run it says so only.

    `ask` is for questions, which change nothing and are not shown. A dry run asks nothing
    either, as if nothing were installed, so that it works where no service manager runs.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        dry: bool = False,
        runner: Runner = execute,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.say = say
        self.dry = dry
        self._runner = runner
        self._clock = clock
        self.sleep = sleep

    def ask(self, *command: str) -> Result:
        return Result(1) if self.dry else self._runner(command)

    def run(self, *command: str) -> Result:
        self.say(f"+ {command_text(command)}")
        return Result(0) if self.dry else self._runner(command)

    def must(self, *command: str) -> None:
        """Raises DeployError when it fails."""
        result = self.run(*command)
        if result.code:
            raise DeployError(f"{command_text(command)}: {result.reason}")

    def write(self, path: Path, content: bytes, mode: int) -> None:
        """All of it or nothing: a manager may read the file at any moment."""
        self.say(f"+ write {path}")
        if self.dry:
            self.say(content.decode())
            return
        new = path.with_name(f".{path.name}.new")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new.write_bytes(content)
            new.chmod(mode)
            new.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                new.unlink()
            raise DeployError(f"{path}: {error.strerror}") from error

    def make_folder(self, path: Path, owner: str | None) -> None:
        """A private one; given to `owner` when we are root."""
        if path.is_dir():
            return
        self.say(f"+ mkdir {path}")
        if self.dry:
            return
        try:
            path.mkdir(mode=0o700, parents=True)
            if owner is not None:
                shutil.chown(path, owner)
        except OSError as error:
            raise DeployError(f"{path}: {error.strerror}") from error

    def remove(self, path: Path) -> None:
        self.say(f"+ rm {path}")
        if not self.dry:
            path.unlink(missing_ok=True)

    def wait(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Whether it was ready in time; in a dry run everything is at once."""
        deadline = self._clock() + seconds
        while not (self.dry or ready()):
            if self._clock() >= deadline:
                return False
            self.sleep(_POLL_SECONDS)
        return True
