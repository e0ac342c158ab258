import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cachestore.admin import main
from cachestore.report import report, tables
from cachestore.v1 import cachestore_pb2 as pb
from tests.support import entries
from tests.support.daemons import Cachestore

ADMIN = (sys.executable, "-c", "import sys; from cachestore.admin import main; sys.exit(main())")
KEYS = {
    *("version", "pid", "uptime_seconds", "bytes_budget", "bytes_slabs", "bytes_used"),
    *("bytes_reserved", "bytes_quarantined", "bytes_free", "slabs", "records", "sequences"),
    *("tokens", "namespaces", "lookups", "writes", "evictions", "bytes_evicted", "sessions"),
    *("leases", "reservations", "waiting", "announced", "slab_failures"),
    *("check_failures", "bytes_padding", "bytes_stranded", "bytes_retiring", "pinned"),
    *("bytes_useful", "bytes_moved", "checkpoints", "bytes_checkpoints"),
    *("checkpoints_evicted", "checkpoints_surplus"),
}


def admin(socket: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*ADMIN, "--socket", str(socket), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


def stats(daemon: Cachestore) -> dict[str, Any]:
    found = admin(daemon.socket, "stats", "--json")
    assert (found.returncode, found.stderr) == (0, "")
    return dict(json.loads(found.stdout))


def test_json_of_an_empty_store(daemon: Cachestore) -> None:
    found = stats(daemon)
    assert set(found) == KEYS
    assert found["pid"] == daemon.pid
    assert found["bytes_budget"] == 64 << 20
    assert found["sessions"] == 0  # ours does not count
    assert found["namespaces"] == []
    assert found["lookups"]["hit_rate_requests"] is None
    assert found["lookups"]["hit_rate_tokens"] is None


def test_json_counts_what_was_asked_and_stored(daemon: Cachestore) -> None:
    sequence = entries.tokens(600)
    with daemon.client() as client:
        client.lookup(entries.NAMESPACE, sequence, 599)
        entries.write(client, sequence)
        client.lookup(entries.NAMESPACE, sequence, 599)
        client.lookup(entries.NAMESPACE, sequence[:400], 100)
        found = stats(daemon)
    (namespace,) = found["namespaces"]
    assert namespace == {
        "namespace": entries.NAMESPACE.hex(),
        "label": "test",
        "bytes_used": found["bytes_used"],
        "tokens": 600,
        "records": 3,
        "sequences": 1,
        **{"checkpointed": False, "checkpoints": 0, "bytes_checkpoints": 0},
    }
    lookups = found["lookups"]
    assert 0 < lookups.pop("seconds_p50") <= lookups.pop("seconds_p99") < 1
    assert sum(lookups.pop("seconds")["counts"]) == 3
    assert lookups == {
        **{"exact": 1, "supersequence": 1, "prefix": 0, "lcp": 0, "miss": 1},
        **{"tokens_requested": 1300, "tokens_served": 699},
        **{"hit_rate_requests": 2 / 3, "hit_rate_tokens": 699 / 1300},
    }
    assert found["writes"] == {
        **{"committed": 1, "rows_inserted": 600, "rows_duplicate": 0},
        **{"refused": 0, "dropped": 0, "checkpoints_inserted": 0, "checkpoints_duplicate": 0},
    }
    assert (found["sessions"], found["leases"], found["reservations"]) == (1, 2, 0)
    assert found["bytes_slabs"] == found["bytes_used"] + found["bytes_free"]


def test_watching_ends_when_nobody_reads(daemon: Cachestore) -> None:
    command = [*ADMIN, "--socket", str(daemon.socket), "stats", "--json", "--watch", "0.1"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as watcher:
        assert watcher.stdout is not None
        assert watcher.stderr is not None
        watcher.stdout.readline()
        watcher.stdout.close()
        assert watcher.wait(timeout=20) == 1
        assert watcher.stderr.read() == ""


def test_watching_is_one_object_a_line_until_it_is_interrupted(daemon: Cachestore) -> None:
    command = [*ADMIN, "--socket", str(daemon.socket), "stats", "--json", "--watch", "0.1"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, text=True) as watcher:
        assert watcher.stdout is not None
        lines = [json.loads(watcher.stdout.readline()) for _ in range(3)]
        watcher.send_signal(signal.SIGINT)
        assert watcher.wait(timeout=20) == 0
    times = [line["uptime_seconds"] for line in lines]
    assert times == sorted(set(times))
    assert all(set(line) == KEYS for line in lines)


def test_watching_ends_with_the_daemon(daemon: Cachestore) -> None:
    command = [*ADMIN, "--socket", str(daemon.socket), "stats", "--watch", "0.1"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as watcher:
        assert watcher.stdout is not None
        assert watcher.stderr is not None
        assert "cachestore" in watcher.stdout.readline()
        daemon.kill()
        watcher.stdout.read()
        assert watcher.stderr.read().startswith("error: no cachestore answers")
        assert watcher.wait(timeout=20) == 1


def test_tables_for_people(daemon: Cachestore) -> None:
    with daemon.client() as client:
        entries.write(client, entries.tokens(600))
        reservation = client.reserve(bytes(32), entries.tokens(1), 0, 0, 1, "[red]m\x1b[2J")
        client.extent(reservation.pieces[0])[:1] = b"x"
        client.commit(reservation.id, [1])
    found = admin(daemon.socket, "stats")
    assert (found.returncode, found.stderr) == (0, "")
    for text in ("64.0 MiB", "586.8 KiB", "test (00010203)", "[red]m?[2J (00000000)", "601"):
        assert text in found.stdout
    assert "\x1b" not in found.stdout
    colored = admin(daemon.socket, "stats", FORCE_COLOR="1")
    assert "\x1b[" in colored.stdout


def test_health(daemon: Cachestore) -> None:
    found = admin(daemon.socket, "health")
    assert (found.returncode, found.stdout, found.stderr) == (0, "serving\n", "")


@pytest.mark.parametrize("command", ["stats", "health"])
def test_no_daemon_is_one_line_that_says_how_to_start_it(directory: Path, command: str) -> None:
    path = directory / "none.sock"
    found = admin(path, command)
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.count("\n") == 1
    assert str(path) in found.stderr
    assert f"start one with: cachestore serve --socket {path}" in found.stderr


def test_the_default_socket_is_in_the_runtime_directory(directory: Path) -> None:
    found = subprocess.run(
        [*ADMIN, "stats"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MLX_CACHESTORE_RUNTIME_DIR": str(directory)},
    )
    assert found.returncode == 1
    assert str(directory / "cachestore.sock") in found.stderr
    assert found.stderr.endswith("start one with: cachestore serve\n")


@pytest.mark.parametrize("behind", [False, True], ids=["in front", "behind"])
def test_the_socket_stands_on_either_side_of_the_command(
    daemon: Cachestore, capsys: pytest.CaptureFixture[str], behind: bool
) -> None:
    words = ["--socket", str(daemon.socket)]
    assert main(["health", *words] if behind else [*words, "health"]) == 0
    assert capsys.readouterr().out == "serving\n"


def test_a_socket_is_a_path_and_not_an_address(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--socket", "unix:/tmp/x.sock", "stats"])
    told = "error: --socket: unix:/tmp/x.sock is not a path: leave out unix:\n"
    assert capsys.readouterr().err == told


def test_bad_arguments_are_one_line(directory: Path) -> None:
    for arguments in ([], ["dance"], ["stats", "--yaml"], ["stats", "--watch", "0"]):
        found = admin(directory / "x.sock", *arguments)
        assert (found.returncode, found.stderr.count("\n")) == (2, 1)
    found = admin(Path("/" + "x" * 101), "stats")
    assert (found.returncode, found.stderr.count("\n")) == (2, 1)
    assert "--socket: the socket path has 105 bytes" in found.stderr


def test_what_a_daemon_calls_itself_is_text() -> None:
    out = io.StringIO()
    stats = pb.StatsResponse(version="[/red]\x1b[2J", bytes_budget=1 << 30)
    Console(file=out, width=80).print(tables(report(stats)))
    assert out.getvalue().startswith("cachestore [/red]?[2J, process 0")


def test_the_report_has_every_field_of_the_reply() -> None:
    found = report(pb.StatsResponse(namespaces=[pb.NamespaceStats()]))
    assert set(found) == {field.name for field in pb.StatsResponse.DESCRIPTOR.fields}
    for name, message in (
        ("lookups", pb.LookupStats),
        ("writes", pb.WriteStats),
    ):
        assert {field.name for field in message.DESCRIPTOR.fields} <= set(found[name])
    fields = {field.name for field in pb.NamespaceStats.DESCRIPTOR.fields}
    assert fields == set(found["namespaces"][0])
