"""docs/configuration.md, from the parsers of both daemons and of all other commands."""

import argparse
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from cachestore import admin, settings, variables
from cachestore import serve as store
from cachestore.settings import Setting
from engine import cli
from engine import serve as engine

DEFAULT = re.compile(r" \(default: (.*)\)$")

# As it is typed, and what its help says.
_Flag = tuple[str, str]

TEMPLATE = Path(__file__).with_suffix(".md")


def page() -> str:
    return TEMPLATE.read_text(encoding="utf-8").format(
        engine=_flags(engine.TABLE, engine.add_flags),
        cachestore=_flags(store.TABLE, store.add_flags),
        commands=_all_commands(),
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
    default, meaning = _told(action)
    if not default:
        raise SystemExit(f"{setting.flag}: its help does not end with (default: ...)")
    return [
        _words(action),
        f"`{setting.key}`",
        f"`{setting.variable}`",
        re.sub(r"\ban? ", "", setting.kind),
        default,
        meaning,
    ]


def _all_commands() -> str:
    sections: dict[_Flag, str] = {}
    parsers = (cli.make_parser(), admin.make_parser())
    return "\n\n".join(text for each in parsers for text in _commands(each, sections))


def _commands(parser: argparse.ArgumentParser, sections: dict[_Flag, str]) -> Iterator[str]:
    """A section for each command with flags that is no daemon, for those have their own. What is
    told of a flag in one of the `sections` before is not told again."""
    flags = {(_words(action), _meaning(action)): action for action in _actions(parser)}
    rows = [[flag[0], *_told(flags[flag])] for flag in flags if flag not in sections]
    told = [_table(["flag or argument", "default", "meaning"], rows)] if rows else []
    for section in dict.fromkeys(sections[flag] for flag in flags if flag in sections):
        names = [_name(flags[flag]) for flag in flags if sections.get(flag) == section]
        told.append(f"As in `{section}`: {', '.join(names)}.")
    for flag in flags:
        sections.setdefault(flag, parser.prog)
    if told and not (isinstance(parser, settings.Parser) and parser.table is not None):
        yield "\n\n".join([f"### `{parser.prog}`", *told])
    for nested in (a for a in parser._actions if isinstance(a, argparse._SubParsersAction)):
        for command in nested.choices.values():
            yield from _commands(command, sections)


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    none = (argparse._HelpAction, argparse._VersionAction, argparse._SubParsersAction)
    return [action for action in parser._actions if not isinstance(action, none)]


def _words(action: argparse.Action) -> str:
    """A flag as one types it, or the word that stands for an argument."""
    named = str(action.metavar or "|".join(action.choices or [action.dest.upper()]))
    value = {0: "", "?": f"[{named}]", "+": f"{named} ..."}.get(action.nargs, named)
    return ", ".join(f"`{f'{flag} {value}'.strip()}`" for flag in action.option_strings or [""])


def _name(action: argparse.Action) -> str:
    return ", ".join(f"`{flag}`" for flag in action.option_strings) or _words(action)


def _told(action: argparse.Action) -> tuple[str, str]:
    """The default, if there is something to say of it, and the meaning."""
    meaning = _meaning(action)
    found = DEFAULT.search(meaning)
    default = "required" if action.required else found[1] if found else ""
    return default, DEFAULT.sub("", meaning)


def _meaning(action: argparse.Action) -> str:
    if not action.help:
        raise SystemExit(f"{action.dest} has no help")
    return action.help % vars(action)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines
    )
