"""What is written for launchd and systemd is what they accept, and means what we mean."""

import os
import plistlib
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cachestore.serve
import engine.serve
from cachestore import settings
from cachestore.deploy.launchd import plist
from cachestore.deploy.place import Place, launchd_place, systemd_place
from cachestore.deploy.service import (
    CACHESTORE,
    DRAIN_SECONDS,
    ENGINE,
    LABELS,
    NAMES,
    UNITS,
    Service,
    Setup,
    services,
)
from cachestore.deploy.systemd import arguments, unit

ROOT = Path(__file__).resolve().parents[2]
PLISTS = sorted((ROOT / "deploy" / "launchd").rglob("*.plist"))
# Of launchd.plist(5), what we use and of which type.
KEYS: dict[str, type] = {
    **{"Label": str, "ProgramArguments": list, "WorkingDirectory": str, "UserName": str},
    **{"RunAtLoad": bool, "KeepAlive": dict, "ThrottleInterval": int, "ExitTimeOut": int},
    **{"ProcessType": str, "Umask": int, "SoftResourceLimits": dict},
    **{"StandardOutPath": str, "StandardErrorPath": str, "EnvironmentVariables": dict},
}
OPTIONAL = {"UserName", "EnvironmentVariables"}
PATHS = ("WorkingDirectory", "StandardOutPath", "StandardErrorPath")


def made(place: Place, **other: Any) -> dict[str, Service]:
    setup = Setup(python=Path(sys.executable), model="m", attach=place.runtime / "cachestore.sock")
    return services(replace(setup, **other), place)


def test_examples_of_both_daemons_are_there_for_login_and_boot() -> None:
    assert [path.stem for path in PLISTS] == sorted(LABELS.values()) * 2
    units = (ROOT / "deploy" / "systemd").iterdir()
    assert sorted(path.name for path in units) == sorted(UNITS.values())


def test_examples_are_what_would_be_installed() -> None:
    check = subprocess.run(
        [sys.executable, ROOT / "scripts" / "generate-deploy", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (check.returncode, check.stdout, check.stderr) == (0, "", "")


@pytest.mark.parametrize("path", PLISTS, ids=lambda path: "/".join(path.parts[-2:]))
def test_a_plist_has_keys_that_launchd_knows_with_values_it_takes(path: Path) -> None:
    found = plistlib.loads(path.read_bytes())
    assert set(found) <= set(KEYS)
    assert set(KEYS) - set(found) <= OPTIONAL
    assert {key: type(value) for key, value in found.items()} == {key: KEYS[key] for key in found}
    assert found["Label"] == path.stem
    assert all(isinstance(argument, str) for argument in found["ProgramArguments"])
    assert all(Path(found[key]).is_absolute() for key in PATHS)
    assert Path(found["ProgramArguments"][0]).is_absolute()
    assert found["KeepAlive"] == {"SuccessfulExit": False}
    assert found["ProcessType"] == "Interactive"
    assert found["Umask"] == 0o077
    assert found["SoftResourceLimits"]["NumberOfFiles"] > 256
    environment = found.get("EnvironmentVariables", {"": ""})
    assert {type(text) for pair in environment.items() for text in pair} == {str}
    assert not {"~", "$"} & set(path.read_text())  # launchd expands nothing


@pytest.mark.parametrize("path", PLISTS, ids=lambda path: "/".join(path.parts[-2:]))
def test_only_a_daemon_of_the_system_names_its_user_and_home(path: Path) -> None:
    found = plistlib.loads(path.read_bytes())
    home = found.get("EnvironmentVariables", {}).get("HOME")
    expected = ("YOU", "/Users/YOU") if path.parent.name == "daemons" else (None, None)
    assert (found.get("UserName"), home) == expected


@pytest.mark.parametrize("drain", [None, 1, 300])
@pytest.mark.parametrize("name", NAMES)
def test_nobody_is_killed_while_it_drains(name: str, drain: int | None) -> None:
    daemon = made(launchd_place(Path("/Users/a")), drain_seconds=drain)[name]
    allowed = plistlib.loads(plist(daemon))["ExitTimeOut"]
    assert allowed > (drain or DRAIN_SECONDS if name == ENGINE else 1)
    assert f"TimeoutStopSec={allowed}\n" in unit(daemon)
    # A configuration file's own word about the drain is left to it.
    said = "--drain-seconds" in daemon.arguments
    assert said == (name == ENGINE and drain is None)


def test_the_engine_never_starts_a_store_beside_the_service() -> None:
    found = made(systemd_place(Path("/home/a"), Path("/run/user/7/mlx-cachestore")))[ENGINE]
    at = found.arguments.index("--cachestore")
    assert found.arguments[at + 1] == "unix:/run/user/7/mlx-cachestore/cachestore.sock"


@pytest.mark.parametrize("name", NAMES)
def test_the_daemons_know_every_flag(name: str) -> None:
    place = systemd_place(Path("/home/a"), Path("/run"))
    service = made(place, config=Path(os.devnull), budget="64MiB")[name]
    parser = settings.Parser(prog=name, table=name)
    {CACHESTORE: cachestore.serve, ENGINE: engine.serve}[name].add_flags(parser)
    flags = parser.parse_args(service.arguments[service.arguments.index("serve") + 1 :])
    assert flags.config == Path(os.devnull)
    assert flags.log_file == "/home/a/.local/state/mlx-cachestore/log/" + name + ".log"


printable = st.text(st.characters(exclude_categories=["C", "Z"]) | st.just(" "), min_size=1)


@given(path=printable, value=printable)
def test_a_unit_is_read_as_it_was_meant(path: str, value: str) -> None:
    place = systemd_place(Path("/home/a b%c"), Path("/run"))
    service = made(place, config=Path("/", path), environment={"HF_HOME": value})[CACHESTORE]
    text = unit(service)
    assert arguments(text) == service.arguments
    assert "WorkingDirectory=/home/a b%%c\n" in text
    # Neither begins a line of its own.
    plain = unit(made(place, environment={"A": "b"})[CACHESTORE])
    assert text.count("\n") == plain.count("\n")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("folder", ["home", 'it\'s 100% "$HOME"'])
def test_systemd_finds_nothing_to_say_about_our_units(directory: Path, folder: str) -> None:
    place = systemd_place(directory / folder, directory / "run")
    place.home.mkdir()
    found = made(place, config=place.home / "a.toml", environment={"HF_HOME": "/a b%c$d"})
    for name, service in found.items():
        (directory / UNITS[name]).write_text(unit(service))
    verified = subprocess.run(
        ["systemd-analyze", "--user", "verify", *(directory / name for name in UNITS.values())],
        env={**os.environ, "XDG_RUNTIME_DIR": str(directory), "HOME": str(directory)},
        capture_output=True,
        text=True,
        check=False,
    )
    # It ends with 0 whatever it says.
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")


def test_systemd_is_asked_to_wait_watch_and_restart_after_a_failure() -> None:
    found = made(systemd_place(Path("/home/a"), Path("/run")))
    for name, service in found.items():
        text = unit(service)
        for line in ("Type=notify", "WatchdogSec=30", "Restart=on-failure", "UMask=0077"):
            assert f"\n{line}\n" in text
        # One of them makes the folder of both sockets, and leaves it when it stops.
        assert text.count("RuntimeDirectory=mlx-cachestore\n") == (name == CACHESTORE)
        assert text.count("RuntimeDirectoryMode=0700\n") == (name == CACHESTORE)
        assert text.count("RuntimeDirectoryPreserve=yes\n") == (name == CACHESTORE)
    assert "Wants=mlx-cachestore.service\nAfter=mlx-cachestore.service\n" in unit(found[ENGINE])
