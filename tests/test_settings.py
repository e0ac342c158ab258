"""Flags, variables and keys of a file say the same, in a fixed order, and errors name where."""

import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore import settings, variables
from cachestore.settings import TABLES, Setting
from tests.support.parsers import parser, write

ROOT = Path(__file__).resolve().parent.parent
REQUIRED: Mapping[str, dict[str, object]] = {"engine": {"model": "m"}, "cachestore": {}}
# Keys whose values are more than their type says.
VALUES: Mapping[str, st.SearchStrategy[object]] = {
    "kv-bits": st.sampled_from([8, 4, "8,4", "none"]),
    "checkpoints-max": st.integers(2, 100),
}
OF_TYPES: Mapping[tuple[type, ...], st.SearchStrategy[object]] = {
    (bool,): st.booleans(),
    (int,): st.integers(1, 1000),
    (int, float): st.integers(1, 100) | st.floats(1e-3, 1e6),
    (str, int): st.sampled_from([1 << 24, 1 << 25, "16MiB", "20M"]),
    (str,): st.text(st.characters(exclude_categories=["C"]), min_size=1),
}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is set, and there is no file."""
    for name in [name for name in os.environ if name.startswith(variables.PREFIX)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(variables.CONFIG, os.devnull)


def values(setting: Setting) -> st.SearchStrategy[object]:
    if setting.action.choices is not None:
        return st.sampled_from([*setting.action.choices])
    return VALUES.get(setting.key, OF_TYPES[setting.toml])


@st.composite
def said(draw: st.DrawFn) -> tuple[str, dict[str, object]]:
    """A table, and values for some of its keys, and for those that must have one."""
    table = draw(st.sampled_from(TABLES))
    known = parser(table).settings
    chosen = draw(st.sets(st.sampled_from(sorted(known))))
    needed = {key for key in known if known[key].action.required}
    return table, {key: draw(values(known[key])) for key in sorted(chosen | needed)}


def words(table: str, chosen: Mapping[str, object]) -> list[str]:
    found = []
    for key, value in chosen.items():
        if isinstance(value, bool):
            found.append(f"--{key}" if value else f"--no-{key}")
        else:
            found.append(f"--{key}={value}")
    return found


def environment(table: str, chosen: Mapping[str, object]) -> dict[str, str]:
    known = parser(table).settings
    return {
        known[key].variable: str(int(value)) if isinstance(value, bool) else str(value)
        for key, value in chosen.items()
    }


def outcome(table: str, *line: str) -> dict[str, Any] | None:
    """What it comes to; None when it is refused."""
    try:
        found = vars(parser(table).parse_args([*line]))
    except SystemExit:
        return None
    return {name: found[name] for name in found.keys() - {"config", "origins"}}


def _refuses(table: str, key: str) -> bool:
    """Whether not every value of its type in a file will do: an address, for example."""
    setting = parser(table).settings[key]
    return setting.toml == (str,) and setting.action.type not in (None, str, Path)


@given(said())
def test_any_set_of_flags_is_the_same_typed_in_a_file_and_in_the_environment(
    asked: tuple[str, dict[str, object]],
) -> None:
    table, chosen = asked
    typed = outcome(table, *words(table, chosen))
    assert typed is not None or any(_refuses(table, key) for key in chosen)
    with tempfile.TemporaryDirectory() as folder:
        file = write(Path(folder) / "c.toml", **{table: chosen})
        assert outcome(table, "--config", str(file)) == typed
    with mock.patch.dict(os.environ, environment(table, chosen)):
        assert outcome(table) == typed


SOURCES = ("command line", "environment", "file")
SETS_OF_SOURCES = [set(s) for n in range(4) for s in itertools.combinations(SOURCES, n)]


@pytest.mark.parametrize(
    ("table", "key", "options"),
    [
        ("engine", "max-batch", {"command line": 2, "environment": 3, "file": 4}),
        ("engine", "cache-codec", {"command line": "q4", "environment": "k8v4", "file": "none"}),
        ("engine", "kv-rotate", {"command line": False, "environment": True, "file": False}),
        ("engine", "kv-rotate", {"command line": True, "environment": False, "file": True}),
        (
            "cachestore",
            "budget",
            {"command line": 1 << 24, "environment": 1 << 25, "file": 1 << 27},
        ),
    ],
)
@pytest.mark.parametrize(
    "present", [[s for i, s in enumerate(SOURCES) if n >> i & 1] for n in range(8)]
)
def test_what_counts_first(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    table: str,
    key: str,
    options: Mapping[str, object],
    present: set[str],
) -> None:
    chosen = {**REQUIRED[table], **({key: options["file"]} if "file" in present else {})}
    line = ["--config", str(write(tmp_path / "c.toml", **{table: chosen}))]
    if "environment" in present:
        for name, text in environment(table, {key: options["environment"]}).items():
            monkeypatch.setenv(name, text)
    if "command line" in present:
        line += words(table, {key: options["command line"]})
    found = getattr(parser(table).parse_args(line), key.replace("-", "_"))
    default = parser(table).settings[key].action.default
    assert found == next((options[s] for s in SOURCES if s in present), default)


def refused(capsys: pytest.CaptureFixture[str], table: str, *line: str) -> str:
    with pytest.raises(SystemExit) as exited:
        parser(table).parse_args([*line])
    assert exited.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    return said.removeprefix("error: ").rstrip("\n")


FILES = [
    ("[engine]\nmax-bacth = 8", "[engine] max-bacth: no such key; did you mean max-batch?"),
    ("[engine]\nmax_batch = 8", "[engine] max_batch: no such key; did you mean max-batch?"),
    ("[engine]\nzzz = 8", "[engine] zzz: no such key; --help has all"),
    ("[engine]\nconfig = 'x'", "[engine] config: no such key"),
    ("[engines]\nmax-batch = 8", "[engines]: no such table; use [engine] or [cachestore]"),
    ("max-batch = 8", "max-batch stands in no table; put it under [engine] or [cachestore]"),
    ("engine = 8", "engine stands in no table"),
    ("[engine]\nmax-batch = '8'", "[engine] max-batch: must be an integer, not a string"),
    ("[engine]\nmax-batch = 8.0", "[engine] max-batch: must be an integer, not a float"),
    ("[engine]\nmax-batch = true", "[engine] max-batch: must be an integer, not a boolean"),
    ("[engine]\nmax-batch = [8]", "[engine] max-batch: must be an integer, not an array"),
    ("[engine.max-batch]\nx = 8", "[engine] max-batch: must be an integer, not a table"),
    ("[engine]\nmax-batch = 0", "[engine] max-batch: 0 is not between 1 and"),
    ("[engine]\nkv-rotate = 1", "[engine] kv-rotate: must be a boolean, not an integer"),
    ("[engine]\nkv-bits = 8.5", "[engine] kv-bits: must be a string or an integer, not a float"),
    ("[engine]\nmodel = 2026-01-01", "[engine] model: must be a string, not a time"),
    ("[engine]\nlog-level = 'loud'", "[engine] log-level: 'loud' is none of debug, info"),
    ("[engine]\ncachestore-budget = '1'", "[engine] cachestore-budget: '1' is 1 bytes; give"),
    ("[engine]\nmodel = 'a'\nmodel = 'b'", "Cannot overwrite a value (at "),
    ("[engine", "Expected ']'"),
    (b"[engine]\nmodel = '\xff'", "can't decode byte 0xff"),
    ('[engine]\nlog-file = "a\\u0000b"', "[engine] log-file: has a zero byte in it"),
    (f"x = {'[' * 5000}", "nested too deeply"),
]


@pytest.mark.parametrize(("content", "named"), FILES, ids=lambda text: str(text)[:40])
def test_an_error_of_a_file_names_it_and_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | bytes, named: str
) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    told = refused(capsys, "engine", "--model", "m", "--config", str(file))
    assert told.startswith(f"{file}: ")
    assert named in told


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_settings_are_not_read_from_what_may_never_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path = tmp_path / "pipe" if kind == "pipe" else Path("/dev/zero")
    if kind == "pipe":
        os.mkfifo(path)
    said = f"{path}: a pipe or a device; settings must be in a file"
    assert refused(capsys, "engine", "--model", "m", "--config", str(path)) == f"--config {said}"
    monkeypatch.setenv(variables.CONFIG, str(path))
    assert refused(capsys, "cachestore") == f"{variables.CONFIG} {said}"


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        (
            "MLX_CACHESTORE_ENGINE_MAX_BACTH",
            "8",
            "no such variable; did you mean MLX_CACHESTORE_EN",
        ),
        (
            "MLX_CACHESTORE_RUNTIME",
            "/x",
            "no such variable; did you mean MLX_CACHESTORE_RUNTIME_DIR",
        ),
        ("MLX_CACHESTORE_ENGINE_MAX_BATCH", "eight", "'eight' is not a whole number"),
        ("MLX_CACHESTORE_ENGINE_KV_ROTATE", "maybe", "'maybe' is none of 1, true, 0, false"),
        ("MLX_CACHESTORE_ENGINE_LOG_LEVEL", "loud", "'loud' is none of debug, info"),
        ("MLX_CACHESTORE_CONFIG", "/no/such/file", "/no/such/file: No such file or directory"),
    ],
)
def test_an_error_of_the_environment_names_the_variable(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    text: str,
    named: str,
) -> None:
    monkeypatch.setenv(name, text)
    told = refused(capsys, "engine", "--model", "m")
    assert told.startswith(name)
    assert named in told


def test_a_daemon_leaves_the_other_ones_settings_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_CACHESTORE_ENGINE_MAX_BACTH", "x")
    monkeypatch.setenv("MLX_CACHESTORE_SHM", "posix")
    file = write(tmp_path / "c.toml", engine={"max-bacth": 8})
    assert parser("cachestore").parse_args(["--config", str(file)]).config == file


def test_an_empty_variable_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENGINE_MAX_BATCH", "ENGINE_KV_ROTATE", "ENGINE_NO_SUCH", "CONFIG"):
        monkeypatch.setenv(f"{variables.PREFIX}{name}", "")
    monkeypatch.setattr(settings, "default_file", lambda: tmp_path / "none.toml")
    found = parser("engine").parse_args(["--model", "m"])
    assert (found.max_batch, found.kv_rotate, found.config) == (None, None, None)


def test_the_users_file_is_read_when_it_is_there_and_no_other_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(variables.CONFIG)
    users = tmp_path / "config.toml"
    monkeypatch.setattr(settings, "default_file", lambda: users)
    assert "--model" in refused(capsys, "engine")
    write(users, engine={"model": "mine"})
    assert parser("engine").parse_args([]).model == "mine"
    other = write(tmp_path / "other.toml", engine={"model": "other"})
    monkeypatch.setenv(variables.CONFIG, str(other))
    assert parser("engine").parse_args([]).model == "other"
    assert parser("engine").parse_args(["--config", str(users)]).model == "mine"
    monkeypatch.delenv(variables.CONFIG)
    users.unlink()
    users.mkdir()
    assert refused(capsys, "engine").startswith(f"{users}: Is a directory")


def test_help_is_shown_whatever_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_CACHESTORE_ENGINE_NO_SUCH", "1")
    with pytest.raises(SystemExit) as exited:
        parser("engine").parse_args(["--config", str(tmp_path), "--help"])
    assert exited.value.code == 0
    shown = capsys.readouterr().out
    assert "MLX_CACHESTORE_ENGINE_LOG_LEVEL" in shown
    assert "config.toml" in shown


def test_a_file_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "c.toml", engine={"model": "mine"})
    monkeypatch.chdir(tmp_path)
    assert parser("engine").parse_args(["--conf", "c.toml"]).config == file


def test_an_error_about_flags_names_what_was_set_instead_of_them() -> None:
    origins = settings.Origins(
        Path("/c.toml"), {"--cachestore-budget": "[engine] cachestore-budget"}, {"--kv-bits": "V"}
    )
    told = origins.told("--cachestore-budget: see --cachestore, --kv-bits 8")
    assert told == "/c.toml: [engine] cachestore-budget: see --cachestore, V 8"
    assert origins.told("--kv-bits 7") == "V 7"


def test_what_was_typed_is_called_by_its_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "c.toml", engine={"model": "m", "max-batch": 8, "cache-codec": "q4"})
    monkeypatch.setenv("MLX_CACHESTORE_ENGINE_MAX_BATCH", "4")
    line = ["--config", str(file), "--cache-codec", "q8"]
    told = parser("engine").parse_args(line).origins.told("--model --max-batch --cache-codec")
    assert told == f"{file}: [engine] model MLX_CACHESTORE_ENGINE_MAX_BATCH --cache-codec"


def test_a_silenced_process_takes_its_command_line_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_CACHESTORE_ENGINE_MAX_BATCH", "eight")
    monkeypatch.setenv("MLX_CACHESTORE_CONFIG", "/no/such/file")
    for name, text in settings.silenced().items():
        monkeypatch.setenv(name, text)
    found = parser("engine").parse_args(["--model", "m"])
    assert (found.max_batch, found.origins.keys) == (None, {})


@pytest.mark.parametrize("table", TABLES)
def test_every_flag_can_be_set_elsewhere_and_every_boolean_be_denied(table: str) -> None:
    known = parser(table).settings
    assert {"log-level"} < known.keys()
    for setting in known.values():
        denied = setting.action.option_strings[1:]
        assert denied == ([f"--no-{setting.key}"] if setting.toml == (bool,) else [])


def test_the_page_says_what_the_parsers_say() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "generate-docs"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_example_of_the_page_is_a_file_for_both(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```toml\n(.*?)^```", page, re.M | re.S)
    file = tmp_path / "c.toml"
    file.write_text(example, encoding="utf-8")
    found = parser("engine").parse_args(["--config", str(file)])
    assert (found.max_batch, found.kv_bits, found.kv_rotate) == (8, (8, 4), True)
    for table in TABLES:
        assert parser(table).parse_args(["--config", str(file)]).origins.keys
