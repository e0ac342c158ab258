"""One slab as large as SLAB_MIB says, with its descriptor passed to two processes of this user.

16 MiB by default; SLAB_MIB=1280 is for machines whose way of passing descriptors is not known to
carry that much (docs/verify-on-mac.md).
"""

import os
import subprocess
import sys
from pathlib import Path

from cachestore.client import NewCheckpoint
from tests.support import entries
from tests.support.daemons import start_cachestore

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
SLAB_MIB = int(os.environ.get("SLAB_MIB", "16"))
POSITION = 10
MARKS = {0: b"first", SLAB_MIB * MIB // 2: b"middle", SLAB_MIB * MIB - 4: b"last"}

READ = """
import sys
from cachestore.client import Client
from tests.support import entries
with Client.connect(sys.argv[1]) as client:
    position = int(sys.argv[2])
    lease = client.lookup(entries.NAMESPACE, entries.tokens(11), position, checkpointed=True)
    state = client.record(lease.checkpoint)
    for start in sys.argv[3:]:
        print(bytes(state[int(start) : int(start) + 6]).rstrip(bytes(1)).decode())
"""


def test_a_checkpoint_larger_than_other_slabs_is_shared(directory: Path) -> None:
    size = SLAB_MIB * MIB
    with start_cachestore(directory, budget=f"{2 * SLAB_MIB + 64}MiB") as daemon:
        with daemon.client() as client:
            reservation = client.reserve(
                entries.NAMESPACE,
                entries.tokens(11),
                0,
                entries.OVERHEAD_BYTES,
                entries.ROW_BYTES,
                "",
                checkpointed=True,
                checkpoints=[NewCheckpoint(POSITION, size)],
            )
            (staged,) = reservation.checkpoints
            state = client.extent(staged)
            for start, mark in MARKS.items():
                state[start : start + len(mark)] = mark
            lengths = [piece.extent.length for piece in reservation.pieces]
            assert client.commit(reservation.id, lengths, [size]) == 11
            del state
        command = [sys.executable, "-c", READ, str(daemon.socket), str(POSITION), *map(str, MARKS)]
        read = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
        assert (read.returncode, read.stderr) == (0, b"")
        assert read.stdout.split() == [*MARKS.values()]
