"""The flags of both daemons, and files of settings for them."""

import json
from collections.abc import Mapping
from pathlib import Path

from cachestore import serve as store
from cachestore import settings
from engine import serve as engine


def parser(table: str) -> settings.Parser:
    """Of the daemon whose settings are in this table."""
    made = settings.Parser(prog=f"{table} serve", table=table)
    (engine if table == engine.TABLE else store).add_flags(made)
    return made


def literal(value: object) -> str:
    """In TOML, of a string without control characters, a number or a boolean."""
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def write(file: Path, **tables: Mapping[str, object]) -> Path:
    """A file with these tables; the same path."""
    lines = []
    for table, values in tables.items():
        lines += [f"[{table}]", *(f"{key} = {literal(value)}" for key, value in values.items())]
    file.write_text("\n".join(lines), encoding="utf-8")
    return file
