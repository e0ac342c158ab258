"""Services as user units of systemd.service(5)."""

import re

from cachestore.deploy.place import APP
from cachestore.deploy.service import (
    CACHESTORE,
    DESCRIPTORS,
    ENGINE,
    RESTART_SECONDS,
    UNITS,
    WATCHDOG_SECONDS,
    Service,
)

_PLAIN = re.compile(r"[\w@+=:,./-]+", re.ASCII)


def unit(service: Service) -> str:
    lines = ["[Unit]", f"Description={_literal(service.description)}"]
    if service.name == ENGINE:
        # Wants, not Requires: it serves without the store, and connects when that comes back.
        lines += [f"Wants={UNITS[CACHESTORE]}", f"After={UNITS[CACHESTORE]}"]
    lines += [
        "",
        "[Service]",
        "Type=notify",
        f"ExecStart={_command(service.arguments)}",
        f"WorkingDirectory={_literal(str(service.place.home))}",
        *(f"Environment={_quoted(f'{k}={v}')}" for k, v in service.environment.items()),
        "Restart=on-failure",
        f"RestartSec={RESTART_SECONDS}",
        f"TimeoutStartSec={service.start_seconds}",
        f"TimeoutStopSec={service.stop_seconds}",
        f"WatchdogSec={WATCHDOG_SECONDS}",
        "UMask=0077",
        f"LimitNOFILE={DESCRIPTORS}",
        f"StandardOutput=append:{_literal(str(service.crash_log))}",
        f"StandardError=append:{_literal(str(service.crash_log))}",
    ]
    if service.name == CACHESTORE:
        # Kept when the store stops: the engine's socket lies there, too.
        lines += [
            f"RuntimeDirectory={APP}",
            "RuntimeDirectoryMode=0700",
            "RuntimeDirectoryPreserve=yes",
        ]
    lines += ["", "[Install]", "WantedBy=default.target", ""]
    return "\n".join(lines)


def arguments(text: str) -> tuple[str, ...]:
    """The program and its arguments in a unit that `unit` wrote."""
    line = next(line for line in text.splitlines() if line.startswith("ExecStart="))
    words = re.findall(r'"((?:[^"\\]|\\.)*)"|(\S+)', line.removeprefix("ExecStart="))
    program, *rest = (_unescaped(quoted or plain) for quoted, plain in words)
    return (program, *(word.replace("$$", "$") for word in rest))


def _literal(text: str) -> str:
    """Percent signs are systemd's own."""
    return text.replace("%", "%%")


def _quoted(text: str) -> str:
    return '"' + _literal(text).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _command(arguments: tuple[str, ...]) -> str:
    """Dollar signs are variables, though not in the program's own path."""
    program, *rest = [text if _PLAIN.fullmatch(text) else _quoted(text) for text in arguments]
    return " ".join([program, *(word.replace("$", "$$") for word in rest)])


def _unescaped(word: str) -> str:
    return re.sub(r"\\(.)", r"\1", word).replace("%%", "%")
