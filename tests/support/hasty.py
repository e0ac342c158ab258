"""A real cachestore with little patience: no flag does that."""

import functools
import sys

from cachestore import checkpoints, cli
from cachestore.checkpoints import BRANCH_IDLE_SECONDS
from cachestore.config import StoreConfig


def program(
    lapse_seconds: float = 30.0, branch_idle_seconds: float = BRANCH_IDLE_SECONDS
) -> list[str]:
    """Its leases and reservations lapse, and branches count as idle, after so long."""
    times = map(str, (lapse_seconds, branch_idle_seconds))
    return [sys.executable, "-m", "tests.support.hasty", *times]


if __name__ == "__main__":
    lapse, idle = float(sys.argv.pop(1)), float(sys.argv.pop(1))
    short = functools.partial(StoreConfig, lease_seconds=lapse, reservation_seconds=lapse)
    assert vars(cli)["StoreConfig"] is StoreConfig  # where the flags become one
    vars(cli)["StoreConfig"] = short
    checkpoints.BRANCH_IDLE_SECONDS = idle
    sys.exit(cli.main())
