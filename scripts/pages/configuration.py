"""docs/configuration.md, from the parsers of both daemons."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from cachestore import serve as store
from cachestore import settings, variables
from cachestore.settings import Setting
from engine import serve as engine

DEFAULT = re.compile(r" \(default: (.*)\)$")

TEMPLATE = Path(__file__).with_suffix(".md")


def page() -> str:
    return TEMPLATE.read_text(encoding="utf-8").format(
        engine=_flags(engine.TABLE, engine.add_flags),
        cachestore=_flags(store.TABLE, store.add_flags),
        variables=_table(
            ["variable", "who reads it, and what it says"],
            [[f"`{name}`", meaning] for name, meaning in variables.MEANINGS.items()],
        ),
    )


def _flags(table: str, add_flags: Callable[[argparse.ArgumentParser], None]) -> str:
    parser = settings.Parser(prog=table, table=table)
    add_flags(parser)
    return _table(
        ["flag", "key", "variable", "type", "default", "meaning"],
        [_row(setting) for setting in parser.settings.values()],
    )


def _row(setting: Setting) -> list[str]:
    action = setting.action
    meaning = _meaning(action)
    if action.required:
        default = "required"
    else:
        found = DEFAULT.search(meaning)
        if found is None:
            raise SystemExit(f"{setting.flag}: its help does not end with (default: ...)")
        default = found[1]
    return [
        ", ".join(f"`{flag}`" for flag in _words(action)),
        f"`{setting.key}`",
        f"`{setting.variable}`",
        re.sub(r"\ban? ", "", setting.kind),
        default,
        DEFAULT.sub("", meaning),
    ]


def _words(action: argparse.Action) -> list[str]:
    """The flag as one types it."""
    named = "|".join(action.choices or [action.dest.upper()])
    value = "" if action.nargs == 0 else f" {action.metavar or named}"
    return [flag + value for flag in action.option_strings]


def _meaning(action: argparse.Action) -> str:
    if not action.help:
        raise SystemExit(f"{action.option_strings[0]} has no help")
    return action.help % vars(action)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines
    )
