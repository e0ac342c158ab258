"""cachestore-admin: the commands that look at records, or change what is held."""

import json
from typing import Any

import pytest

from cachestore import record
from cachestore.admin import main
from cachestore.client import Client
from cachestore.config import TOKEN_BYTES
from tests.cachestore.test_admin import ADMIN, admin
from tests.support import entries, records
from tests.support.daemons import Cachestore
from tests.support.terminal import on_terminal
from tests.support.waiting import until

OTHER = bytes(32)


@pytest.fixture
def stored(daemon: Cachestore) -> Cachestore:
    """Records 1 to 3 with 600 tokens, record 4 with one of another model."""
    with daemon.client() as client:
        records.write(client, entries.tokens(600))
        records.write(client, entries.tokens(1), OTHER)
        for namespace, count in ((entries.NAMESPACE, 500), *[(OTHER, 1)] * 3):
            client.lookup(namespace, entries.tokens(600), count)
        client.lookup(entries.NAMESPACE, entries.tokens(200), 200)
    until(lambda: daemon.stats().sessions == 0, "the end of the session")
    return daemon


def said(daemon: Cachestore, *arguments: str) -> str:
    found = admin(daemon.socket, *arguments)
    assert (found.returncode, found.stderr) == (0, "")
    return found.stdout


def objects(daemon: Cachestore, *arguments: str) -> Any:
    return json.loads(said(daemon, *arguments, "--json"))


def test_ls_shows_every_record(stored: Cachestore) -> None:
    found = objects(stored, "ls")
    assert [entry["record_id"] for entry in found] == [1, 2, 3, 4]
    assert sum(entry["bytes"] for entry in found) == stored.stats().bytes_used
    assert found[1].pop("age_seconds") >= 0
    assert found[1] == {
        **{"record_id": 2, "namespace": entries.NAMESPACE.hex(), "parent_record_id": 1},
        **{"first_token": 256, "tokens": 256, "sequences": 0, "bytes": found[0]["bytes"]},
        **{"hits": 1, "claims": 0, "pinned": False, "checkpoint": 0},
    }
    table = said(stored, "ls", "--limit", "3")
    assert "256 to 511" in table
    assert "a [model]" in table
    assert "and 1 more" in table


@pytest.mark.parametrize(
    ("sort", "order"), [("bytes", [1, 2, 3, 4]), ("hits", [4, 1, 2, 3]), ("age", [2, 3, 4, 1])]
)
def test_ls_sorts(stored: Cachestore, sort: str, order: list[int]) -> None:
    found = objects(stored, "ls", "--sort", sort)
    assert [entry["record_id"] for entry in found] == order


def test_ls_sorts_by_bytes_what_was_stored_otherwise(daemon: Cachestore) -> None:
    with daemon.client() as client:
        for first, count in enumerate((100, 1, 200)):
            records.write(client, entries.tokens(count, first))
    found = objects(daemon, "ls", "--sort", "bytes")
    assert [entry["record_id"] for entry in found] == [3, 1, 2]


def test_ls_goes_on_behind_a_page(daemon: Cachestore) -> None:
    with daemon.client() as client:
        for first in range(600):
            records.write(client, entries.tokens(1, first))
    assert [entry["record_id"] for entry in objects(daemon, "ls")] == [*range(1, 601)]
    assert [entry["record_id"] for entry in objects(daemon, "ls", "--limit", "2")] == [1, 2]


def test_a_namespace_is_named_by_its_first_digits(stored: Cachestore) -> None:
    (found, _) = objects(stored, "namespaces")
    assert (found["namespace"], found["tokens"]) == (entries.NAMESPACE.hex(), 600)
    assert "a [model]" in said(stored, "namespaces")
    assert [entry["record_id"] for entry in objects(stored, "ls", "--namespace", "0000")] == [4]
    for prefix, number in (("00", 2), ("ff", 0)):
        wrong = admin(stored.socket, "evict", "--namespace", prefix)
        complaint = f"error: --namespace: {number} namespaces begin with '{prefix}'; give the first"
        assert wrong.returncode == 1
        assert wrong.stderr.startswith(complaint)
    assert said(stored, "evict", "--namespace", "0001").startswith("3 records, ")
    assert stored.stats().tokens == 1


def test_evict_and_flush(stored: Cachestore) -> None:
    assert said(stored, "evict", "3").startswith("1 records, ")
    assert stored.stats().tokens == 513
    with stored.client() as client:
        client.lookup(entries.NAMESPACE, entries.tokens(600), 10)
        assert said(stored, "flush").endswith("; 1 in use or pinned stay\n")
    assert stored.stats().tokens == 256


def test_pin_and_unpin(stored: Cachestore) -> None:
    assert said(stored, "pin", "2").startswith("2 records, ")
    said(stored, "flush")
    assert [e["record_id"] for e in objects(stored, "ls")] == [1, 2]
    assert [e["pinned"] for e in objects(stored, "ls")] == [False, True]
    assert "pinned" in said(stored, "ls")
    assert stored.stats().pinned == 1
    assert said(stored, "unpin", "2") == ""
    assert said(stored, "flush").startswith("2 records, ")


def test_inspect_shows_header_and_arrays(stored: Cachestore) -> None:
    found = objects(stored, "inspect", "3")
    assert (found["record_id"], found["codec"], found["rows"]) == (3, "none", 88)
    assert [array["shape"] for array in found["arrays"]] == [[2, 1, 88, 8]] * 2
    assert [array["offset"] % 64 for array in found["arrays"]] == [0, 0]
    table = said(stored, "inspect", "3")
    assert "keys.rows" in table
    assert "2 x 1 x 88 x 8" in table


@pytest.mark.parametrize("command", ["evict", "pin", "unpin", "inspect"])
def test_a_record_that_is_not_there_is_one_line(daemon: Cachestore, command: str) -> None:
    found = admin(daemon.socket, command, "77")
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.startswith("error: record_id 77")
    assert found.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words", [("ls", "--limit", "-1"), ("pin", "-1"), ("evict", str(2**64)), ("inspect", "x")]
)
def test_a_number_that_none_can_have_is_one_line(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.count("\n") == 1
    assert words[-1] in said


def test_verify_finds_nothing_wrong(stored: Cachestore) -> None:
    assert said(stored, "verify").startswith("4 records, ")
    assert said(stored, "verify").endswith(": as they should be\n")


def spoil(client: Client, record_id: int, offset: int) -> None:
    """Overwrites a byte of a record behind the daemon's back."""
    (lease,) = [client.lookup(entries.NAMESPACE, entries.tokens(600), 600)]
    (span,) = [span for span in lease.spans if span.record_id == record_id]
    client._slabs.map(span.slab_id)[span.offset + offset] ^= 1


def test_checkpoints_are_seen_kept_and_dropped_with_their_rows(daemon: Cachestore) -> None:
    with daemon.client() as client:
        records.write(client, entries.tokens(600), checkpoints=(300, 600))
    found = objects(daemon, "ls")
    assert [entry["record_id"] for entry in found] == [1, 2, 3, 4, 5]
    assert [entry["checkpoint"] for entry in found] == [0, 0, 0, 300, 600]
    place = [found[3][name] for name in ("parent_record_id", "first_token", "tokens")]
    assert place == [2, 299, 1]
    assert sum(entry["bytes"] for entry in found) == daemon.stats().bytes_used
    assert "checkpoint at 300" in said(daemon, "ls")
    (namespace,) = objects(daemon, "namespaces")
    assert (namespace["checkpointed"], namespace["checkpoints"]) == (True, 2)
    assert namespace["bytes_checkpoints"] == found[3]["bytes"] + found[4]["bytes"]
    assert "checkpoints" in said(daemon, "namespaces")
    rows = [objects(daemon, "inspect", record_id)["rows"] for record_id in ("4", "1")]
    assert rows == [1, 256]
    assert said(daemon, "verify").startswith("5 records, ")
    assert said(daemon, "pin", "4").startswith("2 records, 1 checkpoints, ")
    assert said(daemon, "flush").startswith("1 records, 1 checkpoints, ")
    assert said(daemon, "unpin", "4") == ""
    assert said(daemon, "evict", "4").startswith("2 records, 1 checkpoints, ")
    assert daemon.stats().bytes_used == 0


def test_verify_shows_how_far_it_is_on_a_terminal(stored: Cachestore) -> None:
    with on_terminal((*ADMIN, "--socket", str(stored.socket), "verify")) as seen:
        until(lambda: seen.sees("100%"), "all to be read")
        seen.read_all()
        assert seen.process.wait(timeout=20) == 0
    assert "reading" in seen.text
    assert seen.text.rstrip().endswith(": as they should be")


def test_verify_names_a_broken_checkpoint(daemon: Cachestore) -> None:
    with daemon.client() as client:
        records.write(client, entries.tokens(10), checkpoints=(10,))
        lease = client.lookup(entries.NAMESPACE, entries.tokens(10), 10, checkpointed=True)
        assert lease.checkpoint is not None
        extent = lease.checkpoint.extent
        client._slabs.map(extent.slab_id)[extent.offset] ^= 1
    found = admin(daemon.socket, "verify")
    assert found.stdout.startswith(f"record {lease.checkpoint.id}: ")
    assert found.returncode == 1


def test_verify_names_what_is_broken(stored: Cachestore) -> None:
    with stored.client() as client:
        spoil(client, 2, offset=0)
        spoil(client, 3, offset=12)
    found = admin(stored.socket, "verify")
    assert found.returncode == 1
    lines = found.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines[:-1]] == ["record 3", "record 2"]
    assert lines[-1].endswith(": 2 problems")
    assert admin(stored.socket, "inspect", "2").stderr.startswith("error: ")
    assert stored.stats().check_failures == 0


@pytest.mark.parametrize("record_id", [1, 2, 3])
@pytest.mark.parametrize("place", ["before it", "first", "last"])
def test_verify_compares_the_tokens_with_the_tree(
    stored: Cachestore, record_id: int, place: str
) -> None:
    layout = record.plan(records.SCHEMA, 88 if record_id == 3 else 256)
    digest = len(record.paths(b"", entries.tokens(1), [range(1)])[0]) - TOKEN_BYTES
    offsets = {"before it": 0, "first": digest, "last": digest + layout.rows * TOKEN_BYTES - 1}
    with stored.client() as client:
        spoil(client, record_id, layout.path_offset + offsets[place])
    found = admin(stored.socket, "verify")
    assert found.returncode == 1
    assert found.stdout.startswith(f"record {record_id}: it is of other tokens")


def test_verify_knows_records_of_which_others_hold_the_first_rows(daemon: Cachestore) -> None:
    """Written by two at once, that part in the middle of a record; and what hangs on them."""
    common, ends = entries.tokens(300), [entries.tokens(300, first) for first in (1000, 2000)]
    with daemon.client() as client, daemon.client() as other:
        commits = [
            records.begin(client, common + ends[0], checkpoints=(310, 600)),
            records.begin(other, common + ends[1], checkpoints=(290, 310)),
        ]
        assert [commit() for commit in commits] == [600, 300]
        records.write(client, common + ends[1][:400] + entries.tokens(5, 5000), checkpoints=(402,))
    held = objects(daemon, "ls")
    assert any(entry["first_token"] == 300 for entry in held)
    assert said(daemon, "verify").startswith(f"{len(held)} records, ")
    assert said(daemon, "verify").endswith(": as they should be\n")


def test_others_are_served_while_much_is_verified(daemon: Cachestore) -> None:
    with daemon.client() as client:
        for first in range(3000):
            records.write(client, entries.tokens(1, first))
        steps = client.verify()
        first_step = next(steps)
        assert 0 < first_step.records_done < first_step.records_total == 3000
        assert client.lookup(entries.NAMESPACE, entries.tokens(1), 1).rows == 1
        *_, last = steps
        assert last.records_done == last.records_total
        assert last.bytes_done == last.bytes_total > 0


def test_bad_requests_are_refused_by_name(daemon: Cachestore) -> None:
    for arguments in (
        ["evict"],
        ["evict", "1", "--namespace", "0"],
        ["pin", "x"],
        ["ls", "--sort", "x"],
    ):
        found = admin(daemon.socket, *arguments)
        assert (found.returncode, found.stderr.count("\n")) == (2, 1)
