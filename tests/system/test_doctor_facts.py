"""What both doctors say of given facts: those of which no set-up is planted."""

import os
import pwd
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from cachestore.deploy import launchd
from cachestore.deploy.place import Place as Folders
from cachestore.deploy.place import launchd_place
from cachestore.deploy.service import ENGINE, LABELS, Setup, services
from cachestore.doctor import checks, facts, limits
from cachestore.doctor.finding import EngineReport, RunningEngine
from cachestore.doctor.places import Lock, Meeting, Place
from engine import doctor

MEETING = Meeting(
    name="cachestore",
    directory=Place(Path("/run/x"), None),
    private=True,
    sockets=(Place(Path("/run/x/cachestore.sock"), None),),
    lock=Lock(Path("/run/x/cachestore.sock.lock"), exists=False, held=False, pid=""),
    why_not="",
)


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("--cachestore off", "start it without --cachestore off"),
        ("layer 3: a cache of class X", "docs/models.md says which models and flags can be cached"),
    ],
)
def test_an_engine_that_caches_nothing_is_found(reason: str, advice: str) -> None:
    given = doctor.Facts(
        uid=os.geteuid(),
        settings=(),
        wheels=doctor.Wheels("", None, None),
        pins=(),
        folders=(),
        meeting=None,
        engine=RunningEngine("unix:/e", 2, "1", "m", 1, False),
        why_not="",
        not_cached_reason=reason,
    )
    (found,) = doctor.findings(given)
    assert (found.check, found.advice) == ("engine-caches", advice)
    assert f"caches nothing: {reason}" in found.problem


def test_a_small_dev_shm_is_found_where_slabs_are_in_it() -> None:
    """The one that cannot be planted without being root."""
    machine = facts.Machine(
        uid=os.geteuid(),
        memory_bytes=64 << 30,
        descriptors=1024,
        shm_problem="",
        shm_bytes=64 << 20,
    )
    store = facts.RunningStore(1, "1", True, 0, 8 << 30, 0, 0, 1024)
    given = facts.Facts("1", machine, (), (), 8 << 30, MEETING, store, EngineReport((), None))
    (found,) = checks.findings(given)
    assert found.check == "shared-memory"
    assert "/dev/shm holds 64.0 MiB" in found.problem
    assert "mount -o remount" in found.advice


def test_limits_of_control_groups_are_seen(tmp_path: Path) -> None:
    inner = tmp_path / "groups" / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text("2147483648\n")
    membership = tmp_path / "cgroup"
    membership.write_text("4:memory:/old\n0::/outer/inner\n")
    assert list(limits.group_bytes(membership, tmp_path / "groups")) == [2 << 30]
    membership.write_text("0::/\n")
    (tmp_path / "groups" / "memory.max").write_text("1073741824\n")
    assert list(limits.group_bytes(membership, tmp_path / "groups")) == [1 << 30]
    assert list(limits.group_bytes(tmp_path / "none")) == []


def test_what_a_daemon_says_does_not_move_the_cursor() -> None:
    machine = facts.Machine(os.geteuid(), 64 << 30, 1024, "", None)
    engine = RunningEngine("unix:/e", 2, "\x1b[2J\n9", "m", 1 << 30, True)
    store = facts.RunningStore(1, "1", True, 1, 16 << 30, 0, 0, 1024)
    report = EngineReport((), engine)
    given = facts.Facts("1", machine, (), (), 16 << 30, MEETING, store, report)
    (found,) = checks.findings(given)
    assert "is version ?[2J?9, installed" in str(found)
    assert str(found).count("\n") == 1


def test_a_model_beside_the_budget_counts() -> None:
    machine = facts.Machine(os.geteuid(), 64 << 30, 1024, "", None)
    store = facts.RunningStore(1, "1", True, 1, 16 << 30, 0, 0, 1024)
    for gib, wrong in ((30, False), (40, True)):
        engine = RunningEngine("unix:/e", 2, "1", "m", gib << 30, True)
        given = facts.Facts(
            "1", machine, (), (), 16 << 30, MEETING, store, EngineReport((), engine)
        )
        found = checks.findings(given)
        assert [finding.check for finding in found] == (["memory"] if wrong else [])
        assert all("--budget 11468MiB" in finding.advice for finding in found)


ME = pwd.getpwuid(os.getuid()).pw_name


@pytest.mark.parametrize(
    ("installed", "problems", "advice"),
    [
        ({None: sys.executable}, ["does not run"], "cachestore-admin service start --only engine;"),
        (
            {ME: sys.executable},
            ["does not run"],
            "sudo cachestore-admin service start --only engine --system;",
        ),
        (
            {ME: "/no/such/python"},
            ["/no/such/python is gone"],
            "sudo cachestore-admin service install --only engine --system",
        ),
        (
            {None: sys.executable, ME: sys.executable},
            ["does not run", "does not run", "is installed twice"],
            "cachestore-admin service start --only engine;",
        ),
        ({"somebody": "/no/such/python"}, [], ""),
    ],
    ids=["agent", "daemon", "daemon without its python", "both", "of another user"],
)
def test_services_of_a_mac_are_found_with_and_without_a_login(
    installed: Mapping[str | None, str],
    problems: list[str],
    advice: str,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def place(user: str | None) -> Folders:
        found = launchd_place(directory, user)
        return found if user is None else replace(found, definitions=directory / "LaunchDaemons")

    for user, python in installed.items():
        service = services(Setup(Path(python), attach=directory / "x.sock"), place(user))[ENGINE]
        path = place(user).definitions / f"{LABELS[ENGINE]}.plist"
        path.parent.mkdir(parents=True)
        path.write_bytes(launchd.plist(service))
    monkeypatch.setattr(facts, "own_place", lambda: place(None))
    monkeypatch.setattr(facts, "system_place", place)
    monkeypatch.setattr("sys.platform", "darwin")
    machine = facts.Machine(os.geteuid(), 64 << 30, 1024, "", None)
    found, nothing = tuple(facts.installed_services()), EngineReport((), None)
    said = checks.findings(
        facts.Facts("1", machine, (), found, 8 << 30, replace(MEETING, why_not="no"), None, nothing)
    )
    assert len(said) == len(problems)
    for finding, problem in zip(said, problems, strict=True):
        assert problem in finding.problem
        assert finding.check == "services"
    assert "".join(finding.advice for finding in said).startswith(advice)
