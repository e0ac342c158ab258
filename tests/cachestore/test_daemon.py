"""The daemon as a process: what it leaves, what it survives, whom it refuses."""

import resource
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from cachestore import endpoint, variables
from cachestore.client import MatchKind, StoreRefused
from cachestore.v1 import cachestore_pb2 as pb
from cachestore.v1 import cachestore_pb2_grpc
from tests.support import entries
from tests.support.daemons import Cachestore, start_cachestore
from tests.support.slabs import held_slabs, slabs_of_all_processes
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
ROWS = 600

LOOK_UP = """
import sys
from cachestore.client import Client
from tests.support import entries
with Client.connect(sys.argv[1]) as client:
    lease = client.lookup(entries.NAMESPACE, entries.tokens(600), 599)
    assert lease.rows == 599 and entries.is_intact(client, lease)
"""
STOP_HALFWAY = """
import sys
from cachestore.client import Client
from tests.support import entries
client = Client.connect(sys.argv[1])
lease = client.lookup(entries.NAMESPACE, entries.tokens(600), 600)
reservation = client.reserve(entries.NAMESPACE, entries.tokens(900), 0, 100, 1000, "")
client.extent(reservation.pieces[0])[:1000] = bytes(1000)
print("halfway", flush=True)
sys.stdin.read()
"""


def start_client(script: str, daemon: Cachestore) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", script, daemon.socket],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def run_serve(socket: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    """Runs a daemon that is expected to refuse to start."""
    return subprocess.run(
        [sys.executable, "-m", "cachestore", "serve", "--socket", socket, *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def raw_call(daemon: Cachestore, request: pb.LookupRequest, token: str | None) -> grpc.StatusCode:
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(endpoint.grpc_target(daemon.socket), options) as channel:
        stub = cachestore_pb2_grpc.CachestoreStub(channel)
        metadata = () if token is None else (("cachestore-session", token),)
        with pytest.raises(grpc.RpcError) as failure:
            stub.Lookup(request, timeout=10, metadata=metadata)
    assert isinstance(failure.value, grpc.Call)
    return failure.value.code()


def test_another_process_finds_what_one_has_written(daemon: Cachestore) -> None:
    with daemon.client() as client:
        entries.write(client, entries.tokens(ROWS))
    other = start_client(LOOK_UP, daemon)
    assert other.communicate(timeout=60)[0] == b""
    assert other.returncode == 0
    found = daemon.stats()
    assert (found.lookups.exact, found.sessions, found.leases) == (1, 0, 0)


def test_a_killed_client_leaves_nothing_behind(daemon: Cachestore) -> None:
    with daemon.client() as client:
        entries.write(client, entries.tokens(ROWS))
    before = daemon.stats()
    victim = start_client(STOP_HALFWAY, daemon)
    with victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"halfway\n"
        during = daemon.stats()
        assert (during.sessions, during.leases, during.reservations) == (1, 1, 1)
        assert during.bytes_reserved > 0
        victim.kill()
        victim.wait()
        start = time.monotonic()
        until(lambda: daemon.stats().sessions == 0, "the end of its session")
        assert time.monotonic() - start < 1
    after = daemon.stats()
    assert (after.leases, after.reservations) == (0, 0)
    assert (after.bytes_reserved, after.bytes_quarantined) == (0, 0)
    assert (after.bytes_used, after.tokens) == (before.bytes_used, before.tokens)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_clean_stop_leaves_no_file(daemon: Cachestore, number: signal.Signals) -> None:
    with daemon.client() as client:
        entries.write(client, entries.tokens(ROWS))
        daemon.process.send_signal(number)
        assert daemon.process.wait(timeout=20) == 0
        assert not client.alive
    assert [path.name for path in daemon.socket.parent.iterdir()] == ["cachestore.log"]
    assert "Traceback" not in daemon.log


def test_a_second_daemon_is_refused_and_told_who_is_there(daemon: Cachestore) -> None:
    second = run_serve(daemon.socket)
    assert second.returncode == endpoint.EXIT_HELD
    told = f"error: --socket: {daemon.socket} is in use by process {daemon.pid}: use that one or "
    assert second.stderr == f"{told}end it, or give another path\n"
    assert daemon.stats().pid == daemon.pid


def test_what_a_killed_daemon_left_is_taken_over(directory: Path) -> None:
    with start_cachestore(directory) as first:
        with first.client() as client:
            entries.write(client, entries.tokens(10))
        first.kill()
        assert first.socket.exists()
        assert endpoint.session_path(first.socket).exists()
        with start_cachestore(directory) as second:
            assert second.stats().records == 0
            assert second.terminate() == 0


def test_a_file_in_the_way_is_not_removed(directory: Path) -> None:
    path = directory / "precious"
    path.write_text("keep")
    refused = run_serve(path)
    assert (refused.returncode, path.read_text()) == (2, "keep")
    told = f"error: --socket: {path} exists and is not a socket: give another path\n"
    assert refused.stderr == told


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("way", ["memfd", "posix"])
def test_no_shared_memory_outlives_a_killed_daemon(directory: Path, way: str) -> None:
    with start_cachestore(directory, environment={variables.SHM: way}) as daemon:
        with daemon.client() as client:
            entries.write(client, entries.tokens(ROWS))
            slabs = held_slabs(daemon.pid)
            assert len(slabs) == daemon.stats().slabs == 1
            assert slabs <= held_slabs()  # our mapping
            lease = client.lookup(entries.NAMESPACE, entries.tokens(ROWS), ROWS)
            assert entries.is_intact(client, lease)
        daemon.kill()
    assert not slabs & slabs_of_all_processes()
    assert not list(Path("/dev/shm").glob("mlxcs*"))


def test_files_are_private(daemon: Cachestore) -> None:
    for path in (daemon.socket, endpoint.session_path(daemon.socket)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    lock = daemon.socket.with_name("cachestore.sock.lock")
    assert stat.S_IMODE(lock.stat().st_mode) == 0o600
    assert lock.read_text() == f"{daemon.pid}\n"


def test_a_path_may_have_any_characters(directory: Path) -> None:
    odd = directory / "a b%20#é?"
    odd.mkdir()
    with start_cachestore(odd) as daemon, daemon.client() as client:
        assert entries.write(client, entries.tokens(3)) == 3


def test_a_call_needs_the_token_of_an_open_session(daemon: Cachestore) -> None:
    request = pb.LookupRequest(namespace=entries.NAMESPACE, tokens=entries.tokens(1), limit=1)
    with daemon.client() as ended:
        token = ended._session.token
    for wrong in (None, "", "0" * 64, token):
        assert raw_call(daemon, request, wrong) is grpc.StatusCode.UNAUTHENTICATED


def test_a_message_over_the_limit_is_refused(daemon: Cachestore) -> None:
    request = pb.LookupRequest(namespace=entries.NAMESPACE, tokens=bytes(9 << 20))
    assert raw_call(daemon, request, "any") is grpc.StatusCode.RESOURCE_EXHAUSTED
    with daemon.client() as client:
        with pytest.raises(StoreRefused, match="larger than max"):
            client.lookup(entries.NAMESPACE, bytes(9 << 20), 0)
        largest = entries.tokens(1 << 20)  # the longest sequence fits
        assert client.lookup(entries.NAMESPACE, largest, 1).kind is MatchKind.MISS


def test_writers_together_stay_within_the_budget(directory: Path) -> None:
    """Eight sessions want five times the budget at once."""
    with start_cachestore(directory, budget="16MiB") as daemon:

        def work(writer: int) -> int:
            refused = 0
            with daemon.client() as client:
                for number in range(10):
                    try:
                        sequence = entries.tokens(1000, first=10_000 * writer + 1000 * number)
                        entries.write(client, sequence)
                    except StoreRefused as refusal:
                        assert refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED  # noqa: PT017
                        refused += 1
                    assert client.stats().bytes_slabs <= 16 << 20
            return refused

        with ThreadPoolExecutor(8) as writers:
            refused = sum(writers.map(work, range(8)))
        found = daemon.stats()
    assert found.bytes_slabs == 16 << 20
    assert found.bytes_used + found.bytes_free == found.bytes_slabs
    assert found.evictions > 0
    assert found.writes.committed == 80 - refused


def test_without_memory_writes_are_refused_and_the_service_lives(daemon: Cachestore) -> None:
    if sys.platform != "linux":  # mypy on another system reads this, but no marks
        pytest.skip("needs prlimit")
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    with daemon.client() as client:
        for _ in range(2):
            with pytest.raises(StoreRefused, match="no shared memory for a slab") as refused:
                entries.write(client, entries.tokens(ROWS))
            assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        found = client.stats()
        assert (found.bytes_slabs, found.reservations) == (0, 0)

        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, unlimited)
        assert entries.write(client, entries.tokens(ROWS)) == ROWS


def test_without_an_engine_the_daemon_ends_after_a_while(directory: Path) -> None:
    with start_cachestore(directory, idle_exit=1.5) as daemon:
        with daemon.client():
            until(lambda: daemon.stats().uptime_seconds > 3, "more than the idle time")
        with daemon.client(role="admin"):  # does not count
            assert daemon.process.wait(timeout=20) == 0
    assert [path.name for path in directory.iterdir()] == ["cachestore.log"]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--budget", "15MiB"], "--budget"),
        (["--budget", "900TiB"], "--budget: '900TiB' is more than this machine's memory"),
        (["--budget", "much"], "--budget: 'much' is not a size"),
        (["--idle-exit", "0"], "--idle-exit: '0' is not a number of seconds above 0"),
        (["--idle-exit", "nan"], "--idle-exit: 'nan'"),
        (["--checkpoints-max", "1"], "--checkpoints-max: 1 is not between 2 and"),
        (["--checkpoints-max", "few"], "--checkpoints-max: 'few' is not a whole number"),
        (["--log-level", "loud"], "--log-level: invalid choice"),
        (["--socket", "/tmp/" + "x" * 100], "--socket: the socket path has 108 bytes"),
        (["--socket", "/nowhere/x.sock"], "--socket: directory /nowhere: No such file"),
        (["--frobnicate"], "--frobnicate: no such flag"),
    ],
)
def test_a_bad_flag_is_one_line_and_exit_code_2(
    directory: Path, flags: list[str], complaint: str
) -> None:
    refused = run_serve(directory / "x.sock", *flags)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: ")
    assert complaint in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert list(directory.iterdir()) == []


def test_an_open_directory_is_refused(directory: Path) -> None:
    directory.chmod(0o777)
    assert "others can write" in run_serve(directory / "x.sock").stderr


def test_the_client_needs_neither_mlx_nor_the_server() -> None:
    script = (
        "import sys, cachestore.client, cachestore.endpoint;"
        "print([m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_lm', 'engine')"
        " or m in ('cachestore.server', 'cachestore.store', 'rich')])"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout == "[]\n"
