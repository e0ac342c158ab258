"""A command on a terminal."""

import contextlib
import os
import pty
import subprocess
import termios
from collections.abc import Iterator, Sequence


class Terminal:
    """`text` is all that has come."""

    def __init__(self, end: int, process: "subprocess.Popen[bytes]") -> None:
        self._end = end
        self._seen = 0
        self.process = process
        self.text = ""

    def sees(self, words: str) -> bool:
        """Whether they have come since what was seen before."""
        self._read()
        at = self.text.find(words, self._seen)
        if at >= 0:
            self._seen = at + len(words)
        return at >= 0

    def read_all(self) -> None:
        while self._read():
            pass

    def _read(self) -> bool:
        with contextlib.suppress(OSError):  # Linux says so when the other end is closed
            more = os.read(self._end, 1 << 16)
            self.text += more.decode(errors="replace")
            return bool(more)
        return False


@contextlib.contextmanager
def on_terminal(command: Sequence[str], **environment: str) -> Iterator[Terminal]:
    """It runs on 80 columns and 24 lines, and ends with the body."""
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (24, 80))
    env = {**os.environ, "TERM": "xterm-256color", **environment}
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
        if name not in environment:
            env.pop(name, None)
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=env)
    os.close(its)
    try:
        yield Terminal(ours, process)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
