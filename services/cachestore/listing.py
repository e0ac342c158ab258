"""Entries, namespaces and records, as plain data and as tables."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from cachestore import record
from cachestore.budget import size_text
from cachestore.report import (
    Report,
    contents,
    contents_texts,
    empty_table,
    namespace_name,
    namespace_report,
)
from cachestore.v1 import cachestore_pb2 as pb

# What is most wanted comes first.
SORT_KEYS = {
    "bytes": lambda entry: -entry["bytes"],
    "hits": lambda entry: -entry["hits"],
    "age": lambda entry: -entry["age_seconds"],
}


def entry_report(entry: pb.Entry) -> Report:
    return {
        "record_id": entry.span.record_id,
        "namespace": entry.namespace.hex(),
        "parent_record_id": entry.parent_record_id,
        "first_token": entry.first_token,
        "tokens": entry.span.rows,
        "sequences": entry.sequences,
        "bytes": entry.span.extent.length,
        "hits": entry.hits,
        "age_seconds": entry.age_seconds,
        "claims": entry.claims,
        "pinned": entry.pinned,
        "checkpoint": entry.checkpoint,
    }


def entries_table(entries: Sequence[Report], labels: dict[str, str], total: int) -> Group:
    found = empty_table("record", ("tokens", "bytes", "hits", "unused for", "", "of"))
    for entry in entries:
        first, position = entry["first_token"], entry["checkpoint"]
        rows = f"{first:,} to {first + entry['tokens'] - 1:,}"
        place = f"checkpoint at {position:,}" if position else rows
        found.add_row(
            str(entry["record_id"]),
            place,
            size_text(entry["bytes"]),
            f"{entry['hits']:,}",
            f"{entry['age_seconds']:,.0f} s",
            "pinned" if entry["pinned"] else "in use" if entry["claims"] else "",
            Text(labels.get(entry["namespace"], entry["namespace"][:8])),
        )
    more = total - len(entries)
    return Group(found, *([f"and {more:,} more; see --limit"] if more else []))


def namespaces_table(namespaces: Sequence[pb.NamespaceStats]) -> Table:
    rows = [namespace_report(namespace) for namespace in namespaces]
    columns = contents(rows)
    found = empty_table("namespace", ("model", "bytes", *columns))
    for row in rows:
        label = Text(namespace_name(row["label"]))
        found.add_row(row["namespace"][:16], label, *contents_texts(row, columns))
    return found


def record_report(answer: pb.InspectResponse) -> Report:
    """Raises record.RecordError when the bytes do not begin with a record's header."""
    layout = record.read_header(answer.head)
    arrays: list[dict[str, Any]] = [
        {
            "kind": part.kind,
            "part": part.name,
            "array": array.name,
            "dtype": array.dtype,
            "shape": [len(part.layers), array.heads, layout.rows, array.width],
            "layers": [*part.layers],
            "encoding": dict(part.encoding),
            "offset": offset,
        }
        for (part, array), offset in zip(layout.schema.arrays, layout.offsets, strict=True)
    ]
    return {
        **entry_report(answer.entry),
        "record_bytes": answer.entry.span.record_bytes,
        "first_row": answer.entry.span.first_row,
        "codec": layout.schema.codec,
        "rows": layout.rows,
        "arrays": arrays,
    }


def record_tables(found: Report) -> Group:
    facts = empty_table("record", ("",))
    for name, value in found.items():
        if name != "arrays":
            facts.add_row(name, Text(str(value)))
    arrays = empty_table("array", ("layers", "dtype", "shape", "offset", "encoding"))
    for array in found["arrays"]:
        arrays.add_row(
            Text(f"{array['part']}.{array['array']}"),
            record.ranges(array["layers"]),
            array["dtype"],
            " x ".join(map(str, array["shape"])),
            f"{array['offset']:,}",
            Text(", ".join(f"{key} {value}" for key, value in array["encoding"].items())),
        )
    return Group(facts, arrays)
