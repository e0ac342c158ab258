"""Which slabs a process holds; on a system without /proc it is not known, and none is found."""

import os
from pathlib import Path


def held_slabs(process: int | str = "self") -> set[int]:
    """Inodes of the slabs that a process has open. Python keeps a mapping's descriptor open."""
    found = set()
    directory = Path(f"/proc/{process}/fd")
    for fd in os.listdir(directory) if directory.exists() else ():
        try:
            if "mlx" in os.readlink(directory / fd):
                found.add((directory / fd).stat().st_ino)
        except OSError:
            continue  # closed meanwhile
    return found


def slabs_of_all_processes() -> set[int]:
    found = set()
    for process in os.listdir("/proc"):
        if process.isdigit():
            try:
                found |= held_slabs(process)
            except OSError:
                continue  # ended meanwhile
    return found
