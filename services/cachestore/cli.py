"""`cachestore serve`: flags in, exit code out."""

import argparse
from collections.abc import Sequence

from cachestore import endpoint, logs, serve, settings, shm
from cachestore.config import StoreConfig
from cachestore.flags import Parser, add_version, cachestore_socket
from cachestore.server import ServerConfig, run

EXIT_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    flags = _parser().parse_args(arguments)
    try:
        logs.begin(logs.config_of(flags, "cachestore"))
        config = _config(flags)
    except ValueError as error:
        logs.last_words(flags.origins.told(error))
        return EXIT_USAGE
    try:
        run(config)
    except endpoint.EndpointError as error:
        logs.last_words(flags.origins.told(error))
        return endpoint.EXIT_HELD if isinstance(error, endpoint.Held) else EXIT_USAGE
    return 0


def _config(flags: argparse.Namespace) -> ServerConfig:
    """Raises ValueError when a flag or an environment variable cannot be used."""
    path = cachestore_socket(flags.socket)
    shm.way_chosen()  # better refused now than at the first slab
    store = StoreConfig(budget_bytes=flags.budget, checkpoints_max=flags.checkpoints_max)
    return ServerConfig(path, store, flags.idle_exit, bool(flags.reflection), flags.metrics)


def _parser() -> Parser:
    parser = Parser(prog="cachestore", description="The prefix cache daemon.")
    add_version(parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=settings.Parser)
    serving = commands.add_parser(
        "serve", table=serve.TABLE, help="run the daemon in the foreground"
    )
    serve.add_flags(serving)
    return parser
