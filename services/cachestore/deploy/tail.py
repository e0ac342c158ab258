"""The end of log files, and what is added to them."""

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

_POLL_SECONDS = 0.25


@dataclass(slots=True)
class _Followed:
    """One file, wherever rotation has moved it, until `close`."""

    path: Path
    file: TextIO | None = None
    partial: str = ""

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def open(self) -> TextIO | None:
        if self.file is None:
            try:
                self.file = self.path.open(errors="replace")
            except OSError:
                return None
        return self.file

    def last(self, lines: int) -> list[str]:
        file = self.open()
        return [line.rstrip("\n") for line in deque(file, lines)] if file else []

    def added(self) -> list[str]:
        """Whole lines since the last call; of a file that was renamed, what it had left first."""
        if (file := self.open()) is None:
            return []
        text = self.partial + file.read()
        *lines, self.partial = text.split("\n")
        if self._replaced(file):
            self.close()
        return lines

    def _replaced(self, file: TextIO) -> bool:
        try:
            return not os.path.samestat(self.path.stat(), os.fstat(file.fileno()))
        except FileNotFoundError:
            return True


def show(
    files: Mapping[str, Iterable[Path]],
    lines: int,
    *,
    follow: bool,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Prints the last `lines` of each file, and then, with `follow`, what is added until Ctrl-C.

    `files` are those of each service, whose name stands before each line.
    """
    followed = [(name, _Followed(path)) for name, paths in files.items() for path in paths]
    try:
        for name, file in followed:
            _print(name, file.last(lines))
        while follow:
            sleep(_POLL_SECONDS)
            for name, file in followed:
                _print(name, file.added())
    finally:
        for _, file in followed:
            file.close()


def _print(name: str, lines: list[str]) -> None:
    for line in lines:
        sys.stdout.write(f"{name} | {line}\n")
    sys.stdout.flush()
