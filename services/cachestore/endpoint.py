"""Where the daemons of one user meet: the runtime directory, socket paths, and their lock.

gRPC binds over the socket of a live server without a word, and the old server then removes the
new one's file when it stops. So a daemon takes the lock of its path before any bind and holds
it for life; whoever holds it may remove what a dead predecessor left.
"""

import contextlib
import fcntl
import ipaddress
import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from cachestore import variables

# sun_path holds 104 bytes on macOS and 108 on Linux, with the final NUL. One limit everywhere:
# what works on the machine it was written on works on the other.
SOCKET_BYTES_MAX = 103
SESSION_SUFFIX = ".fd"
# Exit code of a daemon whose path is held by another one; a starter that lost the race to
# start it tells this from a failure.
EXIT_HELD = 3
# Of every client's channel.
CHANNEL_OPTIONS = (
    # A new connection must not inherit the back-off of one whose daemon died.
    ("grpc.use_local_subchannel_pool", 1),
    # http_proxy would have a say even for a loopback address.
    ("grpc.enable_http_proxy", 0),
)
# Of both daemons: clients may keep a channel alive by pings, also while it is idle.
SERVER_OPTIONS = (
    # The similar name with "recv" in it does nothing.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


class EndpointError(ValueError):
    """A path that cannot be used; the message says which and why, in one line."""


class Held(EndpointError):
    """Another live process holds the path."""


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """An address of the loopback interface. `host` has the brackets of an IPv6 address."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def tcp_address(text: str, *, or_else: str = "") -> TcpAddress:
    """Read "HOST:PORT"; raises EndpointError, which tells of `or_else` as another possibility."""
    host, colon, port = text.rpartition(":")
    # isdigit alone takes digits of every script.
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535
    if not (colon and host and is_port):
        raise EndpointError(f"{text!r} is not HOST:PORT{or_else}")
    loopback = host == "localhost"
    # Without its brackets gRPC takes the port for a part of an IPv6 address.
    bracketed = host.startswith("[") and host.endswith("]")
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host[1:-1] if bracketed else host)
        loopback = address.is_loopback and bracketed == (address.version == 6)
    if not loopback:
        raise EndpointError(
            f"{host} is not a loopback address, and there is no authentication yet: "
            f"use 127.0.0.1, [::1] or localhost{or_else}"
        )
    return TcpAddress(host, int(port))


def runtime_dir() -> Path:
    """The user's private directory for sockets, created when absent.

    Raises EndpointError unless it is a real directory of ours that nobody else can enter.
    """
    path = runtime_path()
    elsewhere = f"set {variables.RUNTIME_DIR} to a folder of yours"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise EndpointError(f"runtime directory {path}: {error.strerror}; {elsewhere}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise EndpointError(f"runtime directory {path}: not a directory; {elsewhere}")
    if found.st_uid != os.geteuid():
        raise EndpointError(
            f"runtime directory {path}: belongs to uid {found.st_uid}, not to us; {elsewhere}"
        )
    if found.st_mode & 0o077:
        raise EndpointError(
            f"runtime directory {path}: open to others (mode {found.st_mode & 0o777:o}); "
            f"close it, with: chmod 700 {path}"
        )
    return path


def runtime_path() -> Path:
    """Where that directory is, or would be."""
    chosen = os.environ.get(variables.RUNTIME_DIR)
    if chosen:
        return Path(os.path.abspath(chosen))
    # Not platformdirs: on macOS it names a place that the system purges.
    if sys.platform == "darwin":
        return Path.home() / ".mlx-cachestore" / "run"
    session = os.environ.get("XDG_RUNTIME_DIR")
    if session:
        return Path(session) / "mlx-cachestore"
    return Path(f"/tmp/mlx-cachestore-{os.geteuid()}")


def cachestore_socket() -> Path:
    """The default path of the cachestore; makes the runtime directory."""
    return runtime_dir() / "cachestore.sock"


def engine_socket() -> Path:
    """The default path of the engine; makes the runtime directory."""
    return runtime_dir() / "engine.sock"


def socket_path(text: str | Path, *, flag: str, suffix: str = "") -> Path:
    """The absolute path for a socket given by the user.

    `suffix` is the longest ending that will be added to it. Raises EndpointError naming `flag`
    when the path is empty or too long.
    """
    if not str(text) or "\0" in str(text):
        raise EndpointError(f"{flag}: not a path: {str(text)!r}; give that of a socket")
    path = Path(os.path.abspath(text))
    length = len(os.fsencode(path)) + len(os.fsencode(suffix))
    if length > SOCKET_BYTES_MAX:
        what = f" (with {suffix})" if suffix else ""
        raise EndpointError(
            f"{flag}: the socket path has {length} bytes{what}, at most {SOCKET_BYTES_MAX} "
            f"are possible; give a shorter one, or set {variables.RUNTIME_DIR} to a shorter "
            f"folder: {path}"
        )
    return path


def session_path(path: Path) -> Path:
    """The session socket that lies next to the gRPC socket `path`."""
    return path.with_name(path.name + SESSION_SUFFIX)


def lock_path(path: Path) -> Path:
    """The lock of the socket `path`; it names its holder's pid."""
    return path.with_name(path.name + ".lock")


def grpc_target(path: Path) -> str:
    """gRPC percent-decodes what follows `unix:`, and cuts it at `#` and `?`."""
    return "unix:" + quote(os.fsencode(path))


def check_directory(path: Path, *, flag: str) -> None:
    """Raises EndpointError unless nobody else can replace a socket in the directory of `path`."""
    parent = path.parent
    elsewhere = "give a path in a folder of yours"
    try:
        found = parent.stat()
    except OSError as error:
        raise EndpointError(f"{flag}: directory {parent}: {error.strerror}; {elsewhere}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise EndpointError(f"{flag}: {parent} is not a directory; {elsewhere}")
    if found.st_uid not in (os.geteuid(), 0):
        raise EndpointError(
            f"{flag}: directory {parent} belongs to uid {found.st_uid}, not to us; {elsewhere}"
        )
    if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
        raise EndpointError(
            f"{flag}: others can write to directory {parent} (mode {found.st_mode & 0o777:o}); "
            f"close it, with: chmod go-w {parent}"
        )


class Lock:
    """Exclusive use of a socket path, from construction until `release` or the process's end.

    Raises Held when another process has it, and EndpointError when it cannot be opened; both
    name `flag`.
    """

    def __init__(self, path: Path, *, flag: str) -> None:
        self.path = path
        self._flag = flag
        self._file = lock_path(path)
        self._fd = self._acquire()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def _acquire(self) -> int:
        while True:
            try:
                fd = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise EndpointError(
                    f"{self._flag}: {self._file}: {error.strerror}; give another path"
                ) from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
                os.close(fd)
                raise Held(
                    f"{self._flag}: {self.path} is in use by process {holder}: use that one or "
                    "end it, or give another path"
                ) from None
            # A holder removes the file as it leaves: what was locked may be no longer there.
            if self._still_named(fd):
                return fd
            os.close(fd)

    def _still_named(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), self._file.lstat())
        except FileNotFoundError:
            return False

    def remove_socket(self, path: Path) -> None:
        """Removes a socket that a predecessor left; anything else there is an error."""
        try:
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise EndpointError(
                    f"{self._flag}: {path} exists and is not a socket: give another path"
                )
            path.unlink()
        except FileNotFoundError:
            pass

    def release(self) -> None:
        """Removes the lock file, then lets go of it."""
        self._file.unlink(missing_ok=True)
        os.close(self._fd)
