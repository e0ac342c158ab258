"""What the two doctors say: `engine doctor` knows MLX and models, `cachestore-admin doctor` the
rest, and shows what both have found."""

import argparse
import contextlib
import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cachestore.report import printable


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong. `check` is for scripts, and stable; the others are for people:
    what is wrong, and what to do about it, in a line each."""

    check: str
    problem: str
    advice: str

    def __str__(self) -> str:
        return f"{self.check}: {printable(self.problem)}\n    {printable(self.advice)}"


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """What an engine that answers says of itself. `mlx_bytes`: what MLX holds, mostly weights."""

    address: str
    pid: int
    version: str
    model: str
    mlx_bytes: int
    cachestore_connected: bool


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What `engine doctor --json` prints. `engine` is None when none answers."""

    findings: tuple[Finding, ...]
    engine: RunningEngine | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> "EngineReport":
        """Raises KeyError and TypeError when it is not such a report."""
        findings = tuple(Finding(**each) for each in found["findings"])
        engine = found["engine"]
        return cls(findings, None if engine is None else RunningEngine(**engine))


def settings_of(
    read: Callable[[], argparse.Namespace],
) -> tuple[argparse.Namespace | None, tuple[Finding, ...]]:
    """What a daemon's parser makes of file and environment; it ends the process when they cannot
    be used, as it would end the daemon."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return read(), ()
    except SystemExit:
        problem = said.getvalue().strip().removeprefix("error: ")
        advice = "correct it, or leave it out; docs/configuration.md has all settings"
        return None, (Finding("settings", f"no daemon starts: {problem}", advice),)


def distinct(findings: Iterable[Finding]) -> list[Finding]:
    """In their order; both doctors look at some things."""
    return list(dict.fromkeys(findings))
