"""`cachestore serve`: flags in, exit code out."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from cachestore import endpoint, logs, shm
from cachestore.budget import default_budget_bytes, parse_budget, physical_memory_bytes
from cachestore.config import BUDGET_BYTES_MIN, CHECKPOINTS_MAX, CHECKPOINTS_MAX_MIN, StoreConfig
from cachestore.flags import Parser, cachestore_socket, seconds
from cachestore.server import ServerConfig, run

EXIT_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    flags = _parser().parse_args(arguments)
    try:
        logs.begin(logs.config_of(flags, "cachestore"))
        config = _config(flags)
    except ValueError as error:
        logs.last_words(error)
        return EXIT_USAGE
    try:
        run(config)
    except endpoint.EndpointError as error:
        logs.last_words(error)
        return endpoint.EXIT_HELD if isinstance(error, endpoint.Held) else EXIT_USAGE
    return 0


def _config(flags: argparse.Namespace) -> ServerConfig:
    """Raises ValueError when a flag or an environment variable cannot be used."""
    path = cachestore_socket(flags.socket)
    shm.way_chosen()  # better refused now than at the first slab
    store = StoreConfig(budget_bytes=flags.budget, checkpoints_max=flags.checkpoints_max)
    return ServerConfig(path, store, flags.idle_exit, flags.reflection)


def _parser() -> Parser:
    parser = Parser(prog="cachestore", description="The prefix cache daemon.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    serve = commands.add_parser("serve", help="run the daemon in the foreground")
    serve.add_argument(
        "--socket",
        type=Path,
        metavar="PATH",
        help="gRPC socket; the session socket is PATH.fd (default: in the runtime directory)",
    )
    serve.add_argument(
        "--budget",
        type=_budget,
        metavar="BYTES",
        default=default_budget_bytes(physical_memory_bytes()),
        help=f"shared memory to hold at most, like 8GiB (default: an eighth of the machine's "
        f"memory; at least {BUDGET_BYTES_MIN >> 20}MiB)",
    )
    serve.add_argument(
        "--checkpoints-max",
        type=int,
        metavar="N",
        default=CHECKPOINTS_MAX,
        help="checkpoints to keep of one conversation, and again of its idle branches, for models "
        f"that need them (default: %(default)s; at least {CHECKPOINTS_MAX_MIN})",
    )
    serve.add_argument(
        "--idle-exit",
        type=seconds,
        metavar="SECONDS",
        help="end after that long without an engine (default: never)",
    )
    serve.add_argument(
        "--reflection", action="store_true", help="let gRPC clients ask what is served"
    )
    logs.add_flags(serve)
    return parser


def _budget(text: str) -> int:
    try:
        return parse_budget(text, physical_memory_bytes())
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
