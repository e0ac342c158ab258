import fcntl
import os
import socket
import stat
import sys
from pathlib import Path

import pytest

from cachestore import endpoint
from cachestore.endpoint import EndpointError, Held, Lock


def test_the_runtime_directory_is_made_private(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_CACHESTORE_RUNTIME_DIR", str(directory / "a" / "run"))
    made = endpoint.runtime_dir()
    assert made == directory / "a" / "run"
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert endpoint.cachestore_socket() == made / "cachestore.sock"
    assert endpoint.engine_socket() == made / "engine.sock"


@pytest.mark.parametrize(
    ("platform", "session", "expected"),
    [
        ("linux", True, "session/mlx-cachestore"),
        ("darwin", True, "home/.mlx-cachestore/run"),
        ("darwin", False, "home/.mlx-cachestore/run"),
    ],
)
def test_each_platform_has_its_place(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    session: bool,
    expected: str,
) -> None:
    monkeypatch.delenv("MLX_CACHESTORE_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("HOME", str(directory / "home"))
    if session:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory / "session"))
    else:
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    assert endpoint.runtime_dir() == directory / expected


def test_without_a_session_directory_linux_uses_one_in_tmp_named_by_uid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MLX_CACHESTORE_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    uid = 4_000_000_000 - os.getpid()
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    made = Path(f"/tmp/mlx-cachestore-{uid}")
    try:
        with pytest.raises(EndpointError, match=r"uid .*; set MLX_CACHESTORE_RUNTIME_DIR"):
            endpoint.runtime_dir()  # made by us, who are not that user
        assert made.is_dir()
    finally:
        made.rmdir()


def test_a_runtime_directory_that_others_may_have_prepared_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = directory / "run"
    monkeypatch.setenv("MLX_CACHESTORE_RUNTIME_DIR", str(run))

    run.mkdir()
    run.chmod(0o750)
    with pytest.raises(EndpointError, match=f"open to others .*: chmod 700 {run}$"):
        endpoint.runtime_dir()
    run.rmdir()

    run.symlink_to(directory)
    with pytest.raises(EndpointError, match="not a directory; set MLX_CACHESTORE_RUNTIME_DIR"):
        endpoint.runtime_dir()
    run.unlink()

    run.touch()
    with pytest.raises(EndpointError, match="File exists; set MLX_CACHESTORE_RUNTIME_DIR"):
        endpoint.runtime_dir()


def test_a_socket_path_is_measured_in_bytes_with_its_suffix() -> None:
    longest = "/" + "a" * 102
    assert endpoint.socket_path(longest, flag="--socket") == Path(longest)
    with pytest.raises(
        EndpointError, match=r"--listen: the socket path has 104 bytes, at most 103"
    ):
        endpoint.socket_path(longest + "a", flag="--listen")
    with pytest.raises(EndpointError, match=r"106 bytes \(with \.fd\)"):
        endpoint.socket_path(longest, flag="--socket", suffix=endpoint.SESSION_SUFFIX)
    with pytest.raises(EndpointError, match="105 bytes"):
        endpoint.socket_path("/" + "é" * 52, flag="--socket")
    for nothing in ("", "a\0b"):
        with pytest.raises(EndpointError, match=r"--socket: not a path: .*; give that of a socket"):
            endpoint.socket_path(nothing, flag="--socket")


def test_a_relative_path_becomes_absolute() -> None:
    assert endpoint.socket_path("x.sock", flag="--socket") == Path.cwd() / "x.sock"


def test_a_target_survives_the_decoding_of_grpc() -> None:
    assert endpoint.grpc_target(Path("/a b/%20#?é")) == "unix:/a%20b/%2520%23%3F%C3%A9"


@pytest.mark.parametrize(("mode", "good"), [(0o777, False), (0o770, False), (0o1777, True)])
def test_a_directory_where_others_can_swap_files_is_refused(
    directory: Path, mode: int, good: bool
) -> None:
    directory.chmod(mode)
    if good:
        endpoint.check_directory(directory / "x.sock", flag="--socket")
    else:
        with pytest.raises(EndpointError, match=r"--socket: others .*: chmod go-w /"):
            endpoint.check_directory(directory / "x.sock", flag="--socket")


def test_a_directory_of_somebody_else_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "sub").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: 4_242_424)
    endpoint.check_directory(Path("/x.sock"), flag="--socket")  # root's is fine
    if os.getuid() != 0:
        with pytest.raises(EndpointError, match="belongs to uid"):
            endpoint.check_directory(directory / "sub" / "x.sock", flag="--socket")
    with pytest.raises(EndpointError, match=r"No such file .*; give a path in a folder of yours"):
        endpoint.check_directory(directory / "none" / "x.sock", flag="--socket")
    (directory / "file").touch()
    with pytest.raises(EndpointError, match="is not a directory; give a path in"):
        endpoint.check_directory(directory / "file" / "x.sock", flag="--socket")


def test_a_held_path_is_refused_with_the_holders_pid(directory: Path) -> None:
    path = directory / "x.sock"
    first = Lock(path, flag="--socket")
    with pytest.raises(Held, match=f"--socket: {path} is in use by process {os.getpid()}: use"):
        Lock(path, flag="--socket")
    first.release()
    assert list(directory.iterdir()) == []
    Lock(path, flag="--socket").release()


def test_the_file_of_a_dead_holder_is_taken_over(directory: Path) -> None:
    path = directory / "x.sock"
    (directory / "x.sock.lock").write_text("99999999999 from before\n")
    lock = Lock(path, flag="--socket")
    assert (directory / "x.sock.lock").read_text() == f"{os.getpid()}\n"
    lock.release()


def test_a_lock_on_a_file_that_its_holder_has_just_removed_does_not_count(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = directory / "x.sock"
    leaving = [Lock(path, flag="--socket")]
    flock = fcntl.flock

    def flock_after_release(fd: int, operation: int) -> None:
        while leaving:
            leaving.pop().release()
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock_after_release)
    second = Lock(path, flag="--socket")
    with pytest.raises(Held):
        Lock(path, flag="--socket")
    second.release()


def test_a_lock_is_not_written_through_a_link(directory: Path) -> None:
    precious = directory / "precious"
    precious.write_text("keep")
    (directory / "x.sock.lock").symlink_to(precious)
    with pytest.raises(EndpointError, match=r"--socket: .*x.sock.lock: .*; give another path"):
        Lock(directory / "x.sock", flag="--socket")
    assert precious.read_text() == "keep"


def test_only_sockets_are_removed(directory: Path) -> None:
    path = directory / "x.sock"
    lock = Lock(path, flag="--socket")
    lock.remove_socket(path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    lock.remove_socket(path)
    assert not path.exists()
    path.write_text("a file")
    with pytest.raises(EndpointError, match="not a socket"):
        lock.remove_socket(path)
    assert path.read_text() == "a file"
    lock.release()
