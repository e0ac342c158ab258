"""What the documentation tells people to type can be typed, and where it points there is something.

A command is a line of an `sh` block, or code under the heading *command* or *run it* of a table:
it has to be complete, and the program's own parser has to take it. Other code that begins with
one of our programs is a mention: the program has to know its subcommand and its flags. Commands of
other programs are listed below, with what runs them; those that only a Mac has are allowed in
blocks that say so (`sh mac`) and on the page that is for a Mac alone.
"""

import argparse
import importlib
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from cachestore import admin
from cachestore import cli as cachestore_cli
from engine import cli as engine_cli

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / folder / "README.md" for folder in (".", "deploy", "examples")),
    *sorted((ROOT / "docs").glob("*.md")),
]
MAC_PAGES = {"verify-on-mac.md"}
COMMAND_COLUMNS = {"command", "run it"}
# What a person puts in for a word that the page explains, where a parser is particular about it.
FILLED_IN = {"BYTES": "8GiB", "document.txt": "README.md"}

MAINS: dict[str, Callable[[], object]] = {
    "engine": engine_cli.main,
    "cachestore": cachestore_cli.main,
    "cachestore-admin": admin.main,
}
# Which test runs each command of ours, with a daemon or without.
RUN_BY = {
    "engine serve": "tests/system/test_commands.py",
    "engine generate": "tests/system/test_commands.py",
    "engine chat": "tests/system/test_chat.py",
    "engine demo": "tests/system/test_commands.py",
    "engine bench-kv": "tests/system/test_tools.py",
    "engine quality": "tests/system/test_tools.py",
    "engine warm": "tests/engine/test_warm.py",
    "engine doctor": "tests/system/test_doctor.py",
    "cachestore serve": "tests/support/daemons.py",
    "cachestore-admin stats": "tests/cachestore/test_admin.py",
    "cachestore-admin health": "tests/cachestore/test_admin.py",
    "cachestore-admin ls": "tests/cachestore/test_admin_contents.py",
    "cachestore-admin namespaces": "tests/cachestore/test_admin_contents.py",
    "cachestore-admin evict": "tests/cachestore/test_admin_contents.py",
    "cachestore-admin flush": "tests/cachestore/test_admin_contents.py",
    "cachestore-admin pin": "tests/cachestore/test_admin_contents.py",
    "cachestore-admin unpin": "tests/cachestore/test_admin_contents.py",
    "cachestore-admin verify": "tests/cachestore/test_admin_contents.py",
    "cachestore-admin inspect": "tests/cachestore/test_admin_contents.py",
    "cachestore-admin service": "tests/deploy/test_command.py",
    "cachestore-admin doctor": "tests/system/test_doctor.py",
    "cachestore-admin top": "tests/cachestore/test_top.py",
}
# Programs that are run as modules, and what runs them in small.
MODULES = {
    "benchmarks": "tests/system/test_benchmarks.py",
    "tests.soak": "tests/system/test_soak.py",
    "tests.matrix": "tests/matrix/test_matrix.py",
}
SCRIPTS_RUN_BY = ".ci/run"
# Not by CI: it takes minutes and needs a network. tests/test_package.py does what needs neither.
SCRIPTS_BY_HAND = {"scripts/check-package"}
# Of other programs: the beginning of a command, and what runs it, or why nothing does.
OTHERS = {
    "ruff": ".ci/run",
    "mypy": ".ci/run",
    "head": "any system has it",
    "npm ci": "tests/engine/test_examples.py",
    "node examples/node/chat.mjs": "tests/engine/test_examples.py",
    "python examples/python/chat.py": "tests/engine/test_examples.py",
    "pip install grpcio grpcio-tools": "both are among the extras of dev",
    "pipx install": "scripts/check-package does it with venv and pip",
    "pipx uninstall mlx-cachestore": "pipx's own",
    "apt-get install libopenblas0-pthread": "scripts/setup",
}
MAC_OTHERS = {"curl", "echo", "footprint", "kill", "launchctl", "plutil", "vm_stat"}

_PROGRAMS = "engine|cachestore|cachestore-admin"
_OURS = re.compile(rf"(sudo )?(\.venv/bin/)?(({_PROGRAMS}|python -m)(?= )|scripts/)")


@dataclass(frozen=True)
class Command:
    """As it stands on a page."""

    page: str
    line: int
    words: tuple[str, ...]
    complete: bool
    mac: bool

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {' '.join(self.words)}"


def commands(path: Path) -> Iterator[Command]:
    mac_page = path.name in MAC_PAGES
    block: str | None = None
    columns: list[str] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.startswith("```"):
            block = line.removeprefix("```") if block is None else None
        elif block is not None:
            if block.split() and block.split()[0] == "sh":
                yield from _of(path, number, line, complete=True, mac=mac_page or "mac" in block)
        elif line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            if not columns:
                columns = [cell.strip() for cell in cells]
            for column, cell in zip(columns, cells, strict=True):
                complete = column in COMMAND_COLUMNS
                for code in _code(cell.replace("\\|", "|")):
                    yield from _of(path, number, code, complete=complete, mac=mac_page)
        else:
            columns = []
            for code in _code(line):
                yield from _of(path, number, code, complete=False, mac=mac_page)


def _code(text: str) -> list[str]:
    return re.findall(r"(?<!`)`([^`]+)`(?!`)", text)


def _of(path: Path, number: int, text: str, *, complete: bool, mac: bool) -> Iterator[Command]:
    if not complete and not _OURS.match(text):
        return
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, "#"
    words: list[str] = []
    parts = iter([*lexer, ";"])
    for word in parts:
        if word == ">":
            next(parts)
        elif not set(word) <= set(lexer.punctuation_chars):
            words.append(word)
        elif words:
            named = path.relative_to(ROOT).as_posix()
            yield Command(named, number, tuple(words), complete, mac)
            words = []


ALL = [command for path in PAGES for command in commands(path)]


class _Parser(Exception):
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def parser_of(
    main: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> argparse.ArgumentParser:
    """The parser with which a program's `main` would read its command line."""

    def caught(parser: argparse.ArgumentParser, *_: object, **__: object) -> object:
        raise _Parser(parser)

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", caught)
        with pytest.raises(_Parser) as found:
            main()
    return found.value.parser


def subcommands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    nested = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return next((action.choices for action in nested), {})


def assert_known(parser: argparse.ArgumentParser, words: Sequence[str], text: str) -> None:
    """The words are subcommands and flags of `parser`, as far as they look like either."""
    rest = iter(words)
    for word in rest:
        if word.startswith("--"):
            flag, has_value, _ = word.partition("=")
            assert flag in parser._option_string_actions, f"{text}: {word}"
            if not has_value and parser._option_string_actions[flag].nargs != 0:
                next(rest, None)
            continue
        if known := subcommands(parser):
            assert word in known, f"{text}: no command {word}"
            parser = known[word]


def assert_taken(
    parser: argparse.ArgumentParser,
    words: Sequence[str],
    command: Command,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if not command.complete:
        assert_known(parser, words, str(command))
        return
    code: object = 0
    try:
        parser.parse_args([FILLED_IN.get(word, word) for word in words])
    except SystemExit as left:
        code = left.code
    assert code == 0, f"{command}: {capsys.readouterr().err}"


def assert_exists(path: str, command: Command) -> None:
    assert (ROOT / path).exists(), f"{command}: no {path}"


def ours(command: Command) -> tuple[str, ...]:
    """Its words without sudo, variables and the place of the program."""
    words = list(command.words)
    while words and (words[0] == "sudo" or re.match(r"[A-Z_]+=", words[0])):
        words.pop(0)
    if words:
        words[0] = words[0].removeprefix(".venv/bin/")
    return tuple(words)


@pytest.mark.parametrize("command", ALL, ids=str)
def test_a_command_can_be_typed(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)  # files are named from there
    match ours(command):
        case (program, *words) if program in MAINS:
            name = f"{program} {words[0]}" if words else program
            assert_taken(parser_of(MAINS[program], monkeypatch), words, command, capsys)
            if not name.partition(" ")[2].startswith("-"):
                assert f'"{words[0]}"' in (ROOT / RUN_BY[name]).read_text()
        case ("python", "-m", "pytest", *words):
            for word in words:
                if word.startswith("tests/"):
                    assert_exists(word, command)
        case ("python", "-m", module, *words):
            (run_by,) = (
                path for name, path in MODULES.items() if f"{module}.".startswith(f"{name}.")
            )
            assert_exists(run_by, command)
            place = f"{module}.__main__" if module.startswith("tests.") else module
            main = importlib.import_module(place).main
            assert_taken(parser_of(main, monkeypatch), words, command, capsys)
        case ("python", "-c", code):
            compile(code, str(command), "exec")
        case ("python", script, *_) | (script, *_) if script.startswith("scripts/"):
            assert_exists(script, command)
            assert script in SCRIPTS_BY_HAND or script in (ROOT / SCRIPTS_RUN_BY).read_text()
        case other:
            text = " ".join(other)
            known = any(text.startswith(beginning) for beginning in OTHERS)
            assert known or (command.mac and other[0] in MAC_OTHERS), f"{command}: unknown"


def test_there_are_commands_to_look_at() -> None:
    assert len([command for command in ALL if command.complete]) > 60
    assert {command.page for command in ALL} >= {"README.md", "docs/guide.md"}


def commands_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Those without subcommands."""
    for command in subcommands(parser).values():
        yield from commands_of(command) if subcommands(command) else [command]


@pytest.mark.parametrize(
    "command",
    [*commands_of(engine_cli.make_parser()), *commands_of(admin.make_parser())],
    ids=lambda command: command.prog,
)
def test_every_flag_of_a_command_is_in_its_section(command: argparse.ArgumentParser) -> None:
    _, _, rest = (ROOT / "docs" / "configuration.md").read_text().partition(f"# `{command.prog}`")
    section = rest.partition("\n#")[0]
    for flag in command._option_string_actions.keys() - {"-h", "--help", "--config"}:
        assert re.search(rf"`{flag}[` ]", section), flag


def anchors(path: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {text.replace(" ", "-") for text in plain}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        found = (path.parent / name).resolve() if name else path
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


def test_every_page_is_reached_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    missing = [path.name for path in PAGES if path.name != "README.md" and path.name not in readme]
    assert not missing


def test_the_notices_name_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    notices = (ROOT / "docs" / "notices.md").read_text()
    for requirement in project["dependencies"]:
        name = re.match(r"[\w-]+", requirement)
        assert name is not None
        assert re.search(rf"\b{name[0]}\b", notices), requirement
