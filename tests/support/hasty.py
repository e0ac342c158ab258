"""A real cachestore whose leases and reservations lapse soon: no flag does that."""

import functools
import sys

from cachestore import cli
from cachestore.config import StoreConfig


def program(seconds: float) -> list[str]:
    return [sys.executable, "-m", "tests.support.hasty", str(seconds)]


if __name__ == "__main__":
    soon = float(sys.argv.pop(1))
    short = functools.partial(StoreConfig, lease_seconds=soon, reservation_seconds=soon)
    cli.StoreConfig = short  # type: ignore[assignment,misc]
    sys.exit(cli.main())
