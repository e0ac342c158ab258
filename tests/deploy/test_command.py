"""`cachestore-admin service` as a person meets it."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import HealthServicer
from platformdirs.macos import MacOS
from platformdirs.unix import Unix

from cachestore.admin import main
from cachestore.deploy import tail
from cachestore.deploy.health import serving
from cachestore.deploy.place import APP, launchd_place, own_place
from cachestore.deploy.service import ENGINE, NAMES
from tests.support.managers import Machine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="of systemd's users")


@pytest.fixture(autouse=True)
def own_folders(linux: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("RUNTIME_DIR", "CACHE_DIR", "CONFIG"):
        monkeypatch.delenv(f"MLX_CACHESTORE_{name}", raising=False)
    monkeypatch.setenv("MLX_CACHESTORE_RUNTIME_DIR", str(linux.place.runtime))


def service(*arguments: str | Path) -> int:
    return main(["service", *map(str, arguments)])


def error(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that was written there."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_a_dry_run_shows_the_daemons_commands(
    linux: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert service("install", "--model", "smollm2", "--budget", "1GiB", "--dry-run") == 0
    said = capsys.readouterr().out
    commands = [line for line in said.splitlines() if line.startswith("ExecStart=")]
    assert len(commands) == 2
    assert all(sys.executable in command for command in commands)
    assert "--budget 1GiB" in commands[0]
    assert "--model smollm2" in commands[1]
    assert f"--cachestore unix:{linux.place.runtime}/cachestore.sock" in commands[1]
    assert linux.state["calls"] == []
    assert not list(linux.place.home.iterdir())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "--model: the engine needs one"),
        (["--model", ""], "--model: empty; give"),
        (["--model", "./nowhere"], "no such folder: /.*/nowhere"),
        (["--model", "m", "--budget", "much"], "--budget: 'much' is not a size"),
        (["--model", "m", "--config", "/nowhere.toml"], "/nowhere.toml: No such file"),
        (["--model", "m", "--system"], "--system is for macOS.*loginctl enable-linger"),
        (["--model", "a\nb"], "cannot have 'a.nb'"),
        (["--model", "m", "--budget", "1\nGiB"], "cannot have '1.nGiB'"),
    ],
)
def test_what_cannot_be_installed_is_said_in_a_line(
    arguments: list[str], reason: str, linux: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert service("install", *arguments) == 1
    assert re.match(f"error: .*{reason}", error(capsys))
    assert linux.state["calls"] == []


def test_a_daemon_of_a_mac_runs_as_who_called_sudo(
    linux: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    install = ("install", "--system", "--model", "m", "--dry-run")
    monkeypatch.setenv("SUDO_USER", "nobody")
    assert service(*install) == 0
    said = capsys.readouterr().out
    assert said.count("<key>UserName</key>\n\t<string>nobody</string>") == 2
    assert "+ write /Library/LaunchDaemons/" in said
    monkeypatch.setenv("SUDO_USER", "nobody-of-that-name")
    assert service(*install) == 1
    assert "no such user" in error(capsys)
    monkeypatch.setenv("SUDO_USER", "root")
    assert service(*install) == 1
    assert "with sudo from the account" in error(capsys)


def test_folders_are_those_that_the_daemons_use(
    linux: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    home = linux.place.home
    for place, folders in (
        (launchd_place(home), MacOS(APP)),
        (linux.place, Unix(APP)),
    ):
        assert place.logs == folders.user_log_path
        assert place.cache == folders.user_cache_path
        assert place.config == folders.user_config_path / "config.toml"
    assert own_place() == replace(linux.place, chosen=(linux.place.runtime,))


def test_the_file_says_what_the_command_line_does_not(
    linux: Machine, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = directory / "a.toml"
    file.write_text(
        '[cachestore]\nsocket = "/tmp/x.sock"\n[engine]\nmodel = "m"\ndrain-seconds = 90\n'
    )
    assert service("install", "--config", file, "--dry-run") == 0
    said = capsys.readouterr().out
    assert "--cachestore unix:/tmp/x.sock" in said
    assert said.count(f"--config {file}") == 2
    assert "--model" not in said
    assert "--drain-seconds" not in said
    assert "TimeoutStopSec=110\n" in said
    assert linux.state["calls"] == []


def test_the_file_may_not_start_a_second_store_or_end_the_service(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = directory / "a.toml"
    file.write_text('[engine]\nmodel = "m"\ncachestore = "auto"\n')
    assert service("install", "--config", file) == 1
    assert "second store" in error(capsys)
    file.write_text('[engine]\nmodel = "m"\n[cachestore]\nidle-exit = 60\n')
    assert service("install", "--config", file) == 1
    assert "would end the service" in error(capsys)
    file.write_text('[engine]\nmodel = "m"\ncachestore-budget = "1GiB"\n')
    assert service("install", "--config", file) == 1
    assert "the service is none: set budget in [cachestore]" in error(capsys)
    file.write_text('[engine]\nmodel = "m"\ncachestore = "off"\n')
    assert service("install", "--config", file, "--dry-run") == 0
    assert "--cachestore" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('[engine]\ndrain-seconds = "90"', "drain-seconds in .engine. must be a whole number"),
        ("[engine]\ndrain-seconds = nan", "drain-seconds in .engine. must be a whole number"),
        ("[engine]\ndrain-seconds = true", "drain-seconds in .engine. must be a whole number"),
        ("[engine]\ndrain-seconds = -90", "drain-seconds in .engine. must be a whole number"),
        ("[cachestore]\nsocket = 5", "socket in .cachestore. must be a string, not 5"),
        ("x = " + "[" * 5000, "a.toml: nested too deeply"),
    ],
)
def test_a_file_that_no_daemon_reads_is_refused_in_a_line(
    content: str, reason: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = directory / "a.toml"
    file.write_text(content)
    assert service("install", "--model", "m", "--config", file, "--dry-run") == 1
    assert re.match(f"error: .*{reason}", error(capsys))


def test_relative_paths_begin_where_the_daemons_run(
    linux: Machine,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = directory / "a.toml"
    file.write_text('[cachestore]\nsocket = "x.sock"\n')
    monkeypatch.chdir(directory)
    monkeypatch.setenv("MLX_CACHESTORE_CACHE_DIR", "cache")
    assert service("install", "--model", "m", "--config", file, "--dry-run") == 0
    said = capsys.readouterr().out
    assert f"--cachestore unix:{linux.place.home}/x.sock" in said
    # What a variable names is meant from here.
    assert f'Environment="MLX_CACHESTORE_CACHE_DIR={directory}/cache"' in said


def test_status_says_with_its_exit_code_whether_all_run(
    linux: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert service("status") == 3
    assert capsys.readouterr().out.count("not installed") == 2
    linux.installer().install(linux.setup(), NAMES)
    assert service("status") == 0  # they run; nothing serves in their place
    assert capsys.readouterr().out.count("not serving") == 2
    linux.installer().stop([ENGINE])
    assert service("status") == 3
    capsys.readouterr()
    assert service("status", "--only", "cachestore", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["service"], found["state"], found["last_exit"]) == (
        *("cachestore", "not serving"),
        None,
    )
    assert found["problem"] == ""


def test_status_says_what_it_can_when_the_settings_are_broken(
    linux: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    linux.installer().install(linux.setup(), NAMES)
    linux.place.config.parent.mkdir(parents=True)
    linux.place.config.write_text("[cachestore\n")
    assert service("status") == 0
    said = capsys.readouterr().out
    assert said.count(" running ") == 2
    for name in NAMES:
        assert f"{name}: {linux.place.config}: Expected ']'" in said
    assert service("status", "--json") == 0
    for found in json.loads(capsys.readouterr().out):
        assert found["problem"].startswith(f"{found['service']}: {linux.place.config}: Expected")
    (definition,) = linux.place.definitions.glob("*engine*")
    definition.write_text("[Service]\n")
    assert service("status", "--only", "engine") == 0
    assert "install it again" in capsys.readouterr().out


def test_data_is_removed_only_after_a_yes(
    linux: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    linux.installer().install(linux.setup(), NAMES)
    cached = linux.place.cache / "digests"
    cached.mkdir(parents=True)
    assert service("uninstall", "--purge") == 1
    assert "add --yes" in error(capsys)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: "n")
    assert service("uninstall", "--purge") == 1
    assert "nothing was removed" in error(capsys)
    assert linux.pids()
    assert service("uninstall", "--purge", "--only", "engine", "--yes") == 1
    assert service("uninstall", "--purge", "--yes") == 0
    assert not cached.exists()
    assert not linux.place.logs.exists()
    assert linux.pids() == {}


@pytest.mark.parametrize("chosen", [".", "{home}", "{home}/x/..", "{home}/..", "foreign", "/"])
def test_purge_leaves_a_folder_that_a_variable_names(
    chosen: str,
    linux: Machine,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It may hold anything else as well."""
    monkeypatch.chdir(directory)
    foreign = [linux.place.home / "letter", directory / "foreign" / "letter"]
    for file in foreign:
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine")
    path = chosen.format(home=linux.place.home)
    monkeypatch.setenv("MLX_CACHESTORE_CACHE_DIR", path)
    assert service("uninstall", "--purge", "--yes") == 0
    assert all(file.exists() for file in foreign)
    said = capsys.readouterr().out
    assert "rm -r" not in said
    assert f"What stays: {Path(os.path.abspath(path))}" in said


def test_purge_leaves_a_link_and_what_it_leads_to(
    linux: Machine, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = directory / "elsewhere" / "model"
    file.parent.mkdir()
    file.write_text("weights")
    linux.place.cache.parent.mkdir(parents=True)
    linux.place.cache.symlink_to(file.parent)
    linux.place.logs.mkdir(parents=True)
    assert service("uninstall", "--purge", "--yes") == 0
    assert file.exists()
    assert not linux.place.logs.exists()
    assert f"What stays: {linux.place.cache}" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["status"], ["logs"], ["install", "--model", "m"]])
def test_a_folder_that_cannot_be_looked_into_is_named(
    words: list[str],
    linux: Machine,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # A name that no folder can have: root may look into all others.
    monkeypatch.setenv("HOME", str(directory / ("d" * 300)))
    assert service(*words) == 1
    assert error(capsys).startswith(f"error: {directory}/ddd")


def test_logs_shows_the_last_lines_of_each(
    linux: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert service("logs") == 1
    assert "no logs in" in error(capsys)
    linux.place.logs.mkdir(parents=True)
    (linux.place.logs / "engine.log").write_text("".join(f"line {n}\n" for n in range(9)))
    (linux.place.logs / "cachestore.crash.log").write_text("Traceback\n")
    assert service("logs", "--lines", "2") == 0
    said = capsys.readouterr().out
    assert said == "cachestore | Traceback\nengine | line 7\nengine | line 8\n"


@pytest.mark.parametrize("lines", ["-1", "few", "9" * 30])
def test_logs_takes_a_number_of_lines(lines: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        service("logs", f"--lines={lines}")
    assert ended.value.code == 2
    assert error(capsys).startswith("error: --lines: ")


def test_a_proxy_has_no_say_in_whether_a_daemon_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    servicer = HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    try:
        assert serving(address)
    finally:
        server.stop(None).wait()


def test_logs_follows_a_file_that_is_renamed(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, old = directory / "engine.log", directory / "engine.log.1"
    path.write_text("one\ntwo\n")

    def steps(_seconds: float) -> None:
        step = next(script, None)
        if step is None:
            raise KeyboardInterrupt
        step()

    def turn() -> None:
        with path.open("a") as file:
            file.write("four\n")
        path.rename(old)

    def append(text: str) -> None:
        with path.open("a") as file:
            file.write(text)

    script: Iterator[Callable[[], object]] = iter(
        [
            lambda: append("thr"),
            lambda: append("ee\n"),
            turn,
            lambda: append("five\n"),
            lambda: None,
        ]
    )
    with pytest.raises(KeyboardInterrupt):
        tail.show({"engine": [path]}, 1, follow=True, sleep=steps)
    said = capsys.readouterr().out.splitlines()
    assert said == [f"engine | {word}" for word in ("two", "three", "four", "five")]
