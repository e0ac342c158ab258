"""Where a daemon is met: directory, sockets and lock, as they lie there, without touching them."""

import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cachestore import endpoint, variables
from cachestore.doctor.finding import Finding


@dataclass(frozen=True, slots=True)
class Place:
    """`kind` is None where nothing is."""

    path: Path
    kind: str | None
    uid: int = 0
    mode: int = 0


@dataclass(frozen=True, slots=True)
class Lock:
    """`pid` is who took it last, as it says; `held`: whether it still has it."""

    path: Path
    exists: bool
    held: bool
    pid: str


@dataclass(frozen=True, slots=True)
class Meeting:
    """Of one daemon. `private`: whether it refuses to start in a directory that others can enter;
    `why_not` is empty when it answers."""

    name: str
    directory: Place
    private: bool
    sockets: tuple[Place, ...]
    lock: Lock
    why_not: str


def meeting(name: str, sockets: Sequence[Path], why_not: str) -> Meeting:
    """Looks. The first socket is the one that the lock is for."""
    directory = sockets[0].parent
    return Meeting(
        name=name,
        directory=look(directory),
        private=directory == endpoint.runtime_path(),
        sockets=tuple(map(look, sockets)),
        lock=_lock(endpoint.lock_path(sockets[0]), answers=not why_not),
        why_not=why_not,
    )


def look(path: Path) -> Place:
    try:
        found = path.lstat()
    except OSError:
        return Place(path, None)
    kinds = {stat.S_IFDIR: "directory", stat.S_IFSOCK: "socket", stat.S_IFREG: "file"}
    kind = kinds.get(stat.S_IFMT(found.st_mode), "something else")
    return Place(path, kind, found.st_uid, stat.S_IMODE(found.st_mode))


def runs(socket: Path) -> bool:
    """Whether a daemon has the lock of that socket: it serves, loads, ends or hangs."""
    return _lock(endpoint.lock_path(socket), answers=False).held


def check(met: Meeting, uid: int) -> Iterator[Finding]:
    """What is wrong with the places of a daemon that runs as user `uid`."""
    yield from _directory(met.directory, uid, private=met.private)
    for socket in met.sockets:
        yield from _socket(socket, uid)
    if met.why_not:
        yield from _left(met)


def _directory(place: Place, uid: int, *, private: bool) -> Iterator[Finding]:
    if place.kind is None:
        return  # a daemon makes it
    if place.kind != "directory":
        problem, advice = "is no directory", f"move it away, or set {variables.RUNTIME_DIR}"
    elif place.uid not in ((uid,) if private else (uid, 0)):
        problem = f"belongs to user {place.uid}, not to {uid}"
        advice = f"chown {uid} {place.path}, or set {variables.RUNTIME_DIR}"
    elif private and place.mode & 0o077:
        problem = f"is open to others (mode {place.mode:o}): no daemon starts in it"
        advice = f"chmod 700 {place.path}"
    elif place.mode & 0o022 and not place.mode & stat.S_ISVTX:
        problem = f"can be written to by others (mode {place.mode:o})"
        advice = f"chmod 700 {place.path}"
    else:
        return
    yield Finding("runtime-directory", f"{place.path} {problem}", advice)


def _socket(place: Place, uid: int) -> Iterator[Finding]:
    length = len(os.fsencode(place.path))
    if length > endpoint.SOCKET_BYTES_MAX:
        yield Finding(
            "socket-path",
            f"{place.path} has {length} bytes, at most {endpoint.SOCKET_BYTES_MAX} are possible",
            f"set {variables.RUNTIME_DIR} to a shorter path, for both daemons",
        )
    if place.kind is None:
        return
    if place.kind != "socket":
        problem, advice = f"is no socket but a {place.kind}", f"move it away: mv {place.path} /tmp"
    elif place.uid != uid:
        problem, advice = f"belongs to user {place.uid}, not to {uid}", "run both as one user"
    elif place.mode & 0o077:
        problem = f"is open to others (mode {place.mode:o})"
        advice = f"chmod 600 {place.path}"
    else:
        return
    yield Finding("socket-permissions", f"{place.path} {problem}", advice)


def _left(met: Meeting) -> Iterator[Finding]:
    sockets = [place.path for place in met.sockets if place.kind == "socket"]
    # A process with the lock and no socket is starting.
    if met.lock.held and sockets:
        yield Finding(
            f"{met.name}-answers",
            f"process {met.lock.pid} has {met.lock.path} and gives no usable answer: {met.why_not}",
            f"see its log; end it with: kill {met.lock.pid} (or kill -9), and start it again",
        )
    elif not met.lock.held and (sockets or met.lock.exists):
        paths = [*sockets, *([met.lock.path] if met.lock.exists else [])]
        yield Finding(
            "stale-files",
            f"{met.name} does not run, but left {' '.join(path.name for path in paths)} in "
            f"{met.directory.path}: it was killed",
            f"start it again, or: rm {' '.join(map(str, paths))}",
        )


def _lock(path: Path, *, answers: bool) -> Lock:
    """Whether it is held is tried only when nobody answers: that takes it for an instant."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return Lock(path, exists=False, held=False, pid="")
    try:
        pid = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        return Lock(path, exists=True, held=answers or _is_held(fd), pid=pid)
    finally:
        os.close(fd)


def _is_held(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False
