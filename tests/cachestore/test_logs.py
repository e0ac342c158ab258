"""The lines of a log, and the files that they are in."""

import argparse
import json
import logging
import os
import re
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from cachestore import config, logs
from cachestore.logs import LogConfig, LogError
from tests.support.daemons import start_cachestore

log = logging.getLogger("tests.logs")
FIELDS = {"id": 7, "status": "OK", "text": 'a "b"\nc', "seconds": 0.25, "ids": [1, 2]}


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """The root logger as a new process has it."""
    root = logging.getLogger()
    level = root.level
    monkeypatch.setattr(root, "handlers", [])
    yield root
    for handler in root.handlers:
        handler.close()
    root.setLevel(level)


def begin(path: Path, form: str = "plain", level: str = "info") -> None:
    logs.begin(LogConfig(level, form, path))


def test_plain_lines(directory: Path) -> None:
    begin(directory / "x.log")
    log.warning("something %d", 5)
    log.debug("hidden")
    logs.event(log, "request", FIELDS)
    first, second = (directory / "x.log").read_text().splitlines()
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    assert re.fullmatch(time + r" WARNING tests\.logs: something 5", first)
    assert second.endswith(
        r'INFO tests.logs: request id=7 status=OK text="a \"b\"\nc" seconds=0.25 ids="[1, 2]"'
    ) or second.endswith(
        r'INFO tests.logs: request id=7 status=OK text="a \"b\"\nc" seconds=0.25 ids=[1, 2]'
    )


def test_json_is_one_object_a_line(directory: Path) -> None:
    begin(directory / "x.log", "json")
    logs.event(log, "request", FIELDS)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("it failed: %s", "\ud800")
    first, second = map(json.loads, (directory / "x.log").read_text().splitlines())
    assert {name: first[name] for name in FIELDS} == FIELDS
    assert (first["level"], first["logger"], first["message"]) == ("info", "tests.logs", "request")
    assert first["time"].endswith("Z")
    assert datetime.fromisoformat(first["time"]).utcoffset() == timedelta(0)
    assert second["level"] == "error"
    assert "Traceback" in second["exception"]
    assert "two\nlines" in second["exception"]


def test_a_file_rotates(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "LOG_BYTES_MAX", 2000)
    begin(directory / "x.log", "json")
    for number in range(200):
        log.info("line %d", number)
    names = sorted(path.name for path in directory.iterdir())
    assert names == ["x.log", *(f"x.log.{n + 1}" for n in range(config.LOG_FILES_BEFORE))]
    for path in directory.iterdir():
        assert path.stat().st_size <= 2000
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    lines = [json.loads(line) for line in (directory / "x.log").read_text().splitlines()]
    assert lines[-1]["message"] == "line 199"


def test_a_file_that_was_moved_away_is_begun_anew(directory: Path) -> None:
    path = directory / "x.log"
    begin(path)
    log.info("before")
    path.rename(directory / "moved")
    log.info("after")
    path.unlink()
    log.info("again")
    assert "before" in (directory / "moved").read_text()
    assert "after" not in (directory / "moved").read_text()
    assert "again" in path.read_text()
    # Where none can be begun, the old one goes on.
    path.rename(directory / "moved again")
    path.mkdir()
    log.info("still")
    assert "still" in (directory / "moved again").read_text()
    path.rmdir()
    log.info("at last")
    assert "at last" in path.read_text()


def test_auto_is_the_platforms_directory(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "folder", lambda: directory / "a" / "log")
    parser = argparse.ArgumentParser()
    logs.add_flags(parser)
    flags = parser.parse_args(["--log-file", "auto", "--log-format", "json"])
    found = logs.config_of(flags, "engine")
    assert found == LogConfig("info", "json", directory / "a" / "log" / "engine.log")
    assert not (directory / "a").exists()
    logs.begin(found)
    assert stat.S_IMODE((directory / "a" / "log").stat().st_mode) == 0o700


def test_a_file_that_cannot_be_written_names_the_flag(directory: Path) -> None:
    with pytest.raises(LogError, match=r"--log-file .*No such file or directory"):
        begin(directory / "nowhere" / "x.log")


def test_with_a_file_stderr_is_silent_but_for_what_ends_the_daemon(directory: Path) -> None:
    path = directory / "x.log"
    with start_cachestore(directory, log_file=str(path), log_format="json") as daemon:
        second = subprocess.run(
            [
                *(sys.executable, "-m", "cachestore", "serve", "--socket", str(daemon.socket)),
                *("--log-file", str(path)),
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert second.returncode == 3
        assert f"{daemon.socket} is in use by process {daemon.pid}: use" in second.stderr
        assert daemon.terminate() == 0
        assert daemon.log == ""
    lines = path.read_text().splitlines()
    assert "ERROR cachestore.logs: " in lines[1]
    assert "is in use by process" in lines[1]
    del lines[1]
    messages = [json.loads(line)["message"] for line in lines]
    assert "ready at" in messages[0]
    assert messages[-1] == "cachestore ends"


def test_a_log_file_that_cannot_be_opened_is_one_line_and_exit_code_2(directory: Path) -> None:
    refused = subprocess.run(
        [
            *(sys.executable, "-m", "cachestore", "serve"),
            *("--socket", str(directory / "x.sock"), "--log-file", "/nowhere/x.log"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert refused.returncode == 2
    assert refused.stderr == "error: --log-file /nowhere/x.log: No such file or directory\n"


def test_what_is_no_file_is_refused_and_named(directory: Path) -> None:
    pipe = directory / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path(os.devnull), directory):
        with pytest.raises(LogError, match=f"--log-file {path}: not a regular file"):
            begin(path)


def test_a_rotation_that_fails_loses_no_line(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not in this folder")

    monkeypatch.setattr(config, "LOG_BYTES_MAX", 500)
    begin(directory / "x.log")
    with monkeypatch.context() as patched:
        patched.setattr("os.rename", refuse)
        for number in range(20):
            log.info("line %d", number)
    lines = (directory / "x.log").read_text().splitlines()
    assert [line.rpartition("line ")[2] for line in lines] == [str(n) for n in range(20)]
    log.info("line 20")
    assert (directory / "x.log").read_text().count("\n") == 1
    assert (directory / "x.log.1").read_text().splitlines() == lines


def test_a_disk_that_takes_no_more_is_said_once(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(directory / "x.log")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        for _ in range(3):
            log.warning("lost")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err
    assert said.count("Logging error") == 1
    assert "File too large" in said
    log.warning("kept")
    assert (directory / "x.log").read_text().splitlines()[-1].endswith("kept")
