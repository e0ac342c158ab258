"""A user's systemd for tests, apart from the one that may manage this machine.

It gets a control group of its own, and namespaces in which there is no other one: whatever it
does stays inside, and ends with the group. That takes root, as in a container.
"""

import contextlib
import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import until

_PROGRAMS = (Path("/usr/lib/systemd/systemd"), Path("/lib/systemd/systemd"))
# /run/systemd/system is how systemd sees that it may run at all.
_START = """
echo $$ > "$GROUP/cgroup.procs" || exit 1
exec unshare --mount --cgroup sh -c '
    mount -t cgroup2 none /sys/fs/cgroup && mount -t tmpfs none /run &&
    mkdir -p /run/systemd/system && exec "$PROGRAM" --user
'
"""


@contextlib.contextmanager
def user_systemd(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """From now on `systemctl --user` means this one, and home is a new one in `directory`.

    Skips the test, saying why, where none can run.
    """
    program = next((path for path in _PROGRAMS if path.exists()), None)
    if program is None:
        pytest.skip("needs systemd")
    home, runtime, log = directory / "home", directory / "run", directory / "systemd.log"
    home.mkdir()
    runtime.mkdir(mode=0o700)
    for name in ("CONFIG_HOME", "STATE_HOME", "CACHE_HOME"):
        monkeypatch.delenv(f"XDG_{name}", raising=False)
    monkeypatch.delenv("DBUS_SESSION_BUS_ADDRESS", raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    chosen = {"PROGRAM": str(program), "SYSTEMD_LOG_TARGET": "console"}
    with _group() as group, log.open("wb") as output:
        manager = subprocess.Popen(
            ["sh", "-c", _START],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **chosen, "GROUP": str(group)},
        )
        try:
            socket = runtime / "systemd" / "private"
            until(lambda: socket.exists() or manager.poll() is not None, "systemd")
            if manager.poll() is not None:
                pytest.skip(f"systemd cannot run here: {log.read_text().strip()[-200:]!r}")
            yield
        finally:
            _end(manager, group)


@contextlib.contextmanager
def _group() -> Iterator[Path]:
    """A new control group inside ours; skips where we may not make one."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    root = next((Path(mount[1]) for mount in mounts if mount[2] == "cgroup2"), None)
    ours = Path("/proc/self/cgroup").read_text().partition("0::/")[2].splitlines()
    if root is None or not ours:
        pytest.skip("systemd needs control groups, version 2")
    group = root / ours[0] / f"mlx-cachestore-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"systemd needs a control group of its own: {error}")
    try:
        yield group
    finally:
        for path in sorted(group.rglob("*"), reverse=True):
            if path.is_dir():
                path.rmdir()
        group.rmdir()


def _end(manager: "subprocess.Popen[bytes]", group: Path) -> None:
    manager.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        manager.wait(20)
    with contextlib.suppress(OSError):  # not on an old kernel
        (group / "cgroup.kill").write_text("1")
    manager.wait(20)
    until(lambda: "populated 0" in (group / "cgroup.events").read_text(), "its processes to end")
