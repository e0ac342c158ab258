"""Values of the engine's flags, as argparse reads them."""

import argparse
import sys
from pathlib import Path

from cachestore.flags import whole


class ConfigError(ValueError):
    """A flag has a value that cannot be used; the message names it and says what to use."""


def bias(text: str) -> tuple[int, float]:
    """Reads TOKEN=X."""
    token, _, value = text.partition("=")
    try:
        return whole(0)(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not TOKEN=X") from None


def utf8(text: str) -> str:
    """Bytes of the command line that are not UTF-8 arrive as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("not UTF-8") from None
    return text


def model_name(text: str) -> str:
    """A folder, a Hugging Face id or an alias; what it names is for whoever loads it to find out.
    UTF-8, as clients are told it."""
    if not text:
        raise argparse.ArgumentTypeError("empty; give a folder, a Hugging Face id, or smollm2")
    return utf8(text)


def text_of(name: str) -> str:
    """Reads the text in a file, or for - that on standard input."""
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        text = data.decode()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise argparse.ArgumentTypeError(f"{name}: not UTF-8") from None
    if not text:
        raise argparse.ArgumentTypeError(f"{name}: empty")
    return text
