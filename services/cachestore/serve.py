"""Flags of `cachestore serve`. An engine that starts a store asks here what the user's settings say
of it."""

import argparse
from pathlib import Path

from cachestore import logs, settings
from cachestore.budget import default_budget_bytes, physical_memory_bytes
from cachestore.config import BUDGET_BYTES_MIN, CHECKPOINTS_MAX, CHECKPOINTS_MAX_MIN
from cachestore.flags import add_metrics, add_reflection, seconds, store_budget, whole

TABLE = "cachestore"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--socket",
        type=Path,
        metavar="PATH",
        help="gRPC socket; the session socket is PATH.fd (default: in the runtime directory)",
    )
    parser.add_argument(
        "--budget",
        type=store_budget,
        metavar="BYTES",
        default=default_budget_bytes(physical_memory_bytes()),
        help=f"shared memory to hold at most, like 8GiB, and at least {BUDGET_BYTES_MIN >> 20}MiB "
        "(default: an eighth of the machine's memory)",
    )
    parser.add_argument(
        "--checkpoints-max",
        type=whole(CHECKPOINTS_MAX_MIN),
        metavar="N",
        default=CHECKPOINTS_MAX,
        help="checkpoints to keep of one conversation, and again of its idle branches, for models "
        f"that need them; at least {CHECKPOINTS_MAX_MIN} (default: %(default)s)",
    )
    parser.add_argument(
        "--idle-exit",
        type=seconds,
        metavar="SECONDS",
        help="end after that long without an engine (default: never)",
    )
    add_metrics(parser)
    add_reflection(parser)
    logs.add_flags(parser)


def settings_without_flags(file: Path | None) -> argparse.Namespace:
    """What the environment and a file say of a store whose command line is empty but for --config.
    Ends the process with an error line when they cannot be used."""
    parser = settings.Parser(prog="cachestore serve", table=TABLE)
    add_flags(parser)
    return parser.parse_args([] if file is None else ["--config", str(file)])
