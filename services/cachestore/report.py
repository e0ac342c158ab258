"""What `cachestore-admin stats` shows, as plain data and as tables."""

from collections.abc import Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cachestore.budget import size_text
from cachestore.v1 import cachestore_pb2 as pb

Report = dict[str, Any]

KINDS = ("exact", "supersequence", "prefix", "lcp", "miss")
_WRITES = (
    *("committed", "rows_inserted", "rows_duplicate", "refused", "dropped"),
    *("checkpoints_inserted", "checkpoints_duplicate"),
)
_CONTENTS = ("tokens", "records", "sequences", "checkpoints")


def report(stats: pb.StatsResponse) -> Report:
    """Keys are stable. Rates are between 0 and 1, and None when nothing was asked."""
    names = (
        *("version", "pid", "uptime_seconds", "bytes_budget", "bytes_slabs", "bytes_used"),
        *("bytes_reserved", "bytes_quarantined", "bytes_retiring", "bytes_free"),
        *("bytes_padding", "bytes_stranded", "slabs", "records", "sequences"),
        *("tokens", "evictions", "bytes_evicted", "sessions", "leases", "reservations"),
        *("waiting", "announced", "pinned", "slab_failures", "check_failures"),
        *("bytes_useful", "bytes_moved", "checkpoints", "bytes_checkpoints"),
        *("checkpoints_evicted", "checkpoints_surplus"),
    )
    return {
        **_fields(stats, names),
        "namespaces": [namespace_report(namespace) for namespace in stats.namespaces],
        "lookups": _lookups(stats.lookups),
        "writes": _fields(stats.writes, _WRITES),
    }


def tables(found: Report) -> Group:
    parts: list[RenderableType] = [*map(Text, title(found)), _memory(found), _namespaces(found)]
    return Group(*parts, _activity(found))


def title(found: Report) -> list[str]:
    """Which daemon it is; and a line more when it is broken."""
    lines = [
        f"cachestore {printable(found['version'])}, process {found['pid']}, "
        f"up {duration(found['uptime_seconds'])}"
    ]
    if found["check_failures"]:
        lines.append("FAILED its own check and serves nothing: restart it, and see its log")
    return lines


def _fields(message: object, names: tuple[str, ...]) -> Report:
    return {name: getattr(message, name) for name in names}


def namespace_report(namespace: pb.NamespaceStats) -> Report:
    names = ("label", "bytes_used", "bytes_checkpoints", "checkpointed", *_CONTENTS)
    return {"namespace": namespace.namespace.hex(), **_fields(namespace, names)}


def _lookups(lookups: pb.LookupStats) -> Report:
    found = _fields(lookups, (*KINDS, "tokens_requested", "tokens_served"))
    requests = sum(found[kind] for kind in KINDS)
    requested = found["tokens_requested"]
    return {
        **found,
        "hit_rate_requests": (requests - found["miss"]) / requests if requests else None,
        "hit_rate_tokens": found["tokens_served"] / requested if requested else None,
        "seconds_p50": lookups.seconds_p50 or None,
        "seconds_p99": lookups.seconds_p99 or None,
        "seconds": _histogram(lookups.seconds),
    }


def _histogram(counted: pb.Histogram) -> Report:
    return {"bounds": [*counted.bounds], "counts": [*counted.counts], "sum": counted.sum}


def _memory(found: Report) -> Table:
    table = empty_table("memory", ("bytes", "of budget"))
    for name in ("budget", "slabs", "used", "reserved", "quarantined", "retiring", "free"):
        size = found[f"bytes_{name}"]
        table.add_row(name, size_text(size), percent(size / found["bytes_budget"]))
    parts = {"checkpoints": "used", "padding": "used", "stranded": "used", "useful": "free"}
    for name, kind in parts.items():
        size = found[f"bytes_{name}"]
        table.add_row(f"{kind}: {name}", size_text(size), percent(size / found["bytes_budget"]))
    return table


def _namespaces(found: Report) -> Table:
    columns = contents([found])
    table = empty_table("namespace", ("bytes", *columns))
    for row in found["namespaces"]:
        name = f"{namespace_name(row['label'])} ({row['namespace'][:8]})"
        table.add_row(Text(name), *contents_texts(row, columns))
    table.add_row("all", *contents_texts(found, columns))
    return table


def _activity(found: Report) -> Table:
    lookups, writes = found["lookups"], found["writes"]
    table = empty_table("since start", ("",))
    table.add_row("lookups", ", ".join(f"{lookups[kind]:,} {kind}" for kind in KINDS))
    table.add_row(
        "time of a lookup",
        f"p50 {milliseconds(lookups['seconds_p50'])}, p99 {milliseconds(lookups['seconds_p99'])}",
    )
    table.add_row("hit rate, requests", percent(lookups["hit_rate_requests"]))
    table.add_row(
        "hit rate, tokens",
        f"{percent(lookups['hit_rate_tokens'])} "
        f"({lookups['tokens_served']:,} of {lookups['tokens_requested']:,})",
    )
    table.add_row(
        "writes", ", ".join(f"{writes[name]:,} {name.replace('_', ' ')}" for name in writes)
    )
    table.add_row(
        "evictions",
        f"{found['evictions']:,} records, {found['checkpoints_evicted']:,} checkpoints; "
        f"{found['checkpoints_surplus']:,} checkpoints too many of a conversation "
        f"({size_text(found['bytes_evicted'])})",
    )
    table.add_row("moved to make free bytes useful", size_text(found["bytes_moved"]))
    if found["slab_failures"]:
        table.add_row("no memory for a slab", f"{found['slab_failures']:,} times")
    table.add_row(
        "now open",
        f"{found['sessions']:,} sessions, {found['leases']:,} leases, "
        f"{found['reservations']:,} reservations, {found['announced']:,} announcements, "
        f"{found['pinned']:,} pins; {found['waiting']:,} lookups wait",
    )
    return table


def empty_table(first: str, columns: tuple[str, ...]) -> Table:
    table = Table()
    table.add_column(first)
    for column in columns:
        # Numbers must not be cut. A column without a name has text.
        table.add_column(column, justify="right" if column else "left", no_wrap=bool(column))
    return table


def contents(rows: Iterable[Report]) -> tuple[str, ...]:
    """What there is to be counted: most models need no checkpoints."""
    return _CONTENTS if any(row["checkpoints"] for row in rows) else _CONTENTS[:-1]


def contents_texts(row: Report, columns: tuple[str, ...]) -> list[str]:
    return [size_text(row["bytes_used"]), *(f"{row[name]:,}" for name in columns)]


def namespace_name(label: str) -> str:
    return printable(label) or "unnamed"


def printable(text: str) -> str:
    """What another process has chosen: it must not move the cursor."""
    return "".join(character if character.isprintable() else "?" for character in text)


def percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1%}"


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.3g} ms"


def duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
