"""What a process is allowed, as Linux tells it of others, too; None: no limit, or none known."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")


def descriptors(pid: int) -> int | None:
    """Files that it may open."""
    return _soft(pid, "Max open files")


def memory_bytes(pid: int) -> int | None:
    """The least of what its shell (`ulimit -v`) and its control groups leave it."""
    found = [_soft(pid, "Max address space"), *group_bytes(Path(f"/proc/{pid}/cgroup"))]
    return min((limit for limit in found if limit is not None), default=None)


def group_bytes(membership: Path, groups: Path = GROUPS) -> Iterator[int]:
    """Limits of the control group (version 2) that a file of /proc names, and of those around it.

    In a container the group is at the top, and the limit is that of the container.
    """
    text = ""
    with contextlib.suppress(OSError):
        text = membership.read_text()
    for line in text.splitlines():
        if line.startswith("0::/"):
            group = groups / line.removeprefix("0::/")
            for folder in (group, *group.parents):
                with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                    yield int((folder / "memory.max").read_text())


def _soft(pid: int, name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):  # no such file, or "unlimited"
        for line in Path(f"/proc/{pid}/limits").read_text().splitlines():
            if line.startswith(name):
                return int(line.removeprefix(name).split()[0])
    return None
