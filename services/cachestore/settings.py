"""Flags of a daemon that can also be set in the environment and in a file.

    --max-batch 8   over   MLX_CACHESTORE_ENGINE_MAX_BATCH=8   over   max-batch = 8 in [engine]

The parser's flags are the one definition; names of keys and variables follow from theirs. What the
file and the environment say becomes words in front of the command line, where the last word about a
flag counts. Before that each value is read by itself, so that an error says where it stands.
"""

import argparse
import errno
import os
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import platformdirs

from cachestore import flags, variables

# One file serves both daemons. Neither knows the other's keys.
TABLES: Final = ("engine", "cachestore")

_IN_TABLES: Final = " or ".join(f"[{table}]" for table in TABLES)
_FLAG: Final = re.compile(r"--[a-z][a-z0-9-]*")
_BOOLEANS: Final = {"1": True, "true": True, "0": False, "false": False}
_TOML_NAMES: Final[Mapping[type, str]] = {
    **{str: "a string", int: "an integer", float: "a float", bool: "a boolean"},
    **{list: "an array", dict: "a table"},
}
_TOML_OF_BUILTINS: Final[Mapping[Any, tuple[type, ...]]] = {int: (int,), float: (int, float)}


class SettingsError(ValueError):
    """A file or an environment that cannot be used; one line that names what is wrong there."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A flag that takes one value, or is a boolean that --no- denies."""

    table: str
    action: argparse.Action

    @property
    def flag(self) -> str:
        return self.action.option_strings[0]

    @property
    def key(self) -> str:
        return self.flag.removeprefix("--")

    @property
    def variable(self) -> str:
        return _prefix(self.table) + self.key.replace("-", "_").upper()

    @property
    def toml(self) -> tuple[type, ...]:
        """Types of its value in a file, as tomllib reads them."""
        if isinstance(self.action, argparse.BooleanOptionalAction):
            return (bool,)
        if isinstance(self.action.type, flags.Value):
            return self.action.type.toml
        return _TOML_OF_BUILTINS.get(self.action.type, (str,))

    @property
    def kind(self) -> str:
        return " or ".join(_TOML_NAMES[type_] for type_ in self.toml)

    def word_of_key(self, value: object) -> str:
        """What the command line would say for a value of the file. Raises ValueError."""
        if type(value) not in self.toml:
            raise ValueError(f"must be {self.kind}, not {_TOML_NAMES.get(type(value), 'a time')}")
        return self._switch(value) if isinstance(value, bool) else self._word(str(value))

    def word_of_variable(self, text: str) -> str:
        """As word_of_key, for a value of the environment."""
        if self.toml != (bool,):
            return self._word(text)
        if text.lower() not in _BOOLEANS:
            raise ValueError(f"{text!r} is none of {', '.join(_BOOLEANS)}")
        return self._switch(_BOOLEANS[text.lower()])

    def _switch(self, on: bool) -> str:
        return self.action.option_strings[0 if on else 1]

    def _word(self, text: str) -> str:
        read: Any = self.action.type or str
        if "\0" in text:
            raise ValueError("has a zero byte in it")
        try:
            value = read(text)
        except argparse.ArgumentTypeError as error:
            raise ValueError(str(error)) from None
        except ValueError:
            raise ValueError(f"{text!r} is not {self.kind}") from None
        if self.action.choices is not None and value not in self.action.choices:
            raise ValueError(f"{text!r} is none of {', '.join(map(str, self.action.choices))}")
        return f"{self.flag}={text}"


@dataclass(frozen=True, slots=True)
class Origins:
    """Where settings come from that nobody typed."""

    file: Path | None = None
    # Of the flag, how an error calls it instead.
    keys: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    def told(self, error: object) -> str:
        """An error about flags, naming the keys and variables that were set in their place."""
        message = str(error)
        names = {**self.keys, **self.variables}
        in_file = any(flag in self.keys for flag in _FLAG.findall(message))
        told = _FLAG.sub(lambda found: names.get(found[0], found[0]), message)
        return f"{self.file}: {told}" if in_file else told


class Parser(flags.Parser):
    """Of a command. One with a `table` is a daemon's: its flags can be set elsewhere too, and
    --config names the file. What it parses has `config`, the file that was read, and `origins`."""

    def __init__(self, *, table: str | None = None, **told: Any) -> None:
        super().__init__(**told)
        self.table = table
        self.set_defaults(origins=Origins())
        if table is None:
            return
        self.epilog = (
            f"Each flag is also a key under [{table}] in the file and a variable: --log-level info "
            f'is log-level = "info" and {_prefix(table)}LOG_LEVEL=info. The command line counts '
            "before the environment, and the environment before the file. Without --config and "
            f"{variables.CONFIG} the file is {default_file()}, if it is there."
        )
        self.add_argument(
            "--config",
            type=Path,
            metavar="FILE",
            help=f"settings of both daemons, in TOML (default: {variables.CONFIG}, or the user's)",
        )

    @property
    def settings(self) -> dict[str, Setting]:
        """What can be set elsewhere, by key."""
        assert self.table is not None
        flags_ = [action for action in self._actions if action.dest not in ("help", "config")]
        found = [Setting(self.table, action) for action in flags_]
        assert all(setting.action.nargs is None or setting.toml == (bool,) for setting in found)
        return {setting.key: setting for setting in found}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        words = sys.argv[1:] if args is None else [*args]
        typed = {} if self.table is None else self._typed(words)
        if self.table is None or "help" in typed:
            return super().parse_known_args(words, namespace)
        try:
            file, content = _read(typed)
            from_file = self._from_file(file, content)
            from_environment = self._from_environment(os.environ)
        except SettingsError as error:
            self.error(str(error))
        chosen = [*from_file.values(), *from_environment.values()]
        found, rest = super().parse_known_args([*chosen, *words], namespace)
        found.config = file
        found.origins = Origins(
            file,
            {s.flag: f"[{s.table}] {s.key}" for s in from_file if s.action.dest not in typed},
            {s.flag: s.variable for s in from_environment if s.action.dest not in typed},
        )
        return found, rest

    def _typed(self, words: list[str]) -> dict[str, Any]:
        """Flags on the command line, by destination, whatever their values are."""
        scan = flags.Parser(prog=self.prog, add_help=False, argument_default=argparse.SUPPRESS)
        for action in self._actions:
            kind: dict[str, Any] = {"action": "store_true"} if action.nargs == 0 else {}
            scan.add_argument(*action.option_strings, dest=action.dest, **kind)
        typed: dict[str, Any] = vars(scan.parse_known_args(words)[0])
        return typed

    def _from_file(self, file: Path | None, content: dict[str, Any]) -> dict[Setting, str]:
        for name, value in content.items():
            if not isinstance(value, dict):
                raise SettingsError(f"{file}: {name} stands in no table; put it under {_IN_TABLES}")
            if name not in TABLES:
                raise SettingsError(f"{file}: [{name}]: no such table; use {_IN_TABLES}")
        known, words = self.settings, {}
        for key, value in content.get(str(self.table), {}).items():
            where = f"{file}: [{self.table}] {key}"
            if key not in known:
                raise SettingsError(f"{where}: no such key{flags.nearest(key, known)}")
            try:
                words[known[key]] = known[key].word_of_key(value)
            except ValueError as error:
                raise SettingsError(f"{where}: {error}") from None
        return words

    def _from_environment(self, environment: Mapping[str, str]) -> dict[Setting, str]:
        """An empty variable says nothing, as if it were not set."""
        others = tuple(_prefix(table) for table in TABLES if table != self.table)
        known = {setting.variable: setting for setting in self.settings.values()}
        words = {}
        for name, text in environment.items():
            ours = name.startswith(variables.PREFIX) and not name.startswith(others)
            if not ours or not text or name in variables.MEANINGS:
                continue
            if name not in known:
                nearest = flags.nearest(name, [*known, *variables.MEANINGS])
                raise SettingsError(f"{name}: no such variable{nearest}")
            try:
                words[known[name]] = known[name].word_of_variable(text)
            except ValueError as error:
                raise SettingsError(f"{name}: {error}") from None
        return words


def default_file() -> Path:
    """The user's own. May not exist."""
    return platformdirs.user_config_path("mlx-cachestore") / "config.toml"


def load(path: Path) -> dict[str, Any]:
    """What a file says, unchecked. Raises OSError, and SettingsError when it is not TOML."""
    if path.is_fifo() or (path.is_char_device() and not path.samefile(os.devnull)):
        # To read it could take for ever, and each daemon reads it more than once.
        raise OSError(errno.EINVAL, "a pipe or a device; settings must be in a file", str(path))
    with path.open("rb") as file:
        try:
            return tomllib.load(file)
        except RecursionError:
            raise SettingsError(f"{path}: nested too deeply") from None
        except ValueError as error:  # or not UTF-8
            raise SettingsError(f"{path}: {error}") from None


def silenced() -> dict[str, str]:
    """Environment of a process for which neither the user's variables nor files set any flag."""
    prefixes = tuple(map(_prefix, TABLES))
    unset = dict.fromkeys((name for name in os.environ if name.startswith(prefixes)), "")
    return {**unset, variables.CONFIG: os.devnull}


def _read(typed: Mapping[str, Any]) -> tuple[Path | None, dict[str, Any]]:
    """The file of settings, by its absolute path, and what it says."""
    chosen = typed.get("config", os.environ.get(variables.CONFIG) or None)
    path = default_file() if chosen is None else Path(chosen).absolute()
    how = "" if chosen is None else "--config " if "config" in typed else f"{variables.CONFIG} "
    try:
        return path, load(path)
    except OSError as error:
        if chosen is None and isinstance(error, FileNotFoundError | NotADirectoryError):
            return None, {}
        raise SettingsError(f"{how}{path}: {error.strerror}") from None


def _prefix(table: str) -> str:
    return f"{variables.PREFIX}{table.upper()}_"
