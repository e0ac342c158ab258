"""Command lines that say what is wrong in one line."""

import argparse
import difflib
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, Generic, NoReturn, TypeVar

from cachestore import budget, endpoint

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message.removeprefix('argument ')}\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        words = sys.argv[1:] if args is None else [*args]
        # What follows a command is for the parser of that command.
        ours = words if self._subparsers is None else takewhile(_is_flag, words)
        for word in takewhile("--".__ne__, ours):
            self._check_known(word)
        return super().parse_known_args(words, namespace)

    def _check_known(self, word: str) -> None:
        """argparse would miss a flag that is required before it names the misspelt one."""
        flag = word.partition("=")[0]
        known = self._option_string_actions
        # It reads abbreviations, and takes words with a space in them for values.
        if _is_flag(word) and " " not in word and not any(k.startswith(flag) for k in known):
            self.error(f"{flag}: no such flag{nearest(flag, known)}")


def nearest(name: str, known: Iterable[str]) -> str:
    """What to say of a name that is none of these."""
    found = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {found[0]}?" if found else "; --help has all"


def _is_flag(word: str) -> bool:
    return word.startswith("--")


@dataclass(frozen=True, slots=True)
class Value(Generic[T]):
    """The type of a flag whose values need not be strings in a file of settings. `toml`: what they
    may be there, as tomllib reads it. `read` raises ArgumentTypeError."""

    toml: tuple[type, ...]
    read: Callable[[str], T]

    def __call__(self, text: str) -> T:
        return self.read(text)


def add_reflection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--reflection",
        action=argparse.BooleanOptionalAction,
        help="let gRPC clients ask what is served (default: no)",
    )


def add_version(parser: argparse.ArgumentParser) -> None:
    """--version, of the installed distribution: the number is written in pyproject.toml alone."""
    version = f"%(prog)s {metadata.version('mlx-cachestore')}"
    parser.add_argument("--version", action="version", version=version)


def add_metrics(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--metrics",
        type=_tcp_address,
        metavar="HOST:PORT",
        help="serve /metrics for Prometheus at this loopback address; port 0 takes a free one, "
        "which the log tells (default: not served)",
    )


def cachestore_socket(flag: Path | None) -> Path:
    """The socket that --socket names, or the user's default one. Raises EndpointError."""
    path = endpoint.cachestore_socket() if flag is None else flag
    if str(path).startswith("unix:"):
        raise endpoint.EndpointError(f"--socket: {path} is not a path: leave out unix:")
    return endpoint.socket_path(path, flag="--socket", suffix=endpoint.SESSION_SUFFIX)


def whole(least: int, most: int = 2**32 - 1) -> Value[int]:
    """Reads a number of this range; the requests that carry most of them have no larger one."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{number} is not between {least} and {most}")
        return number

    return Value((int,), read)


def _tcp_address(text: str) -> endpoint.TcpAddress:
    try:
        return endpoint.tcp_address(text)
    except endpoint.EndpointError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (number > 0 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return number


def _size(text: str) -> int:
    try:
        return budget.parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _store_budget(text: str) -> int:
    try:
        return budget.parse_budget(text, budget.physical_memory_bytes())
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# A number of seconds above 0; bytes, like 8GiB; bytes that a store on this machine may have.
seconds: Final = Value((int, float), _seconds)
size: Final = Value((str, int), _size)
store_budget: Final = Value((str, int), _store_budget)
