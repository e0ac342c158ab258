"""Log lines of both daemons: plain or JSON, on stderr or in a file that rotates."""

import argparse
import contextlib
import errno
import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import platformdirs

from cachestore import config

AUTO = "auto"
FORMATS = ("plain", "json")
LEVELS = ("debug", "info", "warning", "error")
_PLAIN = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# What needs no quotes in a plain line.
_WORD = re.compile(r"[\w.:/+-]+")


class LogError(ValueError):
    """The log cannot be written; the message names the flag."""


@dataclass(frozen=True, slots=True)
class LogConfig:
    """`file` None: stderr. With a file nothing but a crash is written to stderr."""

    level: str = "info"
    format: str = "plain"
    file: Path | None = None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """--log-level, --log-format and --log-file."""
    parser.add_argument(
        "--log-level",
        choices=LEVELS,
        default="info",
        help="what is worth a line of the log (default: %(default)s)",
    )
    parser.add_argument(
        "--log-format",
        choices=FORMATS,
        default="plain",
        help="json: one object a line (default: %(default)s)",
    )
    parser.add_argument(
        "--log-file",
        metavar=f"{AUTO}|PATH",
        help=f"write to a file instead; {AUTO}: in the user's log folder. It is kept below "
        f"{config.LOG_BYTES_MAX >> 20} MiB, with {config.LOG_FILES_BEFORE} before it "
        "(default: stderr)",
    )


def config_of(flags: argparse.Namespace, program: str) -> LogConfig:
    """What the flags of `add_flags` say; a command without them has a level only."""
    asked = getattr(flags, "log_file", None)
    file = None if asked is None else Path(asked)
    if asked == AUTO:
        file = file_in_folder(program)
    return LogConfig(flags.log_level, getattr(flags, "log_format", "plain"), file)


def folder() -> Path:
    """The platform's directory for our logs. May not exist yet."""
    return platformdirs.user_log_path("mlx-cachestore")


def file_in_folder(program: str) -> Path:
    return folder() / f"{program}.log"


def begin(settings: LogConfig) -> None:
    """Write all log lines of this process from now on as `settings` says. Raises LogError."""
    handler: logging.Handler = logging.StreamHandler()
    if settings.file is not None:
        handler = _open(settings.file)
    handler.setFormatter(JsonFormatter() if settings.format == "json" else PlainFormatter(_PLAIN))
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)


def last_words(error: object) -> None:
    """Why the process does not go on: on stderr, and in the log file if there is one."""
    sys.stderr.write(f"error: {error}\n")
    if any(isinstance(handler, _RotatingFile) for handler in logging.getLogger().handlers):
        logging.getLogger(__name__).error("%s", error)


def event(logger: logging.Logger, name: str, fields: Mapping[str, object]) -> None:
    """A line for programs as much as for people: `fields` follow the name, or are keys of the
    object."""
    logger.info(name, extra={"fields": fields})


class PlainFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = [f" {name}={_word(value)}" for name, value in _fields(record).items()]
        return super().formatMessage(record) + "".join(fields)


class JsonFormatter(logging.Formatter):
    """An object with time (RFC 3339, UTC), level, logger, message, the fields of an event, and
    exception, if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    return fields


def _word(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if _WORD.fullmatch(text) else json.dumps(value, default=str)


def _open(path: Path) -> RotatingFileHandler:
    try:
        if path.parent == folder():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _RotatingFile(
            path,
            maxBytes=config.LOG_BYTES_MAX,
            backupCount=config.LOG_FILES_BEFORE,
            encoding="utf-8",
            errors="backslashreplace",
        )
    except OSError as error:
        raise LogError(f"--log-file {path}: {error.strerror}") from error


class _RotatingFile(RotatingFileHandler):
    """Private, and begun anew also when somebody else moved it away: newsyslog, or a second
    process that writes to it. Where no new one can be begun, the old one goes on."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        """A line that cannot be written is lost, and that is said once: stderr may be a file on
        the same full disk, which nobody rotates."""
        if not self._failed:
            self._failed = True
            super().handleError(record)

    def doRollover(self) -> None:
        try:
            super().doRollover()
        except OSError:
            if self.stream is None:
                self.stream = self._open()

    def _open(self) -> TextIOWrapper:
        if os.path.exists(self.baseFilename) and not os.path.isfile(self.baseFilename):
            # A pipe that nobody reads would hold us for ever, and a device cannot be renamed.
            raise OSError(errno.EINVAL, "not a regular file; without the flag the log is on stderr")
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        fd = os.open(self.baseFilename, flags, 0o600)
        return os.fdopen(fd, "a", encoding=self.encoding, errors=self.errors)

    def shouldRollover(self, record: logging.LogRecord) -> bool:
        if self.stream is not None and self._moved(self.stream):
            with contextlib.suppress(OSError):
                moved, self.stream = self.stream, self._open()
                moved.close()
        return bool(super().shouldRollover(record))

    def _moved(self, stream: TextIOWrapper) -> bool:
        try:
            return not os.path.samestat(os.stat(self.baseFilename), os.fstat(stream.fileno()))
        except FileNotFoundError:
            return True
