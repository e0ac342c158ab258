"""Settings of an engine that contradict each other, and those of the store that it starts."""

import argparse
from collections.abc import Mapping
from pathlib import Path

import pytest

from cachestore import cli as store_cli
from engine import cli, serve
from engine.config import EngineConfig
from tests.support.parsers import parser, write


def refused(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    """What `engine serve` says that does not start."""
    try:
        code = cli.main(["serve", *line])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    assert code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    return said.removeprefix("error: ")


@pytest.mark.parametrize(
    ("line", "variables", "said"),
    [
        (
            ["--cachestore", "off"],
            {},
            "{file}: [engine] cachestore-budget would have no effect: --cachestore off starts no",
        ),
        (
            [],
            {"CACHESTORE": "off"},
            "{file}: [engine] cachestore-budget would have no effect: "
            "MLX_CACHESTORE_ENGINE_CACHESTORE off starts no store",
        ),
        (["--kv-bits", "7"], {"KV_BITS": "9"}, "--kv-bits 7: no such bits"),
        ([], {"KV_BITS": "9"}, "MLX_CACHESTORE_ENGINE_KV_BITS 9: no such bits"),
        ([], {"CACHE_CODEC": "q9"}, "MLX_CACHESTORE_ENGINE_CACHE_CODEC 'q9': no such codec"),
        (["--cache-codec", "none"], {"KV_ROTATE": "1"}, "MLX_CACHESTORE_ENGINE_KV_ROTATE would"),
        ([], {"LISTEN": "0.0.0.0:1"}, "MLX_CACHESTORE_ENGINE_LISTEN: 0.0.0.0 is not a loopback"),
    ],
)
def test_a_contradiction_names_where_its_parts_were_set(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: list[str],
    variables: Mapping[str, str],
    said: str,
) -> None:
    file = write(tmp_path / "c.toml", engine={"model": "m", "cachestore-budget": "64MiB"})
    for name, text in variables.items():
        monkeypatch.setenv(f"MLX_CACHESTORE_ENGINE_{name}", text)
    assert refused(capsys, "--config", str(file), *line).startswith(said.format(file=file))


@pytest.mark.parametrize(
    ("store", "said"),
    [
        ({"bugdet": "64MiB"}, "[cachestore] bugdet: no such key; did you mean budget?"),
        ({"checkpoints-max": 1}, "[cachestore] checkpoints-max: 1 is not between 2 and"),
        ({"socket": "/tmp/" + 100 * "x"}, "[cachestore] socket: the socket path has 108 bytes"),
    ],
)
def test_a_store_that_could_not_start_is_refused_by_the_engine_that_would_start_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], store: Mapping[str, object], said: str
) -> None:
    file = write(tmp_path / "c.toml", engine={"model": "m"}, cachestore=store)
    assert refused(capsys, "--config", str(file)).startswith(f"{file}: {said}")


def settings_of(*line: str) -> EngineConfig:
    flags: argparse.Namespace = parser("engine").parse_args(["--model", "m", *line])
    return serve.settings_of(flags)


def test_the_engines_flags_count_before_the_settings_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = {"idle-exit": 60, "socket": str(tmp_path / "s.sock")}
    file = str(write(tmp_path / "c.toml", cachestore=store))
    found = settings_of("--config", file)
    assert found.idle_exit_seconds == 60
    assert found.cachestore_socket == tmp_path / "s.sock"
    assert found.config_file == Path(file)
    assert settings_of("--config", file, "--idle-exit", "0.25").idle_exit_seconds == 0.25
    monkeypatch.setenv("MLX_CACHESTORE_CACHESTORE_IDLE_EXIT", "0.5")
    assert settings_of("--config", file).idle_exit_seconds == 0.5


def test_settings_of_a_store_that_is_not_the_engines_are_not_read(tmp_path: Path) -> None:
    file = str(write(tmp_path / "c.toml", cachestore={"bugdet": 1}))
    assert settings_of("--config", file, "--cachestore", "off").cachestore_socket is None
    found = settings_of("--config", file, "--cachestore", "unix:/tmp/s.sock")
    assert found.idle_exit_seconds is None


def test_the_command_line_denies_a_boolean_of_the_file(tmp_path: Path) -> None:
    file = str(write(tmp_path / "c.toml", engine={"kv-rotate": True}))
    assert settings_of("--config", file).kv_rotate
    assert not settings_of("--config", file, "--no-kv-rotate").kv_rotate


def test_a_store_names_what_it_cannot_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "c.toml", cachestore={"socket": "/tmp/" + 100 * "x"})
    assert store_cli.main(["serve", "--config", str(file)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {file}: [cachestore] socket: the socket path has 108 bytes")
    assert said.count("\n") == 1
