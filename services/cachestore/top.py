"""`cachestore-admin top`: what a cachestore does now, on one screen."""

import math
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cachestore.budget import size_text
from cachestore.client import Client, StoreUnavailable
from cachestore.listing import entry_report
from cachestore.report import (
    KINDS,
    Report,
    contents,
    duration,
    milliseconds,
    namespace_name,
    percent,
    report,
    title,
)

# Of a screen where there is no terminal.
LINES = 24
WINDOW_SECONDS = 60.0
_PREFIXES_MAX = 50
_BAR_CELLS = 24
_LABEL_CELLS = 18


def show(console: Console, seconds: float, screen: Callable[[], RenderableType]) -> None:
    """All over a terminal what `screen` gives, anew after so many seconds; until an exception, or a
    signal, after which the terminal is as it was. On the main thread."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            live.update(screen(), refresh=True)
            time.sleep(seconds)


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


class History:
    """What one daemon has told within the last minute."""

    def __init__(self) -> None:
        self._told: deque[Report] = deque()

    def add(self, found: Report) -> None:
        # Another daemon, in a container perhaps with the same id.
        if self._told and (self._last["pid"] != found["pid"] or _younger(found, self._last)):
            self._told.clear()
        self._told.append(found)
        # The first one that is as old as the window, or older, stays.
        while len(self._told) > 2 and self._age(self._told[1]) >= WINDOW_SECONDS:
            self._told.popleft()

    @property
    def seconds(self) -> float:
        """The time that changes are counted over: of a single report all since the start."""
        return self._age(self._told[0]) if len(self._told) > 1 else self._last["uptime_seconds"]

    def change(self, *path: str) -> int:
        """By how much a counter has grown."""
        first = _value(self._told[0], path) if len(self._told) > 1 else 0
        return _value(self._last, path) - first

    @property
    def _last(self) -> Report:
        return self._told[-1]

    def _age(self, found: Report) -> float:
        return float(self._last["uptime_seconds"] - found["uptime_seconds"])


class Watched:
    """A daemon as a person sees it. When it goes away that is said, and the next one at the same
    place is asked as soon as it is there."""

    def __init__(self, client: Client, path: Path) -> None:
        self._client = client
        self._path = path
        self._history = History()
        self._away_since: float | None = None

    def screen(self, lines: int) -> RenderableType:
        """At most so many lines."""
        try:
            if self._away_since is not None:
                self._client = Client.connect(self._path, role="admin")
                self._away_since = None
            return screen(self._client, self._history, lines)
        except StoreUnavailable as error:
            if self._away_since is None:
                self._client.close()
                self._away_since = time.monotonic()
            seconds = time.monotonic() - self._away_since
            return Text(f"No cachestore for {seconds:.0f} s, asking again: {error}")

    def close(self) -> None:
        self._client.close()


def screen(client: Client, history: History, lines: int) -> RenderableType:
    """Everything, with as many prefixes as fit. Raises StoreUnavailable."""
    found = report(client.stats())
    history.add(found)
    above = [Text(line, no_wrap=True, overflow="ellipsis") for line in title(found)]
    facts, lookups = _facts(found, history), _lookups(found, history)
    # Two empty lines, and one above the rows of each table.
    used = len(above) + len(facts) + 1 + (1 + lookups.row_count) + 1 + 1
    prefixes = client.prefixes(max(1, min(_PREFIXES_MAX, lines - used)))
    labels = {row["namespace"]: namespace_name(row["label"]) for row in found["namespaces"]}
    hottest = _hottest([entry_report(entry) for entry in prefixes], labels)
    return Group(*above, *facts, Text(), lookups, Text(), hottest)


def _line(name: str, value: str | Text) -> Text:
    """Cut where the screen ends."""
    line = Text(no_wrap=True, overflow="ellipsis")
    return line.append(f"{name:<11}", "bold").append(value)


def _facts(found: Report, history: History) -> list[Text]:
    budget, used, lookups = found["bytes_budget"], found["bytes_used"], found["lookups"]
    asked = history.change("lookups", "tokens_requested")
    served = history.change("lookups", "tokens_served")
    evicted = history.change("evictions") + history.change("checkpoints_evicted")
    held = ", ".join(f"{found[name]:,} {name}" for name in contents([found]))
    bar = _bar(used / budget)
    return [
        _line("memory", bar.append(f" {size_text(used)}, {percent(used / budget)} of budget")),
        _line(
            "",
            f"{size_text(found['bytes_slabs'])} in {found['slabs']:,} slabs, "
            f"{size_text(budget)} at most",
        ),
        _line("holds", f"{held}, {found['pinned']:,} pins"),
        _line(
            "hit rate",
            f"{percent(served / asked if asked else None)} of tokens in the last "
            f"{duration(history.seconds)}, {percent(lookups['hit_rate_tokens'])} since start",
        ),
        _line(
            "a lookup",
            f"p50 {milliseconds(lookups['seconds_p50'])}, "
            f"p99 {milliseconds(lookups['seconds_p99'])}, since start",
        ),
        _line(
            "evicted",
            f"{found['evictions']:,} records, {found['checkpoints_evicted']:,} checkpoints, "
            f"{size_text(found['bytes_evicted'])}; {_rate(evicted, history)} a second",
        ),
        _line(
            "now open",
            f"{found['sessions']:,} sessions, {found['leases']:,} leases, "
            f"{found['reservations']:,} reservations; {found['waiting']:,} lookups wait",
        ),
    ]


def _lookups(found: Report, history: History) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column("lookups", style="bold", no_wrap=True)
    counts, changes = [], []
    for kind in KINDS:
        table.add_column(kind, justify="right", no_wrap=True, min_width=8)
        counts.append(found["lookups"][kind])
        changes.append(history.change("lookups", kind))
    table.add_column("all", justify="right", no_wrap=True, min_width=8)
    table.show_header = True
    table.add_row("since start", *(f"{count:,}" for count in (*counts, sum(counts))))
    table.add_row("a second", *(_rate(count, history) for count in (*changes, sum(changes))))
    return table


def _hottest(prefixes: Sequence[Report], labels: dict[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name in ("hottest prefixes", "hits", "unused for", "to record"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    # Numbers must not be cut to make room for a name.
    table.add_column("of", no_wrap=True, max_width=_LABEL_CELLS)
    table.show_header = True
    for prefix in prefixes:
        table.add_row(
            f"{prefix['first_token'] + prefix['tokens']:,} tokens",
            f"{prefix['hits']:,}",
            duration(prefix["age_seconds"]),
            str(prefix["record_id"]),
            "pinned" if prefix["pinned"] else "",
            Text(labels.get(prefix["namespace"], prefix["namespace"][:8])),
        )
    return table


def _bar(share: float) -> Text:
    cells = min(_BAR_CELLS, math.ceil(share * _BAR_CELLS))
    return Text.assemble("[", ("#" * cells, "green"), "." * (_BAR_CELLS - cells), "]")


def _rate(count: int, history: History) -> str:
    return f"{count / history.seconds:,.1f}" if history.seconds else "-"


def _younger(found: Report, other: Report) -> bool:
    return bool(found["uptime_seconds"] < other["uptime_seconds"])


def _value(found: Report, path: Sequence[str]) -> int:
    for name in path:
        found = found[name]
    assert isinstance(found, int)
    return found
