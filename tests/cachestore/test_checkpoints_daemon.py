"""Checkpoints over real sockets, as an engine uses them."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from cachestore.client import Client, MatchKind, NewCheckpoint, StoreRefused
from tests.support import entries
from tests.support.daemons import Cachestore, start_cachestore
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
PROMPT = entries.tokens(600)

STOP_BEFORE_THE_COMMIT = """
import sys
from cachestore.client import Client, NewCheckpoint
from tests.support import entries
client = Client.connect(sys.argv[1])
reservation = client.reserve(
    entries.NAMESPACE, entries.tokens(900), 0, 100, 1000, "", checkpointed=True,
    checkpoints=[NewCheckpoint(500, 5000), NewCheckpoint(900, 5000)],
)
for staged in (*reservation.pieces, *reservation.checkpoints):
    client.extent(staged)[:1000] = bytes(1000)
print("halfway", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def client(daemon: Cachestore) -> Iterator[Client]:
    with daemon.client() as session:
        yield session


def test_rows_and_checkpoints_come_back_as_they_were_written(client: Client) -> None:
    assert entries.write(client, PROMPT, checkpoints=(400, 599)) == 600
    lease = client.lookup(entries.NAMESPACE, PROMPT, 599, checkpointed=True)
    assert (lease.kind, lease.rows) == (MatchKind.EXACT, 599)
    assert entries.is_intact(client, lease)
    checkpoint = lease.checkpoint
    assert checkpoint is not None
    assert checkpoint.position == 599
    assert bytes(client.record(checkpoint)) == entries.state(599)

    shorter = client.lookup(entries.NAMESPACE, PROMPT[: 4 * 500], 499, checkpointed=True)
    assert (shorter.kind, shorter.rows) == (MatchKind.SUPERSEQUENCE, 400)
    assert entries.is_intact(client, shorter)
    assert shorter.checkpoint is not None
    assert bytes(client.record(shorter.checkpoint)) == entries.state(400)
    assert shorter.checkpoint.id != checkpoint.id

    before = client.lookup(entries.NAMESPACE, PROMPT, 399, checkpointed=True)
    assert (before.kind, before.rows, before.id, before.checkpoint) == (MatchKind.MISS, 0, 0, None)


def test_a_checkpoint_can_follow_its_rows(client: Client) -> None:
    entries.write(client, PROMPT, checkpoints=(599,))
    again = client.reserve(
        entries.NAMESPACE,
        PROMPT,
        0,
        entries.OVERHEAD_BYTES,
        entries.ROW_BYTES,
        "",
        checkpointed=True,
        checkpoints=[NewCheckpoint(300, 700), NewCheckpoint(599, 700)],
    )
    assert (again.have, again.pieces) == (600, ())
    assert [staged.position for staged in again.checkpoints] == [300]
    client.extent(again.checkpoints[0])[:7] = b"a state"
    assert client.commit(again.id, [], [7]) == 0
    lease = client.lookup(entries.NAMESPACE, PROMPT, 598, checkpointed=True)
    assert lease.rows == 300
    assert lease.checkpoint is not None
    assert bytes(client.record(lease.checkpoint)) == b"a state"


def test_a_client_killed_before_its_commit_leaves_neither(daemon: Cachestore) -> None:
    with daemon.client() as client:
        entries.write(client, PROMPT, checkpoints=(400,))
    before = daemon.stats()
    with subprocess.Popen(
        [sys.executable, "-c", STOP_BEFORE_THE_COMMIT, daemon.socket],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"halfway\n"
        assert daemon.stats().bytes_reserved > 10_000
        victim.kill()
        victim.wait()
        until(lambda: daemon.stats().sessions == 0, "the end of its session")
    after = daemon.stats()
    assert (after.bytes_reserved, after.bytes_quarantined, after.reservations) == (0, 0, 0)
    assert (after.bytes_used, after.tokens) == (before.bytes_used, before.tokens)
    assert (after.checkpoints, after.bytes_checkpoints) == (1, before.bytes_checkpoints)
    with daemon.client() as client:
        lease = client.lookup(entries.NAMESPACE, entries.tokens(900), 900, checkpointed=True)
        assert lease.rows == 400


def test_a_conversation_keeps_as_many_as_the_flag_says(directory: Path) -> None:
    with start_cachestore(directory, checkpoints_max=3) as daemon, daemon.client() as client:
        for turn in range(1, 10):
            entries.write(client, entries.tokens(100 * turn), checkpoints=(100 * turn,))
        found = daemon.stats()
        # And the first one, which others most likely share.
        assert (found.checkpoints, found.checkpoints_surplus) == (4, 5)
        served = [
            client.lookup(
                entries.NAMESPACE, entries.tokens(900), 100 * turn, checkpointed=True
            ).rows
            for turn in range(1, 10)
        ]
    assert served == [100, 100, 100, 100, 100, 100, 700, 800, 900]


def test_who_waits_is_answered_when_the_checkpoint_is_there(
    daemon: Cachestore, client: Client
) -> None:
    announced = client.lookup(
        entries.NAMESPACE, PROMPT, 599, announce=True, checkpointed=True, checkpoints=[300, 599]
    )
    assert announced.rows == 0
    branch = PROMPT[: 4 * 450] + entries.tokens(100, first=10_000)
    with daemon.client() as other:
        entries.write(other, PROMPT[: 4 * 300], checkpoints=(300,))
        # Of what is announced no more than that is shared, so it does not wait.
        lease = other.lookup(entries.NAMESPACE, branch, 549, False, 60.0, checkpointed=True)
    assert lease.rows == 300


def test_the_kind_of_a_namespace_does_not_change(client: Client) -> None:
    entries.write(client, PROMPT)
    for call in (
        lambda: client.lookup(entries.NAMESPACE, PROMPT, 599, checkpointed=True),
        lambda: entries.write(client, entries.tokens(10, 5), checkpoints=(10,)),
    ):
        with pytest.raises(StoreRefused, match=r"checkpointed is True") as refusal:
            call()
        assert refusal.value.code is grpc.StatusCode.FAILED_PRECONDITION
