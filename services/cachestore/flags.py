"""Command lines that say what is wrong in one line."""

import argparse
import math
from pathlib import Path
from typing import NoReturn

from cachestore import endpoint


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message.removeprefix('argument ')}\n")


def cachestore_socket(flag: Path | None) -> Path:
    """The socket that --socket names, or the user's default one. Raises EndpointError."""
    path = endpoint.cachestore_socket() if flag is None else flag
    return endpoint.socket_path(path, flag="--socket", suffix=endpoint.SESSION_SUFFIX)


def seconds(text: str) -> float:
    """The type of a flag that takes a number of seconds above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (number > 0 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return number
